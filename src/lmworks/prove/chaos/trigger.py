"""The trigger: a phase listener in a process of the job that injects a fault at the planned phase and step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .injection_plan import Injection, done_marker, read_injections


@dataclass
class ProcessContext:
    """The folder of the job, and which process of it this is."""

    folder: Path
    rank: int
    process: str = "rank"  # or "writer": its asynchronous checkpoint writer
    trainer: Any = None  # set once a rank has built it

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


Announce = Callable[[str], None]
Injector = Callable[[ProcessContext, Injection, Announce], None]


class FaultTrigger:
    """A listener of `record.phase` that makes each injection once."""

    def __init__(self, context: ProcessContext, injectors: Mapping[str, Injector]) -> None:
        self.context, self.injectors = context, injectors
        self.injections = list(enumerate(read_injections(context.folder)))

    def __call__(self, name: str, step: int) -> None:
        while self.injections and done_marker(self.context.folder, self.injections[0][0]).exists():
            self.injections.pop(0)
        if not self.injections:
            return
        index, injection = self.injections[0]
        here = (injection.process, injection.trigger_rank) == (self.context.process, self.context.rank)
        if not here or injection.phase != name or injection.step not in (0, step):
            return
        self.injections.pop(0)
        marker = done_marker(self.context.folder, index)
        # Injectors announce before they act: some faults do not return.
        self.injectors[injection.fault](self.context, injection, lambda text: write_atomically(marker, text))


def write_atomically(marker: Path, text: str) -> None:
    """Readers of the marker see all of it or nothing."""
    partial = marker.with_suffix(f".{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(marker)
