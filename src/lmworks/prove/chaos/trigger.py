"""Lying in wait in a process of a job, until it comes to the place of its act."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .injection_plan import Act, mark_of, read_acts


@dataclass
class Place:
    """Where a process stands: the files of its job, and whose it is."""

    folder: Path
    rank: int
    process: str = "rank"  # or the writer of its asynchronous saves
    trainer: Any = None  # from the time a rank has built it

    def pid_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.pid"

    def pid(self, rank: int) -> int:
        return int(self.pid_file(rank).read_text())

    @property
    def checkpoints(self) -> Path:
        return self.folder / "run" / "checkpoints"

    @property
    def data(self) -> Path:
        return self.folder / "data"


Say = Callable[[str], None]
Strike = Callable[[Place, Act, Say], None]


class Waiting:
    """A listener of `record.phase`. Strikes once, where its act says."""

    def __init__(self, place: Place, faults: Mapping[str, Strike]) -> None:
        self.place, self.faults = place, faults
        self.acts = list(enumerate(read_acts(place.folder)))

    def __call__(self, name: str, step: int) -> None:
        while self.acts and mark_of(self.place.folder, self.acts[0][0]).exists():
            self.acts.pop(0)
        if not self.acts:
            return
        index, act = self.acts[0]
        here = (act.process, act.seen_by) == (self.place.process, self.place.rank)
        if not here or act.phase != name or act.step not in (0, step):
            return
        self.acts.pop(0)
        mark = mark_of(self.place.folder, index)
        # What is done is told before: some faults do not come back.
        self.faults[act.fault](self.place, act, lambda words: write_whole(mark, words))


def write_whole(mark: Path, words: str) -> None:
    """Whoever sees the mark sees all of it."""
    half = mark.with_suffix(f".{os.getpid()}")
    half.write_text(words, encoding="utf-8")
    half.replace(mark)
