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
SAFE = 1e-9  # of a limit, by which it is set lower: far more than rounding takes, far less than anybody means


@dataclass(frozen=True)
class Height:
    z: float
    median: float


def height(value: float, before: Sequence[float]) -> Height:
    middle, unit = usual(before)
    return Height((value - middle) / unit, middle)


def limit(z: float, before: Sequence[float]) -> float:
    """What is at most this is certainly not higher than `z`; what is more very nearly always is."""
    middle, unit = usual(before)
    return middle + z * unit - SAFE * (abs(middle) + z * unit)


def usual(before: Sequence[float]) -> tuple[float, float]:
    """The median, and the deviation that heights are measured in."""
    middle = median(before)
    spread = NORMAL * median(abs(one - middle) for one in before)
    return middle, max(spread, FLOOR * abs(middle), 1e-30)
