"""A pipeline's ranks: how blocks are split into stages, which rank is slowest, and the step time with the bubble.

Megatron splits blocks evenly and adds the head to the last stage. Others give that stage fewer blocks: with j there,
the slowest stage takes max(j·block + head, ⌈(layers − j) / others⌉·block), and the best j is next to where both are
equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from ...spec.layout import V_SHAPED
from ..case import Case, Number
from ..flops import block_flops_per_token, head_flops_per_token
from ..pipelines.bubble import Costs, bubble
from ..pipelines.schedule import Action, Times, actions
from ..pipelines.stages import Stage, split_layers
from .micro_batch import MicroBatch


@dataclass(frozen=True)
class StageSplit:
    """Blocks of the first stage, of the last, and of the others on average; and of whole ranks.

    `split_layers` gives stages ⌊mean⌋ blocks and, from some stage on, one more; a test compares the two.
    """

    first: Number
    last: Number
    mean: Number  # of all stages but the last
    middle_rank: Number  # of the fullest rank that has neither end
    last_rank_rest: Number  # of the rank that has the last stage, without that stage

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
    if case.software.even_stages:
        return np.floor(layers / stages)
    head = head_flops_per_token(case.model) / block_flops_per_token(case.model, case.seq)  # in blocks
    others = np.maximum(stages - 1, 1)
    equal = np.clip((layers - head * others) / stages, 1, np.maximum(layers - others, 1))
    last = np.stack([np.floor(equal), np.ceil(equal)])  # the two next to where all are equal
    mean = (layers - last) / others
    low, part = np.floor(mean), mean - np.floor(mean)
    squares = others * ((1 - part) * low**2 + part * (low + 1) ** 2) + (last + head) ** 2
    slowest = np.maximum(last + head, np.ceil(mean)) + 1e-9 * squares
    return np.where(slowest[0] <= slowest[1], last[0], last[1])


@dataclass(frozen=True)
class SlowestRank:
    """The pipeline rank that limits the step: its blocks, and whether it has the embedding and the head (1 or 0)."""

    layers: Number
    stem: Number
    head: Number
    seconds: Number  # of one micro-batch

    @classmethod
    def of(cls, case: Case, split: StageSplit, micro_batch: MicroBatch) -> Self:
        no_pipeline, v_shaped = case.pp == 1, case.schedule in V_SHAPED
        head = micro_batch.loss.seconds / micro_batch.block.seconds
        last_rank = split.last_rank_rest + split.last
        is_last = no_pipeline | (last_rank + head >= split.middle_rank) | ((case.pp == 2) & (not v_shaped))
        layers = np.where(no_pipeline, case.model.layers, np.where(is_last, last_rank, split.middle_rank))
        stem = 1.0 * (no_pipeline | (is_last & v_shaped))  # a V has its first and last stage on one rank
        ends = stem * micro_batch.stem.seconds, is_last * micro_batch.loss.seconds
        return cls(layers, stem, is_last * 1.0, layers * micro_batch.block.seconds + ends[0] + ends[1])


def pipeline_seconds(case: Case, split: StageSplit, rank: SlowestRank, micro_batch: MicroBatch, send: Number) -> Number:
    """Seconds of all passes of a step, in closed form."""
    block = micro_batch.block
    forward, backward = split.mean * block.forward.seconds, split.mean * block.backward.seconds
    weight = split.mean * micro_batch.weight_gradients
    both = forward + backward
    first = (split.first * block.seconds + micro_batch.stem.seconds) / both
    last = (split.last * block.seconds + micro_batch.loss.seconds) / both
    costs = Costs(first, last, split.middle_rank / (case.virtual * split.mean), split.last / split.mean)
    args = (case.schedule, case.pp, case.virtual, case.accumulation, forward, backward - weight, weight)
    passes = bubble(*args, costs, send).total
    if case.schedule in ("gpipe", "looped-bfs"):
        passes = passes + case.accumulation * phase_imbalance(split, micro_batch)
    return np.where(case.pp == 1, case.accumulation * rank.seconds, passes)


def phase_imbalance(split: StageSplit, micro_batch: MicroBatch) -> Number:
    """Extra seconds where all forward passes precede all backward passes and their slowest stages differ."""
    block, loss, middle_blocks = micro_batch.block, micro_batch.loss, np.ceil(split.mean)
    middle = middle_blocks * block.forward.seconds, middle_blocks * block.backward.seconds
    last = (
        split.last * block.forward.seconds + loss.forward.seconds,
        split.last * block.backward.seconds + loss.backward.seconds,
    )
    each = 0 + np.maximum(middle[0], last[0]) + np.maximum(middle[1], last[1])
    return each - np.maximum(middle[0] + middle[1], last[0] + last[1])


def pipeline_actions(case: Case, micro_batch: MicroBatch) -> tuple[list[list[Action]], list[Times]]:
    """Of one candidate, for `simulate`: what every rank does in a step, and how long each stage takes for it."""
    orders = actions(case.schedule, int(case.pp), int(case.virtual), int(case.accumulation))
    return orders, [action_seconds(micro_batch, stage) for stage in stages(case)]


def stages(case: Case) -> list[Stage]:
    count, layers = int(case.pp * case.virtual), case.model.layers
    if not case.software.even_stages:
        return list(split_layers(case.model, case.seq, count))
    ends = [round(layers * i / count) for i in range(count + 1)]
    return [Stage(i, range(ends[i], ends[i + 1]), first=i == 0, last=i == count - 1) for i in range(count)]


def action_seconds(micro_batch: MicroBatch, stage: Stage) -> Times:
    """Seconds of a stage's forward (F), backward (B), input-gradient (I) and weight-gradient (W) pass."""
    layers, first, last = len(stage.layers), stage.first, stage.last
    block, stem, loss = micro_batch.block, micro_batch.stem, micro_batch.loss
    forward = layers * block.forward.seconds + first * stem.forward.seconds + last * loss.forward.seconds
    backward = layers * block.backward.seconds + first * stem.backward.seconds + last * loss.backward.seconds
    weight = layers * micro_batch.weight_gradients
    return {"F": float(forward), "B": float(backward), "I": float(backward - weight), "W": float(weight)}
