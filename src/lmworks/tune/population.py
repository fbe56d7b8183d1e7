"""Population-based training: which members give up, whose checkpoint they take, and how its keys are perturbed.

After each interval the worst quarter of the population takes checkpoints of the best quarter (exploit) and goes on
with changed keys (explore): perturbed ones (PBT, Jaderberg et al. 2017), or those that a bandit chooses (PB2, in
`bandit`). Figures as in Ray Tune: a quarter, factors 1.2 and 0.8, one key in four drawn anew.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from ..sweep.space import Dimension, Point, Space

QUANTILE = 0.25
FACTORS = (1.2, 0.8)
RESAMPLE = 0.25


def quantiles(losses: Mapping[int, float], fraction: float = QUANTILE) -> tuple[list[int], list[int]]:
    """(worst, best) members, each the worst or best first. Members without a finite loss are among the worst."""
    order = sorted(losses, key=lambda member: (losses[member], member))
    finite = [member for member in order if math.isfinite(losses[member])]
    if len(order) < 2 or not finite:
        return [], []
    count = min(math.ceil(len(order) * fraction), len(order) // 2)
    best = finite[:count]
    worst = [member for member in reversed(order) if member in order[-count:] or member not in finite]
    return [member for member in worst if member not in best], best


def explore(space: Space, parent: Point, rng: random.Random) -> Point:
    """Each key multiplied by 1.2 or 0.8 (a value of a list: its neighbour), or drawn anew; within its range."""
    point: Point = {}
    for dimension in space.dimensions:
        if not dimension.is_active(point):
            continue
        if rng.random() < RESAMPLE or dimension.key not in parent:
            point[dimension.key] = draw(dimension, rng)
        else:
            point[dimension.key] = perturb(dimension, parent[dimension.key], rng)
    return point


def perturb(dimension: Dimension, value: Any, rng: random.Random) -> Any:
    if dimension.range is None:
        index = dimension.values.index(value) + rng.choice((-1, 1))
        return dimension.values[min(max(index, 0), len(dimension.values) - 1)]
    return within(dimension, value * rng.choice(FACTORS))


def draw(dimension: Dimension, rng: random.Random) -> Any:
    if dimension.range is None:
        return rng.choice(dimension.values)
    low, high = dimension.range
    share = rng.random()
    return within(dimension, low * (high / low) ** share if dimension.log else low + (high - low) * share)


def within(dimension: Dimension, value: float) -> float:
    assert dimension.range is not None
    low, high = dimension.range
    value = min(max(value, low), high)
    if dimension.step is not None:
        value = min(low + round((value - low) / dimension.step) * dimension.step, high)
    return dimension.rounded(value)
