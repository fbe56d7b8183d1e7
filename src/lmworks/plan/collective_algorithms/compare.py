"""Algorithms of one collective side by side on a cluster: the fastest, and at which size another one is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .costs import Group, algorithms, cost, why_not
from .traffic import Algorithm, Traffic

SMALLEST, LARGEST = 2.0**8, 2.0**34  # bytes between which crossovers are looked for


@dataclass(frozen=True)
class Row:
    algorithm: Algorithm
    traffic: Traffic
    alpha_s: float
    beta_s: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    collective: str
    nbytes: int
    group: Group
    rows: list[Row]  # the fastest first
    missing: dict[str, str]  # algorithm → why this group cannot use it
    planned_s: float  # what the planner takes
    crossovers: list[tuple[str, float, float]]  # algorithm, fastest from, to: bytes
    nccl_crossovers: list[tuple[str, float, float]]  # among those that NCCL has

    @property
    def winner(self) -> Row:
        return self.rows[0]

    def busbw(self, seconds: float) -> float:
        return bus_share(self.collective, self.group.ranks) * self.nbytes / seconds

    def to_dict(self) -> dict[str, Any]:
        group = self.group
        return {
            "collective": self.collective,
            "bytes": self.nbytes,
            "ranks": group.ranks,
            "stride": group.stride,
            "machines": group.machines,
            "ranks_per_machine": group.members,
            "winner": self.winner.algorithm.name,
            "planned_s": self.planned_s,
            "algorithms": [
                {
                    "algorithm": row.algorithm.name,
                    "nccl_algo": row.algorithm.nccl,
                    "formula": row.algorithm.formula,
                    "source": row.algorithm.source,
                    "rounds_inside": row.traffic.inside_rounds,
                    "rounds_across": row.traffic.across_rounds,
                    "bytes_inside": row.traffic.inside * self.nbytes,
                    "bytes_across": row.traffic.across * self.nbytes,
                    "alpha_s": row.alpha_s,
                    "beta_s": row.beta_s,
                    "seconds": row.seconds,
                    "algbw": self.nbytes / row.seconds,
                    "busbw": self.busbw(row.seconds),
                }
                for row in self.rows
            ],
            "missing": self.missing,
            "crossovers": as_dicts(self.crossovers),
            "nccl_crossovers": as_dicts(self.nccl_crossovers),
        }


def as_dicts(spans: list[tuple[str, float, float]]) -> list[dict[str, Any]]:
    return [{"algorithm": name, "from": low, "to": high} for name, low, high in spans]


def bus_share(collective: str, ranks: int) -> float:
    """busbw over algbw, by nccl-tests' definition."""
    if collective == "broadcast":
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks


def compare(collective: str, nbytes: int, group: Group) -> Comparison:
    usable, missing = [], {}
    for algorithm in algorithms(collective):
        if reason := why_not(group, collective, algorithm.name):
            missing[algorithm.name] = reason
        else:
            usable.append(algorithm)
    rows = []
    for algorithm in usable:
        found = cost(group, collective, algorithm, nbytes)
        terms = (float(found.alpha), float(found.beta), float(found.seconds))
        rows.append(Row(algorithm, algorithm.traffic(group.ranks, group.members), *terms))
    rows.sort(key=lambda row: row.seconds)
    planned = float(group.planned(collective, nbytes))
    spans = (list(crossovers(collective, group, some)) for some in (usable, [one for one in usable if one.nccl]))
    return Comparison(collective, nbytes, group, rows, missing, planned, *spans)


def curves(collective: str, group: Group, usable: list[Algorithm], sizes: NDArray[Any]) -> NDArray[Any]:
    """Seconds by algorithm and size."""
    return np.stack([np.broadcast_to(cost(group, collective, one, sizes).seconds, sizes.shape) for one in usable])


def crossovers(collective: str, group: Group, usable: list[Algorithm]) -> Iterator[tuple[str, float, float]]:
    """Which algorithm is fastest from which size to which, within 0.1 %."""
    sizes = np.geomspace(SMALLEST, LARGEST, 26 * 8 + 1)

    def fastest(size: float) -> int:
        return int(np.argmin(curves(collective, group, usable, np.array([size]))[:, 0]))

    best = np.argmin(curves(collective, group, usable, sizes), axis=0)
    start = SMALLEST
    for (low, first), (high, then) in pairwise(zip(sizes, best, strict=True)):
        if first == then:
            continue
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if fastest(middle) == first else (low, middle)
        yield usable[first].name, start, float(high)
        start = float(high)
    yield usable[best[-1]].name, start, LARGEST
