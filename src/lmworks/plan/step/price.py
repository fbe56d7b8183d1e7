"""The time of a training step on any layout: one candidate, or thousands at once.

`price` is a closed form over arrays. A rank's micro-batch is its blocks, and on the ends embedding and head; what
layers exchange lengthens them; a pipeline adds the time in which its ranks wait for each other; data parallelism adds
what of its traffic does not hide behind the passes; then comes the optimizer. The parts are those of the busiest rank
and add up to the step. `timeline` prices one candidate the same way, with its pipeline followed action by action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..case import Case, Number
from ..flops import hardware_flops_per_token, model_flops_per_token
from ..pipelines.schedule import Span
from .constants import Constants, constants, factor, family
from .layer import Calibrated, MicroBatch, PassCost, Traffic
from .pipeline import Busiest, Cut, followed, pace, spans
from .uncalibrated import Uncalibrated, reductions


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
class Step:
    """What `price` and `timeline` have in common."""

    weigher: Calibrated
    one: MicroBatch
    cut: Cut
    send: Number  # seconds from one stage to the next

    @classmethod
    def of(cls, bare: Uncalibrated, given: Constants) -> Self:
        case = bare.case
        weigher = Calibrated(bare, given, given.factors(case.gpu, case.software, case.world))
        one = weigher.micro_batch()
        return cls(weigher, one, Cut.of(bare.case), weigher.wire(bare.wires.send))


def price(case: Case, given: Constants | None = None) -> Price:
    return weigh(Uncalibrated.of(case), given or constants())


def weigh(bare: Uncalibrated, given: Constants) -> Price:
    """The same with other constants, at little cost."""
    step, case = Step.of(bare, given), bare.case
    quick = pace(case, step.cut, step.one, 0.0)
    whole = pace(case, step.cut, step.one, step.send) if np.any(case.pp > 1) else quick
    return priced(step, quick, whole)


def timeline(case: Case, given: Constants | None = None) -> Price:
    """Of one candidate, with the pipeline's waits as its actions give them."""
    if case.pp == 1:
        return price(case, given)
    step = Step.of(Uncalibrated.of(case), given or constants())
    return priced(step, followed(case, step.one, 0.0), followed(case, step.one, float(step.send)))


def passes(case: Case, given: Constants | None = None) -> list[Span]:
    """The pipeline of one candidate in time, as `timeline` follows it."""
    step = Step.of(Uncalibrated.of(case), given or constants())
    return spans(case, step.one, float(step.send))


def priced(step: Step, quick: Number, whole: Number) -> Price:
    """All parts of a step whose passes last `whole` seconds, and `quick` where messages take no time."""
    weigher, one = step.weigher, step.one
    case, given = weigher.case, weigher.given
    rank = Busiest.of(case, step.cut, one)
    batches = case.accumulation
    parts: dict[str, Number] = defaultdict(float)
    hidden: dict[str, Number] = defaultdict(float)
    for count, both in ((rank.layers, one.block), (rank.stem, one.stem), (rank.head, one.loss)):
        for way in (both.forward, both.backward):
            add(parts, hidden, batches * count, way)
    quick = np.maximum(quick, batches * rank.seconds(one))  # rounding, or a closed form that is a little short
    parts["bubble"] = quick - batches * rank.seconds(one)
    parts["pp"] = np.maximum(0.0, whole - quick)
    tail = data_tail(weigher, rank, one)
    parts["dp"] = parts["dp"] + tail.exposed
    hidden["dp"] = hidden["dp"] + tail.hidden
    parts["optimizer"] = weigher.bare.optimizer.seconds(weigher.factors)
    parts["offload"] = parts["offload"] + weigher.bare.offload
    beside = parts["host"] + given.beside(case.software) * case.host
    alone = weigher.waits(phases(rank, one), parts["optimizer"] + weigher.bare.offload)
    parts["host"] = np.where(np.equal(case.world, 1), alone, beside)[()]
    return finish(case, given, parts, hidden)


