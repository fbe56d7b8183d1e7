"""Watchdog for hangs and stragglers. See docs/hangs.md."""

from .watchdog import Skew, Watchdog, run_watchdog

__all__ = ["Skew", "Watchdog", "run_watchdog"]
