"""What a run watches in its own numbers, and what it does about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .schema import Section, opt


@dataclass(frozen=True)
class HealthSpec(Section):
    section: ClassVar[str] = "health"

    window: int = opt(128, "steps before this one that a spike is judged against", ge=8)
