"""What is done to a job: at which place of which rank, to whom. Written to a file that every rank of the job reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LEAD_ONLY = ("save.seal", "save.commit", "save.prune", "load.find")  # phases that rank 0 alone enters
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

    @property
    def seen_by(self) -> int:
        """The rank that enters the phase: the victim itself, or rank 0 where no other comes there."""
        return 0 if self.phase in LEAD_ONLY else self.rank


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
