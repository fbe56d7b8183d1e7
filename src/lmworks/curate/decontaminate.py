"""Documents that share word n-grams with evaluation sets are dropped, and listed with what they share.

As for GPT-3 (Brown et al. 2020, appendix C): 13 lower-case words; an n-gram that many documents have is a phrase of the
language, not a leak. Sets of code use the same words (identifiers, numbers), where 13 are a line or two; n-grams made
of numbers, or of few words over and over, are left out.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import DataError, SpecError
from ..spec.files import write_whole
from ..spec.schema import opt
from .dedup import drop
from .documents import CorpusStage, Decide, Document, Summary
from .minhash import BATCH
from .shingles import ngram_hashes, word_bytes, word_hashes

HITS, NAMES, COUNTS, LIST = "hits.npy", "documents.json", "counts.npy", "hits.jsonl"
HIT = np.dtype([("position", "<i8"), ("ngram", "<i8")])
NAMED = ("task_id", "id", "name", "question_id")  # fields that name an item
FILTER_BITS = 20
LISTED = 1000  # in a data card; the file has all


@dataclass(frozen=True)
class EvaluationSet:
    """n-grams of all items, by their hash."""

    sizes: tuple[int, ...]  # words of an n-gram: n, and fewer for items that are shorter
    hashes: NDArray[np.uint64]  # sorted
    texts: list[str]  # of each n-gram
    items: list[str]  # the first item that has it
    present: NDArray[np.bool_]  # by the first bits of a hash: most n-grams need no search

    def find(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(which of these are in the set, which n-grams they are)."""
        maybe = np.flatnonzero(self.present[hashes >> np.uint64(64 - FILTER_BITS)])
        at = np.minimum(np.searchsorted(self.hashes, hashes[maybe]), len(self.hashes) - 1)
        same = self.hashes[at] == hashes[maybe]
        return maybe[same], at[same]


@functools.lru_cache(maxsize=2)
def read_sets(files: tuple[str, ...], fields: tuple[str, ...], n: int, least: int) -> EvaluationSet:
    found: dict[int, tuple[str, str]] = {}
    sizes = set()
    for file in files:
        for item, text in items_of(file, fields):
            words = split(text)
            size = min(n, len(words))
            if size < least:
                continue
            hashes = ngram_hashes(word_hashes([text.lower()], fold=False)[0], size)
            for at, value in enumerate(hashes.tolist()):
                gram = words[at : at + size]
                if is_distinctive(gram):
                    sizes.add(size)
                    found.setdefault(value, (" ".join(gram), item))
    if not found:
        raise DataError(f"{', '.join(files)}: no item has {least} words in a row; use a smaller min_words")
    hashes = np.array(sorted(found), np.uint64)
    present = np.zeros(2**FILTER_BITS, bool)
    present[hashes >> np.uint64(64 - FILTER_BITS)] = True
    texts, items = zip(*(found[value] for value in hashes.tolist()), strict=True)
    return EvaluationSet(tuple(sorted(sizes)), hashes, list(texts), list(items), present)


def split(text: str) -> list[str]:
    return [word.decode("utf-8", "replace") for word in word_bytes(text.lower(), fold=False).split(b"\0") if word]


def is_distinctive(gram: Sequence[str]) -> bool:
    """Half of the words or more differ, and half or more have a letter."""
    return 2 * len(set(gram)) >= len(gram) and 2 * sum(any(map(str.isalpha, word)) for word in gram) >= len(gram)


