"""Deduplication: of equal documents, equal lines and near-equal documents the first in the corpus is kept."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..spec.schema import opt
from .clusters import HeadWriter, read_report, write_report
from .documents import KEPT, CorpusStage, Decide, Document, Summary
from .key_files import SLOTS, by_part, connected, in_turn, read_part, repeats, write_keys, write_pairs
from .minhash import BATCH, CODE, PROSE, MinHash, band_keys, signatures
from .verify import SetWriter, write_similar

KEYS, REPEATS = "keys.bin", "repeats.bin"
TASKS = 8  # ranges of the keys that are merged at once


def text_key(text: str) -> int:
    """64 bits: of a billion documents one is taken for another with a chance of 3 %."""
    raw = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def normal(text: str) -> str:
    """What is compared: white space at the ends of lines and between them does not count."""
    return "\n".join(line.rstrip() for line in text.splitlines() if not line.isspace() and line)


class Keys(Summary):
    """One key for each document, or several: they are numbered through the part."""

    def __init__(self, into: Path) -> None:
        self.into = into
        self.keys = array("Q")
        self.positions = array("Q")
        self.count = 0

    def put(self, keys: Iterable[int | None]) -> None:
        """None takes a number and is compared with nothing."""
        for key in keys:
            if key is not None:
                self.keys.append(key)
                self.positions.append(self.count)
            self.count += 1

    def close(self) -> None:
        keys = np.frombuffer(self.keys, np.uint64) if self.keys else np.empty(0, np.uint64)
        positions = np.frombuffer(self.positions, np.uint64) if self.positions else np.empty(0, np.uint64)
        write_keys(self.into / KEYS, keys[:, None], positions)


class DocumentKeys(Keys):
    def add(self, document: Document) -> None:
        self.put([text_key(normal(document.text))])


class FirstSeen(CorpusStage):
    """Keys of one column; `conclude` leaves the repeats of each part."""

    @property
    def merge_tasks(self) -> int:
        return TASKS

    def merge(self, task: int, summaries: Sequence[Path], into: Path) -> None:
        width = SLOTS // TASKS
        slots = range(task * width, (task + 1) * width)
        write_pairs(into / REPEATS, repeats([folder / KEYS for folder in summaries], 0, 1, slots))

    def conclude(self, merged: Sequence[Path], summaries: Sequence[Path], into: Path) -> None:
        by_part([folder / REPEATS for folder in merged], len(summaries), into)


def drop(reason: str, positions: NDArray[np.int64]) -> Decide:
    repeated = in_turn(positions)
    return lambda document: reason if repeated() else KEPT


@dataclass(frozen=True)
class Exact(FirstSeen):
    section: ClassVar[str] = "stages.exact"
    name: ClassVar[str] = "exact"
    deduplicates: ClassVar[bool] = True
    about: ClassVar[str] = "drops documents whose text, but for white space around lines, was seen before"

    def summarise(self, part: int, into: Path) -> Summary:
        return DocumentKeys(into)

    def open(self, part: int, merged: Sequence[Path], concluded: Path, summary: Path) -> Decide:
        return drop("exact_duplicate", read_part(concluded, part))


class LineKeys(Keys):
    def __init__(self, into: Path, min_chars: int) -> None:
        super().__init__(into)
        self.min_chars = min_chars

    def add(self, document: Document) -> None:
        lines = (line.strip() for line in document.text.splitlines())
        self.put(text_key(line) if len(line) >= self.min_chars else None for line in lines)


@dataclass(frozen=True)
class Lines(FirstSeen):
    section: ClassVar[str] = "stages.lines"
    name: ClassVar[str] = "lines"
    deduplicates: ClassVar[bool] = True
    about: ClassVar[str] = "removes long lines that were seen before, and documents that lose most of their text"
    source: ClassVar[str] = "CCNet (Wenzek et al. 2020) removes repeated paragraphs by a hash; C4 (Raffel et al. 2020)"

    min_chars: int = opt(40, "shorter lines are left alone: closing braces, `return 0;`", ge=1)
    max_removed: float = opt(0.5, "share of a document's characters; one that loses more is dropped", ge=0, le=1)

    def summarise(self, part: int, into: Path) -> Summary:
        return LineKeys(into, self.min_chars)

    def open(self, part: int, merged: Sequence[Path], concluded: Path, summary: Path) -> Decide:
        repeated = in_turn(read_part(concluded, part))

        def decide(document: Document) -> str:
            lines = document.text.splitlines(keepends=True)
            kept = [line for line in lines if not repeated()]
            if len(kept) == len(lines):
                return KEPT
            text = "".join(kept)
            if len(document.text) - len(text) > self.max_removed * len(document.text):
                return "lines_mostly_repeated"
            document.note("lines removed", len(lines) - len(kept))
            document.text = text
            return KEPT

        return decide


# --- near duplicates --------------------------------------------------------------------------------------


class BandKeys(Summary):
    def __init__(self, into: Path, config: MinHash, verified: bool) -> None:
        self.into, self.config = into, config
        self.heads = HeadWriter(into)
        self.sets = SetWriter(into) if verified else None
        self.held: list[str] = []
        self.size = self.count = 0
        self.keys: list[NDArray[np.uint64]] = []
        self.positions: list[NDArray[np.int64]] = []

    def add(self, document: Document) -> None:
        self.heads.add(document)
        self.held.append(document.text)
        self.size += len(document.text)
        if self.size >= BATCH:
            self.flush()

    def flush(self) -> None:
        signature, filled = signatures(self.held, self.config)
        self.keys.append(band_keys(signature[filled], self.config))
        self.positions.append(np.flatnonzero(filled) + self.count)
        if self.sets:
            self.sets.add(self.held, self.config)
        self.count += len(self.held)
        self.held, self.size = [], 0

    def close(self) -> None:
        if self.held or not self.keys:
            self.flush()
        self.heads.close()
        if self.sets:
            self.sets.close()
        write_keys(self.into / KEYS, np.concatenate(self.keys), np.concatenate(self.positions))


@dataclass(frozen=True)
class NearDuplicates(CorpusStage):
    section: ClassVar[str] = "stages.minhash"
    name: ClassVar[str] = "minhash"
    deduplicates: ClassVar[bool] = True
    about: ClassVar[str] = "drops documents that share most of their word 5-grams with an earlier one (MinHash-LSH)"
    source: ClassVar[str] = "FineWeb (Penedo et al. 2024): 14 bands of 8; The Stack (Kocetkov et al. 2022): Jaccard 0.7"

    preset: str = opt("prose", "prose: 14 bands of 8 rows; code: 25 of 10, exact words", choices=("prose", "code"))
    bands: int = opt(0, "bands of a signature (0: the preset's)", ge=0, le=256)
    rows: int = opt(0, "rows of a band (0: the preset's)", ge=0, le=64)
    ngram: int = opt(5, "words of a shingle", ge=1, le=64)
    verify: float = opt(
        0.0,
        "least Jaccard similarity of two candidates' shingles, counted exactly (0: candidates are duplicates)",
        ge=0,
        le=1,
    )
    seed: int = opt(1, "of the hash functions", ge=0)

    @property
    def config(self) -> MinHash:
        preset = CODE if self.preset == "code" else PROSE
        return MinHash(self.bands or preset.bands, self.rows or preset.rows, self.ngram, preset.fold, self.seed)

    @property
    def merge_tasks(self) -> int:
        return self.config.bands

    def summarise(self, part: int, into: Path) -> Summary:
        return BandKeys(into, self.config, self.verify > 0)

    def merge(self, task: int, summaries: Sequence[Path], into: Path) -> None:
        files = [folder / KEYS for folder in summaries]
        write_pairs(into / REPEATS, repeats(files, task, self.config.bands))

    def conclude(self, merged: Sequence[Path], summaries: Sequence[Path], into: Path) -> None:
        pairs = [folder / REPEATS for folder in merged]
        if self.verify:
            pairs = [write_similar(pairs, summaries, self.verify, into)]
        connected(pairs, len(summaries), into)
        write_report(into, summaries)

    def report(self, merged: Sequence[Path], concluded: Path) -> dict[str, Any]:
        return read_report(concluded)

    def open(self, part: int, merged: Sequence[Path], concluded: Path, summary: Path) -> Decide:
        return drop("near_duplicate", read_part(concluded, part))


STAGES = (Exact, Lines, NearDuplicates)
