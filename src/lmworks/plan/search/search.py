"""Which layout: every legal one is priced in closed form, and the best of the front again with a simulated timeline.

What does not fit is dropped; offload, which only ever costs time, is tried for layouts that do not fit without it, and
so are activations in host memory: as many GiB of them as are missing. Of the rest stays the Pareto front: no other
layout is faster, leaves more memory free and costs less. On one cluster money is time, so cost decides only between
clusters.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...spec import RunSpec
from ..case import Case
from ..memory.reserve import capacity, reserved
from ..memory.sheet import Budget, budget
from ..money import Bill, bill
from ..step.price import Price, price, timeline
from .candidates import NUMBERS, OFFLOAD_GIB, LayoutKind, SearchProblem, cases, offload_steps, run_of

REPRICED = 50


@dataclass(frozen=True)
class Found:
    """One layout that fits, and what is predicted of it."""

    problem: SearchProblem
    words: LayoutKind
    case: Case  # of this one candidate
    step_s: float
    reserved: float  # bytes, of the fullest rank
    price: Price | None = None  # of the simulated timeline, where it was followed

    @property
    def tokens_per_s(self) -> float:
        return self.problem.global_batch * self.problem.seq / self.step_s

    @property
    def headroom(self) -> float:
        """Part of a GPU's memory that stays free."""
        return 1 - self.reserved / capacity(self.problem.gpu)

    @property
    def dollars_per_gtoken(self) -> float:
        """What 1e9 tokens cost; infinite where nobody knows the price, so that it beats none."""
        if not self.price_hour:
            return math.inf
        return self.problem.world * self.price_hour / 3600 * 1e9 / self.tokens_per_s

    @property
    def price_hour(self) -> float:
        return self.problem.cluster.price_hour or self.problem.gpu.price_hour

    def bill(self, tokens: float) -> Bill:
        """Of training on so many tokens, with the failures of a cluster of this size."""
        return bill(tokens, self.tokens_per_s, self.problem.world, self.price_hour, self.problem.gpu.tdp_w)

    @property
    def budget(self) -> Budget:
        return budget(self.case)

    def repriced(self) -> Found:
        price = timeline(self.case)
        return replace(self, step_s=float(price.seconds), price=price)

    @property
    def layout(self) -> dict[str, Any]:
        return (
            {name: int(getattr(self.case, name)) for name in NUMBERS}
            | vars(self.words)
            | {OFFLOAD_GIB: self.offload_gib}
        )

    @property
    def offload_gib(self) -> float:
        """GiB of activations that wait in host memory."""
        return float(self.case.offload_activations)

    def spec(self, base: RunSpec) -> RunSpec:
        return run_of(self.problem, self.layout, base)


@dataclass(frozen=True)
class Result:
    front: tuple[Found, ...]  # fastest first
    legal: int
    fitting: int
    fastest: tuple[Found, ...] = ()  # of every cluster that was asked about and has room, on the front or not
    fronts: tuple[tuple[Found, ...], ...] = ()  # of each of several such clusters by itself


def search(questions: Iterable[SearchProblem]) -> Result:
    """The front of one cluster, or of several. Questions of one cluster stand together: they share its front."""
    counted: Counter[str] = Counter()
    clusters = [list(group) for _, group in itertools.groupby(questions, key=lambda problem: problem.cluster)]
    by_cluster = [[layout for problem in group for layout in fitting(problem, counted)] for group in clusters]
    each = [layouts for layouts in by_cluster if layouts]
    first = front([layout for layouts in each for layout in layouts])
    fastest = [min(layouts, key=lambda layout: layout.step_s).repriced() for layouts in each]
    fronts = [simulated(front(layouts)) for layouts in each] if len(each) > 1 else []
    return Result(simulated(first), counted["legal"], counted["fitting"], tuple(fastest), tuple(fronts))


def simulated(found: Sequence[Found]) -> tuple[Found, ...]:
    """A front whose best are priced again with a simulated timeline."""
    return (*front([layout.repriced() for layout in found[:REPRICED]]), *found[REPRICED:])


def fitting(problem: SearchProblem, counted: Counter[str]) -> list[Found]:
    """Of every case of layouts, those that fit and are not beaten by another of the same case."""
    alike = itertools.groupby(cases(problem), key=lambda one: (one[0].zero, one[0].schedule))
    return [layout for _, group in alike for layout in best_of_kind(problem, dict(group), counted)]


