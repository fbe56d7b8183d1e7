"""What a run saves, and where it starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .schema import Section, opt


@dataclass(frozen=True)
class CheckpointSpec(Section):
    section: ClassVar[str] = "checkpoint"

    every: int = opt(100, "steps between checkpoints; the last step is always saved (0: only that)", ge=0)
    keep: int = opt(3, "newest checkpoints to keep (0: all)", ge=0)
    init: str = opt("", "a run folder or Hugging Face folder whose weights the run starts from")
