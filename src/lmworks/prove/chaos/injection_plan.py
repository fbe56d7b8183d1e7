"""The fault injections of a job, as a file that every rank reads: fault, phase, step, rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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
