"""Faults injected into checkpoint writer processes, importable without torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from lmworks.record import phase


def failing(call: str, code: int, first: int, last: int) -> None:
    """Its `first` to `last` calls of this kind are refused by the system."""
    real: Callable[..., Any] = getattr(os, call)
    count = 0

    def wrapper(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if first <= count <= last:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    setattr(os, call, wrapper)


def hang() -> None:
    """It never comes to its first byte."""
    os.writev = lambda *arguments: time.sleep(600)  # type: ignore[assignment, return-value]


def die_at(stage: str) -> None:
    """Killed where it enters this phase."""

    def listener(name: str, step: int) -> None:
        if name == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    phase.listeners.append(listener)
