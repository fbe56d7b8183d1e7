"""How long a rank waits for another before that is called a hang, and which rank is called slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .schema import Section, opt


@dataclass(frozen=True)
class WatchSpec(Section):
    section: ClassVar[str] = "watch"

    timeout_s: float = opt(1800.0, "seconds that a collective may take before the run is stopped", gt=0)
