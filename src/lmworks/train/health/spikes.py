"""How far a number lies above those before it, measured so that a few odd ones among those do not matter.

    z = (x − median) / max(1.4826 · MAD, 1% of the median)

MAD is the median distance from the median; 1.4826 makes it the standard deviation of a normal distribution. Half of the
window may be spikes before the median moves; a mean and its deviation would follow the first. The 1% keeps a loss that
hardly moves from raising an alarm at every tremor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

NORMAL = 1.4826
FLOOR = 0.01


@dataclass(frozen=True)
class Height:
    z: float
    median: float


def height(value: float, before: Sequence[float]) -> Height:
    middle = median(before)
    spread = NORMAL * median(abs(one - middle) for one in before)
    unit = max(spread, FLOOR * abs(middle), 1e-30)
    return Height((value - middle) / unit, middle)
