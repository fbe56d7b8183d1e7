"""What a run does when a process of it ends, or is asked to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .schema import Section, opt


@dataclass(frozen=True)
class FaultSpec(Section):
    section: ClassVar[str] = "fault"

    max_restarts: int = opt(0, "times that ranks which failed are started again", ge=0)
    elastic: bool = opt(False, "go on with fewer data-parallel ranks, the global batch kept by accumulation")
    deadline_s: float = opt(120.0, "seconds after SIGTERM in which the step and its save must end", gt=0)
    crash_loop: str = opt("stop", "where the same step fails twice: end, or pass its batch", choices=("stop", "skip"))
