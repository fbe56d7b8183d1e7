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
from ..memory.budget import Budget, budget
from ..memory.reserve import capacity, reserved
from ..money import Bill, bill
from ..step.price import Price, price, timeline
from .candidates import AWAY, NUMBERS, Question, Words, cases, may_wait, run_of

REPRICED = 50


@dataclass(frozen=True)
class Found:
    """One layout that fits, and what is predicted of it."""

    question: Question
    words: Words
    case: Case  # of this one candidate
    step_s: float
    reserved: float  # bytes, of the fullest rank
    price: Price | None = None  # of the simulated timeline, where it was followed

    @property
    def tokens_per_s(self) -> float:
        return self.question.global_batch * self.question.seq / self.step_s

    @property
    def headroom(self) -> float:
        """Part of a GPU's memory that stays free."""
        return 1 - self.reserved / capacity(self.question.gpu)

    @property
    def dollars_per_gtoken(self) -> float:
        """What 1e9 tokens cost; infinite where nobody knows the price, so that it beats none."""
        if not self.price_hour:
            return math.inf
        return self.question.world * self.price_hour / 3600 * 1e9 / self.tokens_per_s

    @property
    def price_hour(self) -> float:
        return self.question.cluster.price_hour or self.question.gpu.price_hour

    def bill(self, tokens: float) -> Bill:
        """Of training on so many tokens, with the failures of a cluster of this size."""
        return bill(tokens, self.tokens_per_s, self.question.world, self.price_hour, self.question.gpu.tdp_w)

    @property
    def budget(self) -> Budget:
        return budget(self.case)

    def repriced(self) -> Found:
        price = timeline(self.case)
        return replace(self, step_s=float(price.seconds), price=price)

    @property
    def layout(self) -> dict[str, Any]:
        return {name: int(getattr(self.case, name)) for name in NUMBERS} | vars(self.words) | {AWAY: self.away}

    @property
    def away(self) -> float:
        """GiB of activations that wait in host memory."""
        return float(self.case.offload_activations)

    def spec(self, base: RunSpec) -> RunSpec:
        return run_of(self.question, self.layout, base)


@dataclass(frozen=True)
class Result:
    front: tuple[Found, ...]  # fastest first
    legal: int
    fitting: int
    fastest: tuple[Found, ...] = ()  # of every cluster that was asked about and has room, on the front or not
    fronts: tuple[tuple[Found, ...], ...] = ()  # of each of several such clusters by itself


def search(questions: Iterable[Question]) -> Result:
    """The front of one cluster, or of several."""
    counted: Counter[str] = Counter()
    each = [layouts for question in questions if (layouts := fitting(question, counted))]
    first = front([layout for layouts in each for layout in layouts])
    fastest = [min(layouts, key=lambda layout: layout.step_s).repriced() for layouts in each]
    fronts = [refined(front(layouts)) for layouts in each] if len(each) > 1 else []
    return Result(refined(first), counted["legal"], counted["fitting"], tuple(fastest), tuple(fronts))


def refined(found: Sequence[Found]) -> tuple[Found, ...]:
    """A front whose best are priced again with a simulated timeline."""
    return (*front([layout.repriced() for layout in found[:REPRICED]]), *found[REPRICED:])


def fitting(question: Question, counted: Counter[str]) -> list[Found]:
    """Of every case of layouts, those that fit and are not beaten by another of the same case."""
    alike = itertools.groupby(cases(question), key=lambda one: (one[0].zero, one[0].schedule))
    return [layout for _, group in alike for layout in of_one_kind(question, dict(group), counted)]


