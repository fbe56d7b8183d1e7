"""Spike detection: a robust z-score against previous values, insensitive to a few outliers among them.

    z = (x − median) / max(1.4826 · MAD, 1% of the median)

MAD is the median distance from the median; 1.4826 makes it the standard deviation of a normal distribution. Half of the
window may be spikes before the median moves; a mean and its standard deviation would follow the first. The 1% keeps a
loss that hardly changes from triggering at every fluctuation.

Before there are enough values for that, divergence: a loss that is above twice those of the first steps, three times in
a row. Losses of policies begin near 0, so it must have risen by one, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

MAD_TO_STD = 1.4826
MIN_RELATIVE_DEVIATION = 0.01
START = 2  # steps that divergence is measured from
MIN_RISE = 1.0
DIVERGED_STEPS = 3  # in a row
ROUNDING_MARGIN = 1e-9  # relative; thresholds are lowered by it, far more than rounding errors


@dataclass(frozen=True)
class SpikeScore:
    z: float
    median: float


def spike_score(value: float, before: Sequence[float]) -> SpikeScore:
    middle, unit = median_and_deviation(before)
    return SpikeScore((value - middle) / unit, middle)


def spike_threshold(z: float, before: Sequence[float]) -> float:
    """Values up to this have a score of at most `z`; larger ones nearly always exceed it."""
    middle, unit = median_and_deviation(before)
    return middle + z * unit - ROUNDING_MARGIN * (abs(middle) + z * unit)


def divergence_threshold(before: Sequence[float]) -> float:
    """A loss above this is the third in a row that has left the start behind; infinite where none would be."""
    last = DIVERGED_STEPS - 1
    if len(before) < START + last:
        return inf
    start = max(before[:START])
    limit = start + max(start, MIN_RISE)
    return limit if min(before[-last:]) > limit >= before[-last - 1] else inf


def median_and_deviation(before: Sequence[float]) -> tuple[float, float]:
    """The median, and the unit of the score."""
    middle = median(before)
    spread = MAD_TO_STD * median(abs(one - middle) for one in before)
    return middle, max(spread, MIN_RELATIVE_DEVIATION * abs(middle), 1e-30)
