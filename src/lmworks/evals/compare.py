"""Two models on the same problems: is the difference more than noise?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import numpy as np

from ..spec.errors import SpecError
from .metrics import METRICS, bootstrap

PERMUTATIONS = 20_000
EXACT_UP_TO = 16  # problems that differ: 2¹⁶ signs are tried one by one


@dataclass(frozen=True)
class Comparison:
    suite: str
    metric: str
    problems: int  # that both were asked
    first: float
    second: float
    difference: float  # second − first
    low: float
    high: float
    better: int  # problems where the second is better, and where it is worse
    worse: int
    p: float  # two-sided
    test: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.suite} {self.metric} {self.first:.4f} → {self.second:.4f} (p = {self.p:.2g})"


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact, two-sided: problems that one alone solves are a fair coin if both are equally good."""
    count, fewer = only_first + only_second, min(only_first, only_second)
    if not count:
        return 1.0
    return float(min(1.0, 2 * sum(comb(count, k) for k in range(fewer + 1)) / 2**count))


def permutation(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided paired test: signs of the differences are exchanged, all of them or 20,000 drawn ones."""
    values = np.asarray([one for one in differences if one], np.float64)
    if not len(values):
        return 1.0
    observed = abs(values.sum()) * (1 - 1e-12)  # sums of the same numbers may differ in the last bit
    if len(values) <= EXACT_UP_TO:
        bits = (np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1
        return float((np.abs((1 - 2 * bits) @ values) >= observed).mean())
    draw = np.random.default_rng(seed)
    extreme = 0
    for _ in range(20):
        signs = draw.integers(0, 2, (PERMUTATIONS // 20, len(values))) * 2 - 1
        extreme += int((np.abs(signs @ values) >= observed).sum())
    return (extreme + 1) / (PERMUTATIONS + 1)


def compare_results(first: Mapping[str, Any], second: Mapping[str, Any], metric: str = "") -> Comparison:
    """By problem, on the metric that the suite names first."""
    name = metric or str(first["metric"])
    for result in (first, second):
        if name not in result["scores"]:
            raise SpecError(f"suite {result['suite']}: no metric {name!r}; it has {', '.join(result['scores'])}")
    one, other = first["scores"][name], second["scores"][name]
    shared = sorted(one.keys() & other.keys())
    if not shared:
        raise SpecError(f"suite {first['suite']}: the two evaluations have no problem in common")
    differences = [other[key] - one[key] for key in shared]
    sign = 1 if METRICS[name].higher_is_better else -1
    better, worse = (sum(sign * side * one > 0 for one in differences) for side in (1, -1))
    binary = all(value in (0.0, 1.0) for key in shared for value in (one[key], other[key]))
    p = mcnemar(worse, better) if binary else permutation(differences)
    interval = bootstrap(differences)
    return Comparison(
        suite=str(first["suite"]),
        metric=name,
        problems=len(shared),
        first=float(np.mean([one[key] for key in shared])),
        second=float(np.mean([other[key] for key in shared])),
        difference=interval.value,
        low=interval.low,
        high=interval.high,
        better=better,
        worse=worse,
        p=p,
        test="McNemar" if binary else "paired permutation",
    )


def check_baseline(baseline: Mapping[str, Any], suites: Sequence[str]) -> None:
    missing = sorted(set(suites) - baseline.keys())
    if missing:
        raise SpecError(f"--gate: the baseline has no suite {missing[0]!r}; it has {', '.join(sorted(baseline))}")


def regressions(baseline: Mapping[str, Any], results: Mapping[str, Any], level: float) -> list[Comparison]:
    """Suites that are worse than the baseline beyond noise."""
    compared = [compare_results(baseline[name], result) for name, result in results.items()]
    return [one for one in compared if is_worse(one) and one.p < level]


def unscored(baseline: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """Suites with more problems that have no score than in the baseline: refused ones have no likelihood to compare."""

    def count(result: Mapping[str, Any]) -> int:
        scored = len(result["scores"][result["metric"]])
        return int(result.get("problems", scored)) - scored  # the held-out loss has no problems

    return [
        f"{name}: {count(result)} of {result.get('problems')} problems have no score, {count(baseline[name])} before"
        for name, result in results.items() if count(result) > count(baseline[name])
    ]  # fmt: skip


def is_worse(one: Comparison) -> bool:
    return one.difference < 0 if METRICS[one.metric].higher_is_better else one.difference > 0
