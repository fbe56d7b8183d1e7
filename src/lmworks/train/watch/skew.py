"""Stragglers: ranks that are busy while the others wait for them.

With collectives in every step all ranks take the same time for one, so a slow rank does not show in the step's time.
It shows in what that time is made of: it is busy where the others wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...spec import WatchSpec

MIN_BUSY_SHARE = 0.5  # a straggler hardly waits itself; small shares differ by chance


@dataclass(frozen=True)
class Straggler:
    """A rank became slow, or has recovered."""

    rank: int
    ratio: float  # its busy time over that of the median rank
    recovered: bool


class Skew:
    """Compares ranks that have the same work: those of one pipeline stage. Stages of one rank are skipped."""

    def __init__(self, spec: WatchSpec, stages: Sequence[Sequence[int]]) -> None:
        self.spec = spec
        self.stages = [list(stage) for stage in stages if len(stage) > 1]
        self.slow_for: dict[int, int] = {}  # steps in a row
        self.fine_for: dict[int, int] = {}  # of a rank that was named
        self.largest = 1.0  # ratio of the last step

    def update(self, busy: Sequence[float]) -> list[Straggler]:
        """`busy`: of every rank, the share of its time that it did not wait for others."""
        found: list[Straggler] = []
        self.largest = 1.0
        for stage in self.stages:
            usual = max(statistics.median_low([busy[rank] for rank in stage]), 0.01)
            for rank in stage:
                ratio = busy[rank] / usual
                self.largest = max(self.largest, round(ratio, 3))
                found += self.judge(rank, ratio, slow=ratio > self.spec.straggler and busy[rank] > MIN_BUSY_SHARE)
        return found

    def judge(self, rank: int, ratio: float, slow: bool) -> list[Straggler]:
        """Reported, and recovered, after straggler_steps consecutive steps."""
        if rank in self.fine_for:
            self.fine_for[rank] = 0 if slow else self.fine_for[rank] + 1
            if self.fine_for[rank] < self.spec.straggler_steps:
                return []
            del self.fine_for[rank]
            return [Straggler(rank, round(ratio, 2), recovered=True)]
        self.slow_for[rank] = self.slow_for.get(rank, 0) + 1 if slow else 0
        if self.slow_for[rank] < self.spec.straggler_steps:
            return []
        self.slow_for[rank], self.fine_for[rank] = 0, 0
        return [Straggler(rank, round(ratio, 2), recovered=False)]