def best_of_kind(problem: SearchProblem, group: Mapping[LayoutKind, Case], counted: Counter[str]) -> list[Found]:
    """Of cases with the same rows, which differ in recompute and offload.

    A row that does not fit with all blocks recomputed does not fit with fewer, and is not asked about again: unless
    its activations may wait in host memory, of which there are the more, the fewer are computed again.
    """
    fits: dict[LayoutKind, NDArray[Any]] = {}
    found: dict[LayoutKind, list[Found]] = {}
    for words in sorted(group, key=lambda one: one.recompute != "full"):
        case = group[words]
        plain, leanest = replace(words, offload="none"), replace(words, recompute="full")
        nothing = np.zeros(np.size(case.tp), dtype=bool)
        rows = ~fits[plain] if words != plain and plain in fits else ~nothing
        counted["legal"] += int(rows.sum())
        if words != leanest and leanest in fits:
            waits = offload_steps(problem.model, np.asarray(case.pp)) if OFFLOAD_GIB not in problem.pinned else nothing
            rows = rows & (fits[leanest] | fits.get(replace(leanest, offload="none"), nothing) | waits)
        fits[words], found[words] = nothing, []
        if not rows.any():
            continue
        case = case.take(rows)
        need = budget(case)
        fits[words][rows] = np.asarray(need.reserved) <= problem.safe_bytes
        found[words] += best(problem, words, case, need, counted)
        if OFFLOAD_GIB not in problem.pinned:
            found[words] += with_offload(problem, words, case, need, counted)
    return [layout for words in group for layout in found[words]]


def best(problem: SearchProblem, words: LayoutKind, case: Case, need: Budget, counted: Counter[str]) -> list[Found]:
    """Layouts of a case that fit and that none of them beats."""
    taken = np.asarray(need.reserved)
    fits = taken <= problem.safe_bytes
    counted["fitting"] += int(fits.sum())
    if not fits.any():
        return []
    case, taken = case.take(fits), taken[fits]
    seconds = np.asarray(price(case).seconds)
    rows = pareto_front_rows(seconds, taken)
    return [Found(problem, words, case.take(row), float(seconds[row]), float(taken[row])) for row in rows]


def with_offload(
    problem: SearchProblem, words: LayoutKind, case: Case, need: Budget, counted: Counter[str]
) -> list[Found]:
    """Those that do not fit, with as many activations in host memory as that takes: whole GiB, and for each GPU no more
    than it has itself, as machines usually have so much."""
    missing = shortfall(problem, need)
    most = np.minimum(np.asarray(need.activations) / 2**30, problem.gpu.memory_gb)
    rows = (missing > 0) & (missing <= most) & offload_steps(problem.model, np.asarray(case.pp))
    if not rows.any():
        return []
    away = case.take(rows).replace(offload_activations=missing[rows])
    counted["legal"] += int(rows.sum())
    return best(problem, words, away, budget(away), counted)


def shortfall(problem: SearchProblem, need: Budget) -> NDArray[Any]:
    """GiB of tensors by which layouts are too large."""
    over = (np.asarray(need.reserved) - problem.safe_bytes) / reserved(1.0) / 2**30
    return np.where(over > 0, np.ceil(over + 0.001), 0.0)


def min_memory_bytes(problem: SearchProblem) -> float:
    """Bytes that the most frugal layout reserves on its fullest rank; infinite where no layout is legal.

    It computes all blocks again, where that is not pinned.
    """
    leanest = replace(problem, pinned={"recompute": "full", **problem.pinned})
    return min((float(np.min(budget(case).reserved)) for _, case in cases(leanest)), default=np.inf)


def smallest_fitting_cluster(problem: SearchProblem) -> SearchProblem | None:
    """The next larger cluster of the same GPUs, by doubling, on which some layout fits."""
    for _ in range(12):
        grown = problem.cluster.replace(nodes=2 * problem.cluster.nodes)
        problem = replace(problem, cluster=grown, global_batch=max(problem.global_batch, grown.gpus))
        if min_memory_bytes(problem) <= problem.safe_bytes:
            return problem
    return None


def pareto_front_rows(seconds: NDArray[Any], reserved: NDArray[Any]) -> list[np.intp]:
    """Rows than which no other is faster and smaller, fastest first."""
    order = np.lexsort((reserved, seconds))
    smallest = np.minimum.accumulate(reserved[order])
    first = np.r_[True, smallest[1:] < smallest[:-1]]
    return list(order[first])


def front(found: Sequence[Found]) -> list[Found]:
    """Layouts than which no other is faster, smaller and cheaper, fastest first."""
    clusters: dict[Any, list[Found]] = {}
    for layout in found:
        clusters.setdefault(layout.problem.cluster, []).append(layout)
    kept: list[Found] = []
    for layouts in clusters.values():
        rows = pareto_front_rows(np.array([one.step_s for one in layouts]), np.array([one.reserved for one in layouts]))
        kept += [layouts[row] for row in rows]
    if len(clusters) > 1:
        figures = np.array([(-one.tokens_per_s, -one.headroom, one.dollars_per_gtoken) for one in kept])
        kept = [one for one, own in zip(kept, figures, strict=True) if not dominated(own, figures)]
    return sorted(kept, key=lambda one: -one.tokens_per_s)


def dominated(own: NDArray[Any], others: NDArray[Any]) -> bool:
    return bool(((others <= own).all(axis=1) & (others < own).any(axis=1)).any())
