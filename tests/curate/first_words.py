"""A stage over the corpus for tests of the machinery: of documents that begin with the same word, the first is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lmworks.curate.documents import KEPT, CorpusStage, Decide, Document, Summary
from lmworks.spec.schema import opt


def first_word(document: Document) -> str:
    return document.text.split()[0]


class Words(Summary):
    def __init__(self, into: Path) -> None:
        self.into, self.words = into, list[str]()

    def add(self, document: Document) -> None:
        self.words.append(first_word(document))

    def close(self) -> None:
        (self.into / "words.json").write_text(json.dumps(self.words))


@dataclass(frozen=True)
class FirstWords(CorpusStage):
    section: ClassVar[str] = "stages.first_words"
    name: ClassVar[str] = "first_words"
    about: ClassVar[str] = "One document for each first word."
    deduplicates: ClassVar[bool] = True

    tasks: int = opt(2, "Merge tasks.", ge=1)

    @property
    def merge_tasks(self) -> int:
        return self.tasks

    def summarise(self, part: int, into: Path) -> Summary:
        return Words(into)

    def merge(self, task: int, summaries: Sequence[Path], into: Path) -> None:
        """Words of this task by length → the part where each is first."""
        first: dict[str, int] = {}
        for part, summary in enumerate(summaries):
            for word in json.loads((summary / "words.json").read_text()):
                if len(word) % self.tasks == task:
                    first.setdefault(word, part)
        (into / "first.json").write_text(json.dumps(first))

    def open(self, part: int, merged: Sequence[Path], concluded: Path, summary: Path) -> Decide:
        first: dict[str, int] = {}
        for folder in merged:
            first |= json.loads((folder / "first.json").read_text())
        seen = set[str]()

        def decide(document: Document) -> str:
            word = first_word(document)
            if first[word] != part or word in seen:
                return "same_first_word"
            seen.add(word)
            return KEPT

        return decide

    def report(self, merged: Sequence[Path], concluded: Path) -> dict[str, Any]:
        return {"words": sum(len(json.loads((folder / "first.json").read_text())) for folder in merged)}
