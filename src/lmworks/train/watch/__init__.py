"""Watchdog for hangs and stragglers. See docs/hangs.md."""

from .skew import Skew
from .watchdog import Watchdog, run_watchdog

__all__ = ["Skew", "Watchdog", "run_watchdog"]
