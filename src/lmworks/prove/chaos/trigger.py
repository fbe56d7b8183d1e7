"""The trigger: a phase listener in a process of the job that injects a fault at the planned phase and step.

The fault injections of a job, as a file that every rank reads: fault, phase, step, rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "injections.json"


@dataclass(frozen=True)
class Injection:
    """One fault to inject. Injections of a job are ordered: the second waits for the first, across attempts."""

    fault: str
    phase: str
    step: int = 0  # 0: the first occurrence of the phase
    rank: int = 0  # the target
    delay_ms: float = 0.0  # after the entry of the phase, for external faults
    seed: int = 0  # of random choices at injection time: a file, a byte, a weight
    process: str = "rank"  # that runs the phase: the rank itself, or "writer", its asynchronous checkpoint writer

    @property
    def trigger_rank(self) -> int:
        """The rank whose process runs the phase: of the writers, only rank 0's seals and commits."""
        return 0 if self.process == "writer" and self.phase != "save.write" else self.rank


def write_injections(folder: Path, injections: Sequence[Injection]) -> None:
    (folder / FILE).write_text(json.dumps([asdict(injection) for injection in injections], indent=1), encoding="utf-8")


def read_injections(folder: Path) -> list[Injection]:
    return [Injection(**injection) for injection in json.loads((folder / FILE).read_text(encoding="utf-8"))]


def done_marker(folder: Path, index: int) -> Path:
    """A file that exists once injection number `index` was made; it holds a description."""
    return folder / f"injection-{index}.done"


def injections_done(folder: Path) -> list[str]:
    """Descriptions of the injections made so far, in order."""
    markers = [done_marker(folder, index) for index in range(len(read_injections(folder)))]
    return [marker.read_text(encoding="utf-8") for marker in markers if marker.exists()]


# --- trigger ---------------------------------------------------------------------------------------------


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
