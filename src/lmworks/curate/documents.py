"""What passes through a pipeline: a document, the stages that change or drop it, and the stages that need all of them.

A corpus is cut into parts (`data.sources.parts_of`): each is an ordered stream of documents, worked on by one process
at a time. The order of a corpus is (part, position); what a stage decides may depend on it, never on how the corpus was
cut, on the number of processes, or on which of them was killed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..spec.schema import Section, opt

KEPT = ""


@dataclass(slots=True)
class Document:
    """`id` names the place that it came from: a path, a path and line, a dataset and row. It is unique in a corpus."""

    id: str
    text: str
    meta: dict[str, Any] = field(default_factory=dict)  # what JSON can hold: source, path, language, license, url, …
    notes: dict[str, int] = field(default_factory=dict)  # what the stage at work changed in it

    def note(self, what: str, count: int = 1) -> None:
        """Counted in the report of the stage: `note("email", 2)` for two addresses that were replaced."""
        self.notes[what] = self.notes.get(what, 0) + count


Decide = Callable[[Document], str]
"""Keeps a document (`KEPT`, the empty string), perhaps with another text or more metadata, or says why it is dropped:
a short constant such as "gopher_short_doc", under which documents are counted."""


class Stage(Section, ABC):
    """A stage with its keys in a pipeline file: a frozen dataclass whose fields are made by `spec.schema.opt`.

    `section` is what its keys are called in errors (`stages.gopher`). Instances are pickled to other processes, so what
    is expensive is made in `open`.
    """

    name: ClassVar[str]  # in a pipeline file and in reports
    about: ClassVar[str]  # one line: what it does
    source: ClassVar[str] = ""  # where its rules and defaults are published
    deduplicates: ClassVar[bool] = False  # what it drops counts as duplicates in the data card
    files: ClassVar[tuple[str, ...]] = ()  # fields that name files: a run is made again where one of them changes

    def require(self) -> None:
        """Raise an error of one line where a package is missing, before any work is done."""


@dataclass(frozen=True)
class DocumentStage(Stage):
    """Decides by the document alone."""

    on: str = opt("all", "Documents that it looks at; others pass.", choices=("all", "code", "prose"))

    @abstractmethod
    def open(self) -> Decide:
        """Called once for each part, in the process that works on it; `lru_cache` what is expensive to load."""


class Summary(ABC):
    """Pass 1 over one part."""

    @abstractmethod
    def add(self, document: Document) -> None:
        """Documents of the part, in order; their positions are 0, 1, 2, …"""

    @abstractmethod
    def close(self) -> None:
        """After the last one. All that was written under the summary's folder is then complete."""


class CorpusStage(Stage):
    """Decides by all documents: two passes with a merge between them.

    1. `summarise` sees the documents of each part, in parallel.
    2. `merge` combines the summaries, as `merge_tasks` tasks in parallel; then `conclude` runs once.
    3. `open` decides about the documents of each part, in the order in which `summarise` saw them.

    Each of them has a folder of its own, empty at the start (a task that was killed starts anew), and reads those of
    the tasks before it. What a folder holds must follow from what was read alone: no time, no process, no random order.
    """

    @property
    def merge_tasks(self) -> int:
        """Independent pieces of the merge, e.g. ranges of hashes. It may depend on the keys alone."""
        return 1

    @abstractmethod
    def summarise(self, part: int, into: Path) -> Summary:
        """`into`: files about this part, small against its text."""

    @abstractmethod
    def merge(self, task: int, summaries: Sequence[Path], into: Path) -> None:
        """`summaries`: the folders of all parts, in order."""

    def conclude(self, merged: Sequence[Path], summaries: Sequence[Path], into: Path) -> None:
        """`merged`: the folders of all merge tasks, in order. With one task, `merge` may do all, and this nothing."""

    @abstractmethod
    def open(self, part: int, merged: Sequence[Path], concluded: Path, summary: Path) -> Decide:
        """The decision about part `part`; it is called with each of its documents once, in order."""

    def report(self, merged: Sequence[Path], concluded: Path) -> dict[str, Any]:
        """What the data card shows beside the counts: e.g. clusters by size, n-grams that were hit."""
        return {}
