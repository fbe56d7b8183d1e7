"""Hangs and slow ranks: a thread in every rank that sees what its main thread waits for. See docs/hangs.md."""

from .skew import Skew
from .watchdog import Watchdog, watching

__all__ = ["Skew", "Watchdog", "watching"]