def of_one_kind(question: Question, group: Mapping[Words, Case], counted: Counter[str]) -> list[Found]:
    """Of cases with the same rows, which differ in recompute and offload.

    A row that does not fit with all blocks recomputed does not fit with fewer, and is not asked about again: unless
    its activations may wait in host memory, of which there are the more, the fewer are computed again.
    """
    fits: dict[Words, NDArray[Any]] = {}
    found: dict[Words, list[Found]] = {}
    for words in sorted(group, key=lambda one: one.recompute != "full"):
        case = group[words]
        plain, leanest = replace(words, offload="none"), replace(words, recompute="full")
        nothing = np.zeros(np.size(case.tp), dtype=bool)
        rows = ~fits[plain] if words != plain and plain in fits else ~nothing
        counted["legal"] += int(rows.sum())
        if words != leanest and leanest in fits:
            waits = may_wait(question.model, np.asarray(case.pp)) if AWAY not in question.pinned else nothing
            rows = rows & (fits[leanest] | fits.get(replace(leanest, offload="none"), nothing) | waits)
        fits[words], found[words] = nothing, []
        if not rows.any():
            continue
        case = case.take(rows)
        need = budget(case)
        fits[words][rows] = np.asarray(need.reserved) <= question.room
        found[words] += best(question, words, case, need, counted)
        if AWAY not in question.pinned:
            found[words] += sent_away(question, words, case, need, counted)
    return [layout for words in group for layout in found[words]]


def best(question: Question, words: Words, case: Case, need: Budget, counted: Counter[str]) -> list[Found]:
    """Layouts of a case that fit and that none of them beats."""
    taken = np.asarray(need.reserved)
    fits = taken <= question.room
    counted["fitting"] += int(fits.sum())
    if not fits.any():
        return []
    case, taken = case.take(fits), taken[fits]
    seconds = np.asarray(price(case).seconds)
    rows = unbeaten(seconds, taken)
    return [Found(question, words, case.take(row), float(seconds[row]), float(taken[row])) for row in rows]


def sent_away(question: Question, words: Words, case: Case, need: Budget, counted: Counter[str]) -> list[Found]:
    """Those that do not fit, with as many activations in host memory as that takes: whole GiB, and for each GPU no more
    than it has itself, as machines usually have so much."""
    missing = lacking(question, need)
    most = np.minimum(np.asarray(need.activations) / 2**30, question.gpu.memory_gb)
    rows = (missing > 0) & (missing <= most) & may_wait(question.model, np.asarray(case.pp))
    if not rows.any():
        return []
    away = case.take(rows).replace(offload_activations=missing[rows])
    counted["legal"] += int(rows.sum())
    return best(question, words, away, budget(away), counted)


def lacking(question: Question, need: Budget) -> NDArray[Any]:
    """GiB of tensors by which layouts are too large."""
    over = (np.asarray(need.reserved) - question.room) / reserved(1.0) / 2**30
    return np.where(over > 0, np.ceil(over + 0.001), 0.0)


def least(question: Question) -> float:
    """Bytes that the most frugal layout reserves on its fullest rank; infinite where no layout is legal."""
    return min((float(np.min(budget(case).reserved)) for _, case in cases(question)), default=np.inf)


def enough(question: Question) -> Question | None:
    """The next larger cluster of the same GPUs, by doubling, on which some layout fits."""
    for _ in range(12):
        grown = question.cluster.replace(nodes=2 * question.cluster.nodes)
        question = replace(question, cluster=grown, global_batch=max(question.global_batch, grown.gpus))
        if least(question) <= question.room:
            return question
    return None


def unbeaten(seconds: NDArray[Any], reserved: NDArray[Any]) -> list[np.intp]:
    """Rows than which no other is faster and smaller, fastest first."""
    order = np.lexsort((reserved, seconds))
    least = np.minimum.accumulate(reserved[order])
    first = np.r_[True, least[1:] < least[:-1]]
    return list(order[first])


def front(found: Sequence[Found]) -> list[Found]:
    """Layouts than which no other is faster, smaller and cheaper, fastest first."""
    clusters: dict[Any, list[Found]] = {}
    for layout in found:
        clusters.setdefault(layout.question.cluster, []).append(layout)
    kept: list[Found] = []
    for layouts in clusters.values():
        rows = unbeaten(np.array([one.step_s for one in layouts]), np.array([one.reserved for one in layouts]))
        kept += [layouts[row] for row in rows]
    if len(clusters) > 1:
        figures = np.array([(-one.tokens_per_s, -one.headroom, one.dollars_per_gtoken) for one in kept])
        kept = [one for one, own in zip(kept, figures, strict=True) if not beaten(own, figures)]
    return sorted(kept, key=lambda one: -one.tokens_per_s)


def beaten(own: NDArray[Any], others: NDArray[Any]) -> bool:
    return bool(((others <= own).all(axis=1) & (others < own).any(axis=1)).any())
