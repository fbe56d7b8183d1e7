"""Messages between a rank and its writer process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folders import RetentionPolicy
from .manifest import Files


@dataclass(frozen=True)
class WriterSetup:
    """The first message: the rank, and what is the same in every save."""

    rank: int
    header: bytes
    size: int  # bytes in the staging buffer
    index: bytes  # only on rank 0
    hash: str
    startup: tuple[Callable[[], None], ...]


@dataclass(frozen=True)
class WriteJob:
    """Write the staging buffer."""

    step: int
    work: Path


@dataclass(frozen=True)
class SealJob:
    """The files of all ranks are on disk: write the manifest and commit."""

    step: int
    work: Path
    final: Path
    meta: dict[str, Any]
    files: Files
    torch: str
    hash: str
    keep: RetentionPolicy


@dataclass(frozen=True)
class AbandonJob:
    """A rank has failed: remove the files of the others."""

    step: int
    work: Path


@dataclass(frozen=True)
class CopyJob:
    """Copy a committed checkpoint to remote storage."""

    step: int
    folder: Path
    remote: str
    keep: RetentionPolicy


Job = WriteJob | SealJob | AbandonJob | CopyJob


@dataclass(frozen=True)
class PhaseEntered:
    """The writer has entered this phase."""

    phase: str


@dataclass(frozen=True)
class JobDone:
    files: Files
    seconds: float


@dataclass(frozen=True)
class JobFailed:
    reason: str


Answer = JobDone | JobFailed
