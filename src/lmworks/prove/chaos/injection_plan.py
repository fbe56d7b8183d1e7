"""What is done to a job: at which place of which rank, to whom. Written to a file that every rank of the job reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "acts.json"


@dataclass(frozen=True)
class Act:
    """One strike. Acts of a job come in order: the second waits until the first was done, in whatever attempt."""

    fault: str
    phase: str
    step: int = 0  # 0: whichever comes first
    rank: int = 0  # the victim
    delay_ms: float = 0.0  # from the entry of the phase to the strike, for what can strike from outside
    draw: int = 0  # seeds what is chosen at the moment of the strike: a file, a byte, a weight
    process: str = "rank"  # where the phase is: in the rank itself, or in the writer of its asynchronous saves

    @property
    def seen_by(self) -> int:
        """Whose process comes to the phase: of writers only rank 0's seals and commits what all have written."""
        return 0 if self.process == "writer" and self.phase != "save.write" else self.rank


def write_acts(folder: Path, acts: Sequence[Act]) -> None:
    (folder / FILE).write_text(json.dumps([asdict(act) for act in acts], indent=1), encoding="utf-8")


def read_acts(folder: Path) -> list[Act]:
    return [Act(**act) for act in json.loads((folder / FILE).read_text(encoding="utf-8"))]


def mark_of(folder: Path, index: int) -> Path:
    """There once act number `index` has been done; holds what was done, in words."""
    return folder / f"act-{index}.done"


def done(folder: Path) -> list[str]:
    """What was done so far, in order."""
    marks = [mark_of(folder, index) for index in range(len(read_acts(folder)))]
    return [mark.read_text(encoding="utf-8") for mark in marks if mark.exists()]
