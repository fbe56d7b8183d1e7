"""A pipeline's ranks: how the blocks are cut, which rank is busiest, and how long all wait for each other.

Megatron cuts blocks evenly and the head comes on top of the last stage. Others give that stage fewer blocks: with j
there, the pace is max(j·block + head, ⌈(layers − j) / others⌉·block), and the best j lies next to where both are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from ...spec.layout import V_SHAPED
from ..case import Case, Number
from ..pipelines.bubble import Costs, bubble
from ..pipelines.orders import actions
from ..pipelines.schedule import Span, Times, simulate, total
from ..pipelines.stages import Stage, head_cost, layer_cost, split_layers
from .layer import MicroBatch


@dataclass(frozen=True)
class Cut:
    """Blocks of the first stage, of the last, and of the others on average; and of whole ranks.

    `split_layers` gives stages ⌊mean⌋ blocks and, from some stage on, one more; a test compares the two.
    """

    first: Number
    last: Number
    mean: Number  # of all stages but the last
    middle: Number  # of the fullest rank that has neither end
    below: Number  # of the rank that has the last stage, without that stage

    @classmethod
    def of(cls, case: Case) -> Self:
        layers, p, v = case.model.layers, case.pp, case.virtual
        others = np.maximum(p * v - 1, 1)
        last = np.where(p * v == 1, layers, last_stage(case))
        low = np.floor((layers - last) / others)
        fuller = layers - last - low * others  # stages with one more: the last ones before the last
        begin = others - fuller  # the first of them
        if case.schedule in V_SHAPED:
            extra, below = np.minimum(fuller, 1) + (begin < p) * np.minimum(fuller, 1), low + (begin == 0)
        else:
            extra = np.ceil(fuller / p)
            below = (v - 1) * low + np.clip(v - 1 - np.ceil((begin - p + 1) / p), 0, v - 1)
        mean = np.where(last < layers, (layers - last) / others, layers)
        return cls(low + (begin == 0), last, mean, v * low + extra, below)


def last_stage(case: Case) -> Number:
    """Blocks of the last stage: of the cuts whose slowest stage is quickest, the most even one."""
    layers, stages = case.model.layers, case.pp * case.virtual
    if cuts_evenly(case):
        return np.floor(layers / stages)
    head, others = head_cost(case.model) / layer_cost(case.model, case.seq), np.maximum(stages - 1, 1)
    best = np.clip((layers - head * others) / stages, 1, np.maximum(layers - others, 1))

    def cost(j: Number) -> Number:
        mean = (layers - j) / others
        low, part = np.floor(mean), mean - np.floor(mean)
        squares = others * ((1 - part) * low**2 + part * (low + 1) ** 2) + (j + head) ** 2
        return np.maximum(j + head, np.ceil(mean)) + 1e-9 * squares

    low, high = np.floor(best), np.ceil(best)
    return np.where(cost(low) <= cost(high), low, high)


@dataclass(frozen=True)
class Busiest:
    """The rank that sets the pace: its blocks, and whether it has the embedding and the head (1 or 0)."""

    layers: Number
    stem: Number
    head: Number

    @classmethod
    def of(cls, case: Case, cut: Cut, one: MicroBatch) -> Self:
        alone = case.pp == 1
        head = one.loss.seconds / one.block.seconds
        ends = alone | (cut.below + cut.last + head >= cut.middle) | ((case.pp == 2) & (case.schedule not in V_SHAPED))
        layers = np.where(ends, cut.below + cut.last, cut.middle)
        stem = alone | (ends & (case.schedule in V_SHAPED))  # a V begins where it ends
        return cls(np.where(alone, case.model.layers, layers), stem * 1.0, ends * 1.0)

    def seconds(self, one: MicroBatch) -> Number:
        """Of one micro-batch."""
        return self.layers * one.block.seconds + self.stem * one.stem.seconds + self.head * one.loss.seconds


def pace(case: Case, cut: Cut, one: MicroBatch, send: Number) -> Number:
    """Seconds of all passes of a step, in closed form."""
    forward, backward = cut.mean * one.block.forward.seconds, cut.mean * one.block.backward.seconds
    weight = cut.mean * weight_seconds(case, one)
    whole = forward + backward
    first = (cut.first * one.block.seconds + one.stem.seconds) / whole
    last = (cut.last * one.block.seconds + one.loss.seconds) / whole
    costs = Costs(first, last, cut.middle / (case.virtual * cut.mean), cut.last / cut.mean)
    args = (case.schedule, case.pp, case.virtual, case.accumulation, forward, backward - weight, weight)
    alone = case.accumulation * Busiest.of(case, cut, one).seconds(one)
    passes = bubble(*args, costs, send).total
    if case.schedule in ("gpipe", "looped-bfs"):
        passes = passes + case.accumulation * apart(cut, one)
    return np.where(case.pp == 1, alone, passes)


def apart(cut: Cut, one: MicroBatch) -> Number:
    """All forward passes, then all backward passes: where one stage is slowest in these and another in those, both."""
    ways = [
        (np.ceil(cut.mean) * getattr(one.block, way).seconds, cut.last * getattr(one.block, way).seconds + end.seconds)
        for way, end in (("forward", one.loss.forward), ("backward", one.loss.backward))
    ]
    each = sum(np.maximum(middle, last) for middle, last in ways)
    return each - np.maximum(ways[0][0] + ways[1][0], ways[0][1] + ways[1][1])


def weight_seconds(case: Case, one: MicroBatch) -> Number:
    """Of a block's backward pass, what only its weights' gradients need: half of the products, where it can wait."""
    return one.block.backward.parts["matmul"] / 2 if case.recompute == "none" else 0.0


def followed(case: Case, one: MicroBatch, send: float) -> float:
    """Seconds of all passes of one candidate's step, action by action."""
    return total(spans(case, one, send))


def spans(case: Case, one: MicroBatch, send: float) -> list[Span]:
    orders = actions(case.schedule, int(case.pp), int(case.virtual), int(case.accumulation))
    return simulate(orders, [times(case, one, stage) for stage in stages(case)], send)


def stages(case: Case) -> list[Stage]:
    count, layers = int(case.pp * case.virtual), case.model.layers
    if not cuts_evenly(case):
        return list(split_layers(case.model, case.seq, count))
    ends = [round(layers * i / count) for i in range(count + 1)]
    return [Stage(i, range(ends[i], ends[i + 1]), first=i == 0, last=i == count - 1) for i in range(count)]


def times(case: Case, one: MicroBatch, stage: Stage) -> Times:
    """Seconds of a stage's forward pass, its backward pass, and the two halves that some schedules make of it."""
    layers = len(stage.layers)
    forward, backward = (
        layers * getattr(one.block, way).seconds
        + stage.first * getattr(one.stem, way).seconds
        + stage.last * getattr(one.loss, way).seconds
        for way in ("forward", "backward")
    )
    weight = layers * weight_seconds(case, one)
    return {"F": float(forward), "B": float(backward), "I": float(backward - weight), "W": float(weight)}


def cuts_evenly(case: Case) -> bool:
    return case.software.name.startswith("megatron")