def phases(rank: Busiest, one: MicroBatch) -> list[tuple[Number, Number]]:
    """Seconds and launches of a micro-batch on one GPU: forward, loss, backward."""
    ends = (one.loss.forward, one.loss.backward)

    def blocks(stem: PassCost, block: PassCost) -> tuple[Number, Number]:
        busy = rank.stem * stem.busy + rank.layers * block.busy
        return busy, rank.stem * stem.launches + rank.layers * block.launches

    return [
        blocks(one.stem.forward, one.block.forward),
        (rank.head * sum(way.busy for way in ends), rank.head * sum(way.launches for way in ends)),
        blocks(one.stem.backward, one.block.backward),
    ]


def add(parts: dict[str, Number], hidden: dict[str, Number], count: Number, way: PassCost) -> None:
    costs = {**way.parts, "recompute": way.again, "ep": way.expert, "host": way.host}
    for name, seconds in costs.items():
        parts[name] = parts[name] + count * seconds
    for name, traffic in {"tp": way.tensor, "cp": way.context, "dp": way.data, "offload": way.away}.items():
        parts[name] = parts[name] + count * traffic.exposed
        hidden[name] = hidden[name] + count * traffic.hidden


def finish(case: Case, given: Constants, parts: dict[str, Number], hidden: dict[str, Number]) -> Price:
    slow = factor(given.software, case.software.name)
    nodes = np.ceil(case.world / case.cluster.gpus_per_node)
    parts = {name: slow * seconds for name, seconds in parts.items()}
    parts["stragglers"] = sum(parts.values()) * given.jitter * np.log2(np.maximum(nodes, 1))
    seconds = sum(parts.values())
    rate = case.tokens_per_step / seconds
    peak = case.world * (case.gpu.peak_flops(case.dtype) or np.nan)
    model, hardware = (
        model_flops_per_token(case.model, case.seq),
        hardware_flops_per_token(case.model, case.seq, case.recompute),
    )
    known = given.knows(case.gpu, case.software)
    margin = np.exp(1.645 * (given.spread if known else given.unseen))
    return Price(
        seconds,
        parts,
        tags(case, given, parts),
        dict(hidden),
        rate,
        rate * model / peak,
        rate * hardware / peak,
        (seconds / margin, seconds * margin),
        () if known else (f"no run of {case.software.name} on {case.gpu.name} was fitted: the interval is wider",),
    )


def tags(case: Case, given: Constants, parts: Iterable[str]) -> dict[str, str]:
    """What the figures rest on. Links between nodes and waits were never measured on their own."""
    work = "fitted" if family(case.gpu) in given.products else "modelled"
    inside = bool(np.all(case.world <= case.cluster.gpus_per_node))
    found = dict.fromkeys(parts, "measured" if case.cluster.profile else work)
    found |= dict.fromkeys(("tp", "cp", "ep", "dp", "pp"), "fitted" if inside else "modelled")
    return {**found, "host": "fitted", "bubble": "modelled", "offload": "modelled", "stragglers": "fitted"}


def data_tail(weigher: Calibrated, rank: Busiest, one: MicroBatch) -> Traffic:
    """Beside the exchanges of each block: first and last messages, which nothing hides, or all gradients at once."""
    case, wires = weigher.case, weigher.bare.wires
    if case.zero == 3:
        first, last = wires.gather_root + wires.gather, wires.reduce_root + wires.reduce
        return Traffic(case.accumulation * (weigher.wire(first) + reductions(case) * weigher.wire(last)))
    summed, spread = weigher.wire(wires.gradients), weigher.wire(wires.new_weights)
    if not case.software.overlap:
        return Traffic(summed + spread)
    # With several stages on a rank, the gradients of one leave while the others see their last micro-batches.
    open_for = rank.layers * (1 + (np.minimum(case.pp, case.accumulation) - 1) * (1 - 1 / case.virtual))
    behind = weigher.hide(summed, open_for * one.block.backward.seconds)
    if case.software.master:  # new weights are needed, and sent, block by block in the next forward pass
        return behind + weigher.hide(spread, open_for * one.block.forward.seconds)
    return behind + Traffic(spread)
