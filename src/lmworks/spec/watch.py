"""How long a rank waits for another before that is called a hang, and which rank is called slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .schema import Section, opt


@dataclass(frozen=True)
class WatchSpec(Section):
    section: ClassVar[str] = "watch"

    timeout_s: float = opt(1800.0, "seconds that a collective may take before the run is stopped", gt=0)
    straggler: float = opt(1.5, "times the busy time of the median rank at which a rank is called slow", gt=1)
    straggler_steps: int = opt(20, "steps in a row that a rank is slow before it is named", ge=1)