def items_of(file: str, fields: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, text): of a text file all of it, of JSON lines each field that is a string or one of those named."""
    path = Path(file)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read the evaluation set {file}: {error}") from None
    text = raw.decode("utf-8", "replace")
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield from line_items(f"{file} line {number}", line, fields)
    else:
        yield path.name, text


def line_items(where: str, line: str, fields: Sequence[str]) -> Iterator[tuple[str, str]]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is not a JSON object")
    if missing := [field for field in fields if not isinstance(record.get(field), str)]:
        raise DataError(f"{where}: no text in field {missing[0]!r}; it has {', '.join(record)}")
    name = next((str(record[field]) for field in NAMED if field in record), where)
    for field, value in record.items():
        if isinstance(value, str) and (field in fields or not fields):
            yield name, value


class Hits(Summary):
    def __init__(self, into: Path, known: EvaluationSet) -> None:
        self.into, self.known = into, known
        self.held: list[Document] = []
        self.size = self.count = 0
        self.found: list[NDArray] = []
        self.names: dict[int, str] = {}

    def add(self, document: Document) -> None:
        self.held.append(document)
        self.size += len(document.text)
        if self.size >= BATCH:
            self.flush()

    def flush(self) -> None:
        words, starts = word_hashes([document.text.lower() for document in self.held], fold=False)
        for size in self.known.sizes:
            at, ngram = self.known.find(ngram_hashes(words, size))
            owner = np.searchsorted(starts, at, side="right") - 1
            inside = at + size <= starts[owner + 1]  # not over the end of its document
            hits = np.empty(int(inside.sum()), HIT)
            hits["position"], hits["ngram"] = owner[inside] + self.count, ngram[inside]
            self.found.append(np.unique(hits))
            self.names |= {int(one) + self.count: self.held[one].id for one in np.unique(owner[inside])}
        self.count += len(self.held)
        self.held, self.size = [], 0

    def close(self) -> None:
        if self.held:
            self.flush()
        hits = np.unique(np.concatenate([np.empty(0, HIT), *self.found]))
        np.save(self.into / HITS, hits)
        write_whole(self.into / NAMES, json.dumps(self.names))


@dataclass(frozen=True)
class Decontaminate(CorpusStage):
    section: ClassVar[str] = "stages.decontaminate"
    name: ClassVar[str] = "decontaminate"
    about: ClassVar[str] = "drops documents that share word n-grams with evaluation sets, and lists what they share"
    source: ClassVar[str] = "GPT-3 (Brown et al. 2020), appendix C"
    files: ClassVar[tuple[str, ...]] = ("against",)

    against: list[str] = opt(list, "evaluation sets: .jsonl, .jsonl.gz or text files")
    fields: list[str] = opt(list, "fields of JSON lines (none: each that is a string)")
    ngram: int = opt(13, "words in a row", ge=1, le=64)
    min_words: int = opt(8, "an item with fewer than n words counts whole, if it has these", ge=1)
    max_documents: int = opt(10, "an n-gram that more documents share is a common phrase", ge=1)

    def check(self) -> None:
        if self.min_words > self.ngram:
            raise SpecError(f"{self.key('min_words')} = {self.min_words} is more than ngram = {self.ngram}")

    def require(self) -> None:
        if not self.against:
            raise SpecError(f'{self.key("against")} names no evaluation set: against = ["HumanEval.jsonl"]')
        self.known()

    def known(self) -> EvaluationSet:
        return read_sets(tuple(self.against), tuple(self.fields), self.ngram, self.min_words)

    def summarise(self, part: int, into: Path) -> Summary:
        return Hits(into, self.known())

    def merge(self, task: int, summaries: Sequence[Path], into: Path) -> None:
        counts = np.zeros(len(self.known().hashes), np.int64)
        for folder in summaries:
            counts += np.bincount(np.load(folder / HITS)["ngram"], minlength=len(counts))
        np.save(into / COUNTS, counts)

    def conclude(self, merged: Sequence[Path], summaries: Sequence[Path], into: Path) -> None:
        """One line for each document and item, with the first n-gram that they share."""
        known = self.known()
        with open(into / LIST, "w", encoding="utf-8") as file:
            for folder in summaries:
                names = json.loads((folder / NAMES).read_text())
                listed = set()
                for position, ngram in self.distinctive_hits(merged[0], folder).tolist():
                    if (position, known.items[ngram]) not in listed:
                        listed.add((position, known.items[ngram]))
                        hit = {
                            "document": names[str(position)],
                            "item": known.items[ngram],
                            "ngram": known.texts[ngram],
                        }
                        file.write(json.dumps(hit) + "\n")

    def distinctive_hits(self, merged: Path, summary: Path) -> NDArray:
        hits = np.load(summary / HITS)
        return hits[np.load(merged / COUNTS)[hits["ngram"]] <= self.max_documents]

    def open(self, part: int, merged: Sequence[Path], concluded: Path, summary: Path) -> Decide:
        return drop("contaminated", np.unique(self.distinctive_hits(merged[0], summary)["position"]))

    def report(self, merged: Sequence[Path], concluded: Path) -> dict[str, Any]:
        known, counts = self.known(), np.load(merged[0] / COUNTS)
        common = np.flatnonzero(counts > self.max_documents)
        with open(concluded / LIST, encoding="utf-8") as file:
            hits = [json.loads(line) for line in file]
        return {
            "items": len(set(known.items)),
            "items_hit": len({hit["item"] for hit in hits}),
            "hits": hits[:LISTED],
            "common_phrases": [known.texts[at] for at in common[np.argsort(-counts[common], kind="stable")][:LISTED]],
        }


STAGES = (Decontaminate,)
