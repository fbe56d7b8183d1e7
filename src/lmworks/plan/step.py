"""The time of a training step on any layout: one candidate, or thousands at once.

`price` is a closed form over arrays. A rank's micro-batch is its blocks, and on the ends embedding and head; what
layers exchange lengthens them; a pipeline adds the time in which its ranks wait for each other; data parallelism adds
what of its traffic does not hide behind the passes; then comes the optimizer. The parts are those of the busiest rank
and add up to the step. `timeline` prices one candidate the same way, with its pipeline followed action by action.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

import numpy as np

from .bare import Bare, reductions
from .case import Case, Number
from .constants import Constants, constants
from .flops import hardware_flops_per_token, model_flops_per_token
from .layer import MicroBatch, Traffic, Way, Weigher
from .orders import actions
from .schedule import Times, simulate, total
from .stages import Stage, split_layers
from .standins import rough_bubble


@dataclass(frozen=True)
class Price:
    """Seconds of a step and what they are made of; every number may be an array, one element a candidate."""

    seconds: Number
    parts: dict[str, Number]  # they add up to `seconds`
    tags: dict[str, str]  # of each part: measured, fitted or modelled
    hidden: dict[str, Number]  # seconds of traffic behind other work, by what it is for
    tokens_per_s: Number
    mfu: Number
    hfu: Number
    interval: tuple[Number, Number]  # nine in ten lie within
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Busiest:
    """The rank that sets a pipeline's pace: its blocks, and whether it has the embedding and the head (1 or 0)."""

    layers: Number
    stem: Number
    head: Number


@dataclass(frozen=True)
class Step:
    """What `price` and `timeline` have in common."""

    weigher: Weigher
    one: MicroBatch
    rank: Busiest
    send: Number  # seconds from one stage to the next

    @classmethod
    def of(cls, bare: Bare, given: Constants) -> Self:
        weigher = Weigher(bare, given, given.factors(bare.case.gpu))
        one = weigher.micro_batch()
        return cls(weigher, one, busiest(bare.case, one), weigher.wire(bare.wires.send))

    @property
    def each(self) -> Number:
        """Seconds of one micro-batch on the busiest rank."""
        rank, one = self.rank, self.one
        return rank.layers * one.block.seconds + rank.stem * one.stem.seconds + rank.head * one.loss.seconds


def price(case: Case, given: Constants | None = None) -> Price:
    return weigh(Bare.of(case), given or constants())


def weigh(bare: Bare, given: Constants) -> Price:
    """The same with other constants, at little cost."""
    step, case = Step.of(bare, given), bare.case
    waits = rough_bubble(case.schedule, case.pp, case.virtual, case.accumulation, step.each + 2 * step.send)
    return priced(step, waits)


def timeline(case: Case, given: Constants | None = None) -> Price:
    """Of one candidate, with the pipeline's waits as its actions give them."""
    if case.pp == 1:
        return price(case, given)
    step = Step.of(Bare.of(case), given or constants())
    pp, virtual, batches = int(case.pp), int(case.virtual), int(case.accumulation)
    stages = [stage_times(step, stage) for stage in cut(case)]
    whole = total(simulate(actions(case.schedule, pp, virtual, batches), stages, float(step.send)))
    return priced(step, whole - batches * (step.each + 2 * virtual * step.send))


def cut(case: Case) -> list[Stage]:
    """Blocks of every stage: evenly, as Megatron does it, or with fewer where the head is."""
    stages = int(case.pp * case.virtual)
    if not cuts_evenly(case):
        return split_layers(case.model, case.seq, stages)
    ends = [round(case.model.layers * i / stages) for i in range(stages + 1)]
    return [Stage(i, range(ends[i], ends[i + 1]), first=i == 0, last=i == stages - 1) for i in range(stages)]


def stage_times(step: Step, stage: Stage) -> Times:
    """Seconds of a stage's forward pass, its backward pass, and the two halves that some schedules make of it."""
    one, layers = step.one, len(stage.layers)
    forward, backward = (
        layers * getattr(one.block, way).seconds
        + stage.first * getattr(one.stem, way).seconds
        + stage.last * getattr(one.loss, way).seconds
        for way in ("forward", "backward")
    )
    apart = step.weigher.case.recompute == "none"  # else the whole backward pass is in I
    weight = layers * one.block.backward.parts["matmul"] / 2 + stage.last * one.loss.backward.work / 2
    return {
        "F": float(forward),
        "B": float(backward),
        "I": float(backward - weight * apart),
        "W": float(weight * apart),
    }


