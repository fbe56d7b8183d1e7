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
    keep_every: int = opt(0, "steps of which every multiple is kept for ever (0: none)", ge=0)
    asynchronous: bool = opt(False, "train on while a process per rank writes what was copied in memory")
    hash: str = opt(
        "sha256",
        "what vouches for the bytes: xxh3 is faster and finds damage as surely, but needs the package xxhash",
        choices=("sha256", "xxh3"),
    )
    remote: str = opt(
        "", "an address of fsspec (s3://…) to which every checkpoint is copied, and loaded from if need be"
    )
    init: str = opt("", "a run folder or Hugging Face folder whose weights the run starts from")
