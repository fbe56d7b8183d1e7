"""Runs with known figures."""

from recorded_runs import make_run

__all__ = ["make_run"]
