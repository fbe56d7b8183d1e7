"""What a rank asks of its writer process, and what that answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folders import Keep
from .manifest import Files


@dataclass(frozen=True)
class Setup:
    """First of all: whose writer it is, and what is the same in every save."""

    rank: int
    header: bytes
    size: int  # bytes that lie in the staging buffer
    index: bytes  # empty but for the lead's
    hash: str
    startup: tuple[Callable[[], None], ...]


@dataclass(frozen=True)
class Write:
    """Write what lies in the staging buffer."""

    step: int
    work: Path


@dataclass(frozen=True)
class Seal:
    """Every rank's files are on the disk: make a checkpoint of them."""

    step: int
    work: Path
    final: Path
    meta: dict[str, Any]
    files: Files
    torch: str
    hash: str
    keep: Keep


@dataclass(frozen=True)
class Abandon:
    """Some rank's files are not: remove the others'."""

    step: int
    work: Path


@dataclass(frozen=True)
class Copy:
    """Copy a committed checkpoint to another place."""

    step: int
    folder: Path
    remote: str
    keep: Keep


Job = Write | Seal | Abandon | Copy


@dataclass(frozen=True)
class Entered:
    """The writer came to this phase."""

    phase: str


@dataclass(frozen=True)
class Done:
    files: Files
    seconds: float


@dataclass(frozen=True)
class Failed:
    reason: str


Answer = Done | Failed
