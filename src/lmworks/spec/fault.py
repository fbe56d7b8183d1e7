"""What a run does when a process of it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .schema import Section, opt


@dataclass(frozen=True)
class FaultSpec(Section):
    section: ClassVar[str] = "fault"

    max_restarts: int = opt(0, "times that ranks which failed are started again", ge=0)