def priced(step: Step, waits: Number) -> Price:
    """All parts, with the time that the busiest rank of the pipeline waits."""
    weigher, one, rank = step.weigher, step.one, step.rank
    case, given = weigher.case, weigher.given
    batches = case.accumulation
    parts: dict[str, Number] = defaultdict(float)
    hidden: dict[str, Number] = defaultdict(float)
    for count, both in ((rank.layers, one.block), (rank.stem, one.stem), (rank.head, one.loss)):
        for way in (both.forward, both.backward):
            add(parts, hidden, batches * count, way)
    parts["pp"] = 2 * batches * case.virtual * step.send
    parts["bubble"] = waits
    tail = data_tail(weigher, rank, one)
    parts["dp"] = parts["dp"] + tail.exposed
    hidden["dp"] = hidden["dp"] + tail.hidden
    parts["optimizer"] = weigher.bare.optimizer.seconds(weigher.factors)
    parts["host"] = parts["host"] + given.step_s
    return finish(case, given, parts, hidden)


def add(parts: dict[str, Number], hidden: dict[str, Number], count: Number, way: Way) -> None:
    costs = {**way.parts, "recompute": way.again, "ep": way.expert, "host": way.host}
    for name, seconds in costs.items():
        parts[name] = parts[name] + count * seconds
    for name, traffic in {"tp": way.tensor, "cp": way.context, "dp": way.data}.items():
        parts[name] = parts[name] + count * traffic.exposed
        hidden[name] = hidden[name] + count * traffic.hidden


def finish(case: Case, given: Constants, parts: dict[str, Number], hidden: dict[str, Number]) -> Price:
    slow = given.software.get(case.software.name, 1.0)
    nodes = np.ceil(case.world / case.gpus_per_node)
    parts = {name: slow * seconds for name, seconds in parts.items()}
    parts["stragglers"] = sum(parts.values()) * given.jitter * np.log2(np.maximum(nodes, 1))
    seconds = sum(parts.values())
    rate = case.tokens_per_step / seconds
    peak = case.world * (case.gpu.peak_flops(case.dtype) or np.nan)
    model, hardware = (
        model_flops_per_token(case.model, case.seq),
        hardware_flops_per_token(case.model, case.seq, case.recompute),
    )
    tags = dict.fromkeys(parts, "fitted")
    margin = np.exp(1.645 * given.spread)
    return Price(
        seconds,
        parts,
        tags,
        dict(hidden),
        rate,
        rate * model / peak,
        rate * hardware / peak,
        (seconds / margin, seconds * margin),
    )


def busiest(case: Case, one: MicroBatch) -> Busiest:
    """Which rank sets the pace.

    Megatron cuts blocks evenly and the head comes on top; others give the last stage fewer blocks. With j blocks there,
    the pace is max(j·block + head, ⌈(layers − j) / (ranks − 1)⌉·block); the best j lies next to where both are equal.
    """
    layers, ranks = case.model.layers, case.pp
    per_rank = np.ceil(layers / ranks)
    alone = np.where(ranks > 1, 0.0, 1.0)
    if np.all(ranks == 1):
        return Busiest(per_rank, alone, alone)
    if cuts_evenly(case):
        return Busiest(per_rank, alone, np.ones_like(alone))
    head = one.loss.seconds / one.block.seconds  # in blocks
    others = np.maximum(ranks - 1, 1)
    even = np.clip((layers - head * others) / ranks, 1, np.maximum(layers - others, 1))
    low, high = np.floor(even), np.ceil(even)
    paces = [np.maximum(j + head, np.ceil((layers - j) / others)) for j in (low, high)]
    last = np.where(paces[0] <= paces[1], low, high)
    rest = np.ceil((layers - last) / others)
    ends = last + head >= rest
    blocks = np.where(ends, last, rest)
    return Busiest(np.where(ranks > 1, blocks, layers), alone, np.where(ranks > 1, ends * 1.0, 1.0))


def cuts_evenly(case: Case) -> bool:
    return case.software.name.startswith("megatron")


def data_tail(weigher: Weigher, rank: Busiest, one: MicroBatch) -> Traffic:
    """Beside the exchanges of each block: first and last messages, which nothing hides, or all gradients at once."""
    case, wires = weigher.case, weigher.bare.wires
    if case.zero == 3:
        first, last = wires.gather_root + wires.gather, wires.reduce_root + wires.reduce
        return Traffic(case.accumulation * (weigher.wire(first) + reductions(case) * weigher.wire(last)))
    summed, spread = weigher.wire(wires.gradients), weigher.wire(wires.new_weights)
    if not case.software.overlap:
        return Traffic(summed + spread)
    behind = weigher.hide(summed, rank.layers * one.block.backward.seconds)
    if case.software.master:  # new weights are needed, and sent, block by block in the next forward pass
        return behind + weigher.hide(spread, rank.layers * one.block.forward.seconds)
    return behind + Traffic(spread)
