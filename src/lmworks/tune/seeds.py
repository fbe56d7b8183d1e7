"""How many seeds does a difference need: the power of a two-sample t-test on final losses."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..spec.errors import SpecError

MOST_SEEDS = 10_000
DIFFERENCES = (0.05, 0.02, 0.01, 0.005, 0.002)


@dataclass(frozen=True)
class SeedNoise:
    """How far final losses of one spec differ between seeds."""

    std: float  # as a share of the mean loss
    low: float  # 95 % interval of it
    high: float
    runs: int
    groups: int  # of runs that differ in nothing but their seed
    mean: float

    @property
    def freedom(self) -> int:
        return self.runs - self.groups

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise SpecError('this needs scipy, which is not installed: pip install "lmworks[tune]"') from None
    return stats


def seed_noise(losses: Iterable[tuple[dict[str, Any], float]]) -> SeedNoise:
    """From (overrides, final loss) of many runs: those whose overrides differ in `seed` alone are a group."""
    groups: dict[str, list[float]] = defaultdict(list)
    for overrides, loss in losses:
        rest = {key: value for key, value in overrides.items() if key != "seed"}
        groups[json.dumps(rest, sort_keys=True)].append(loss)
    repeated = [group for group in groups.values() if len(group) > 1]
    if not repeated:
        raise SpecError("no two runs differ in their seed alone; sweep it with seed.values = [1, 2, 3, 4, 5]")
    freedom = sum(len(group) - 1 for group in repeated)
    squares = sum(sum((loss / statistics.fmean(group) - 1) ** 2 for loss in group) for group in repeated)
    std = math.sqrt(squares / freedom)
    chi2 = scipy_stats().chi2
    low, high = (std * math.sqrt(freedom / float(chi2.ppf(q, freedom))) for q in (0.975, 0.025))
    runs = [loss for group in repeated for loss in group]
    return SeedNoise(std, low, high, len(runs), len(repeated), statistics.fmean(runs))


def power(seeds: int, difference: float, std: float, level: float = 0.05) -> float:
    """Probability that a two-sided t-test of two specs with `seeds` runs each finds that difference of their means."""
    stats = scipy_stats()
    freedom, effect = 2 * seeds - 2, difference / std * math.sqrt(seeds / 2)
    critical = float(stats.t.ppf(1 - level / 2, freedom))
    return float(stats.nct.sf(critical, freedom, effect) + stats.nct.cdf(-critical, freedom, effect))


def seeds_needed(difference: float, std: float, wanted: float = 0.8, level: float = 0.05) -> int | None:
    """The fewest seeds of each of two specs; None where that is more than anyone runs."""
    low, high = 2, 2
    while power(high, difference, std, level) < wanted:
        low, high = high, high * 2
        if high > MOST_SEEDS:
            return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, difference, std, level) >= wanted else (middle + 1, high)
    return high


def seed_table(noise: SeedNoise, differences: Sequence[float] = DIFFERENCES) -> list[dict[str, Any]]:
    """For each difference: seeds by the measured spread, and by the ends of its interval."""
    return [
        {
            "difference": difference,
            "seeds": seeds_needed(difference, noise.std),
            "seeds_low": seeds_needed(difference, noise.low),
            "seeds_high": seeds_needed(difference, noise.high),
        }
        for difference in differences
    ]
