"""Hangs and slow ranks: a thread in every rank that sees what its main thread waits for. See docs/hangs.md."""

from .skew import Skew
from .watchdog import Watchdog, run_watchdog

__all__ = ["Skew", "Watchdog", "run_watchdog"]
