"""One micro-batch on one rank: a block, what stands before and after the blocks, and what is exchanged meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..case import Case, Number
from ..software import Software
from .comm import TENSORS, Wire
from .constants import Constants
from .uncalibrated import Uncalibrated, reductions
from .work import Pass, stops_early

CALL = 3  # launches that a collective costs its host: streams are made to wait for each other before it and after
# What PyTorch's checkpoint costs the host of one eager block of ours, in launches: hooks for each tensor that is saved,
# and where some are kept a Python function at every op, twice. Measured with batches too small to fill a GPU.
CHECKPOINT = {"full": 48, "selective": 145, "mlp": 145}


@dataclass(frozen=True)
class Traffic:
    """Seconds that lengthen the step, and seconds that pass unseen."""

    exposed: Number = 0.0
    hidden: Number = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.exposed + other.exposed, self.hidden + other.hidden)

    def times(self, count: Number) -> Traffic:
        return Traffic(self.exposed * count, self.hidden * count)


def hide(comm: Number, behind: Number, contention: float) -> Traffic:
    """What exceeds the work it runs beside is exposed; what does not still slows that work down a little."""
    hidden = np.minimum(comm, behind)
    return Traffic(comm - hidden + contention * hidden, hidden)


def behind(phases: Sequence[tuple[Number, Number]], batches: Number, update: Number, beside: Number) -> Number:
    """Seconds by which a step of one GPU lasts longer than its work, because of its host.

    `phases` of a micro-batch in their order, each in seconds of the GPU and of the host; then the update on the GPU,
    and what the host does `beside` launching. It runs ahead wherever the GPU is slower. The step ends when the host was
    behind up to the end of some phase and the GPU then had the rest to do, or when one of them was behind all along.
    """
    work, host = sum(busy for busy, _ in phases), sum(launching for _, launching in phases)
    busy = batches * work + update
    end = np.maximum(busy, batches * host + beside)
    launched, left = 0.0 * host, work
    for seconds, launching in phases:  # of the first micro-batch, or of the last: in between it is neither
        launched, left = launched + launching, left - seconds
        end = np.maximum(end, launched + left + update + (batches - 1) * np.maximum(work, host))
    return end - busy


def hooks(software: Software, recompute: str, every: Number) -> Number:
    """Of one block in one pass, in launches: half of what a checkpoint costs, to put tensors away or to ask for them.

    Of other code only the kernels are known, and a compiler has the whole block to itself.
    """
    return CHECKPOINT.get(recompute, 0) / 2 / every if software.name == "lmworks" else 0.0


@dataclass(frozen=True)
class PassCost:
    """Forward or backward, seconds of each kind of cost."""

    parts: Mapping[str, Number]  # of its work
    again: Number = 0.0  # computed once more
    tensor: Traffic = field(default_factory=Traffic)
    context: Traffic = field(default_factory=Traffic)
    expert: Number = 0.0
    data: Traffic = field(default_factory=Traffic)
    launches: Number = 0.0
    away: Traffic = field(default_factory=Traffic)  # activations to host memory, or back
    host: Number = 0.0  # by which launching takes longer than all this

    @property
    def work(self) -> Number:
        return sum(self.parts.values())

    @property
    def busy(self) -> Number:
        exchanged = self.tensor.exposed + self.context.exposed + self.expert + self.data.exposed + self.away.exposed
        return self.work + self.again + exchanged

    @property
    def seconds(self) -> Number:
        return self.busy + self.host

    def launched_in(self, host_s: Number) -> PassCost:
        """A GPU works while the host launches what follows: the slower of the two sets the pace.

        Now one is slower and now the other, so neither hides the other wholly: the sum of squares, not the maximum.
        """
        return replace(self, host=np.hypot(self.busy, host_s) - self.busy)


@dataclass(frozen=True)
class ForwardBackward:
    forward: PassCost
    backward: PassCost

    @property
    def seconds(self) -> Number:
        return self.forward.seconds + self.backward.seconds


@dataclass(frozen=True)
class MicroBatch:
    """Of one rank: one block, the embedding, and final norm, head and loss."""

    block: ForwardBackward
    stem: ForwardBackward
    loss: ForwardBackward


@dataclass(frozen=True)
class Calibrated:
    """Turns bare seconds into those of a long run, with the fitted constants."""

    bare: Uncalibrated
    given: Constants
    factors: Mapping[str, Number]

    @property
    def case(self) -> Case:
        return self.bare.case

    def wire(self, wire: Wire) -> Number:
        """A message between machines passes the links inside them too: it is not priced above their pace."""
        return self.given.links * wire.near + max(self.given.links, self.given.network) * wire.far

    def hide(self, comm: Number, behind: Number) -> Traffic:
        return hide(comm, behind, self.given.contention)

    def micro_batch(self) -> MicroBatch:
        work = self.bare.work
        return MicroBatch(self.block(), self.end(work.stem), self.end(work.loss))

    def end(self, done: tuple[Pass, Pass]) -> ForwardBackward:
        tensor = Traffic(self.wire(self.bare.wires.ends))
        ways = (PassCost(way.parts(self.factors), tensor=tensor, launches=way.launches) for way in done)
        return ForwardBackward(*(self.launched(way) for way in ways))

    def parts(self, *done: Pass) -> dict[str, Number]:
        return {name: seconds for way in done for name, seconds in way.parts(self.factors).items()}

    def launch(self, count: Number) -> Number:
        """Host seconds; tensor-parallel ranks wait for the slowest host among them in every exchange."""
        uneven = 1 + self.given.uneven * np.log2(self.case.tp)
        return self.given.launch(self.case.software) * count * uneven * self.case.host

    def launched(self, way: PassCost) -> PassCost:
        """Ranks that exchange meet in every block, and so do their hosts; a host alone may run ahead all step long."""
        return way.launched_in(np.where(np.equal(self.case.world, 1), 0.0, self.launch(way.launches)))

    def waits(self, phases: Sequence[tuple[Number, Number]], update: Number) -> Number:
        """Seconds of a step in which one GPU, with no other rank to meet, waits for its host.

        `phases` of a micro-batch: (seconds of the GPU, launches); `update` is the optimizer's seconds.
        """
        case = self.case
        launched = [(busy, self.launch(launches)) for busy, launches in phases]
        beside = self.launch(self.bare.optimizer.launches) + self.given.beside(case.software) * case.host
        return behind(launched, case.accumulation, update, beside)

    def context(self, seconds: Number, way: Pass) -> Traffic:
        """Keys travel round the ring behind attention to those at hand; Ulysses' exchanges hide behind nothing."""
        if self.case.cp_method == "ulysses":
            return Traffic(exposed=seconds)
        return self.hide(seconds, way.part("attention", self.factors) / self.case.cp).times(self.case.cp - 1)

    def block(self) -> ForwardBackward:
        case, work, wires = self.case, self.bare.work, self.bare.wires
        ahead, back = work.block
        again = work.again.seconds(self.factors) / case.recompute_every
        repeats = (case.recompute == "full") / case.recompute_every  # exchanges of a block that runs again
        tensor = [self.tensor(self.wire(wire), way) for wire, way in zip(wires.tensor, work.block, strict=True)]
        ring = [self.context(self.wire(wire), way) for wire, way in zip(wires.context, work.block, strict=True)]
        expert = self.wire(wires.expert)
        passes = ahead.seconds(self.factors), back.seconds(self.factors) + again
        data = self.data(*passes)
        # An engine of its own copies: products beside it were measured to take as long as alone.
        away = [hide(self.bare.away, seconds, 0.0) for seconds in passes]
        calls = CALL * self.calls()
        kept = hooks(case.software, case.recompute, case.recompute_every)
        launches = ahead.launches + calls + kept
        forward = PassCost(
            self.parts(ahead, self.bare.copies[0]), 0.0, tensor[0], ring[0], expert, data[0], launches, away[0]
        )
        backward = PassCost(
            self.parts(back, self.bare.copies[1]),
            again,
            tensor[1] + tensor[0].times(repeats * (0.75 if stops_early(case.software) else 1.0)),
            ring[1] + ring[0].times(repeats),
            (1 + repeats) * expert,
            data[1],
            back.launches + work.again.launches / case.recompute_every + kept + calls * (1 + repeats),
            away[1],
        )
        return ForwardBackward(self.launched(forward), self.launched(backward))

    def calls(self) -> Number:
        """Collectives that a block calls each way."""
        case = self.case
        tensor = 2 * (1 + case.sp) * np.where(case.tp > 1, 1, 0)
        expert = 2 * bool(case.model.experts) * np.where(case.ep > 1, 1, 0)
        return tensor + expert + (case.cp - 1) + (case.zero == 3)

    def tensor(self, comm: Number, way: Pass) -> Traffic:
        """Cut into pieces, the exchanges run behind the products that they feed; else nothing hides them."""
        if not self.case.software.async_tp:
            return Traffic(comm)
        return hide(comm, way.part("matmul", self.factors), self.given.pieces)

    def data(self, forward: Number, backward: Number) -> tuple[Traffic, Traffic]:
        """ZeRO-3: the next block is gathered while this one works; gradients leave while the next block's are made."""
        case, wires = self.case, self.bare.wires
        if case.zero < 3:
            return Traffic(), Traffic()
        gather, reduce = self.wire(wires.gather), self.wire(wires.reduce)
        again: Number = 0.0
        if case.software.piecewise:
            gather = gather + self.given.launch(case.software) * TENSORS * case.dp_shard * case.cp
            again = (case.recompute == "full") / case.recompute_every
        back = gather * (case.reshard + again) + reduce * reductions(case)
        if not case.software.overlap:
            return Traffic(gather), Traffic(back)
        return self.hide(gather, forward), self.hide(back, backward)
