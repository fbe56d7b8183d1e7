"""One micro-batch on one rank: a block, what stands before and after the blocks, and what is exchanged meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..case import Case, Number
from .bare import Bare, reductions
from .comm import TENSORS, Wire
from .constants import Constants
from .work import Pass, stops_early

CALL = 3  # launches that a collective costs its host: streams are made to wait for each other before it and after


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


@dataclass(frozen=True)
class Way:
    """Forward or backward, seconds of each kind of cost."""

    parts: Mapping[str, Number]  # of its work
    again: Number = 0.0  # computed once more
    tensor: Traffic = field(default_factory=Traffic)
    context: Traffic = field(default_factory=Traffic)
    expert: Number = 0.0
    data: Traffic = field(default_factory=Traffic)
    host: Number = 0.0  # by which launching takes longer than all this

    @property
    def work(self) -> Number:
        return sum(self.parts.values())

    @property
    def busy(self) -> Number:
        exchanged = self.tensor.exposed + self.context.exposed + self.expert + self.data.exposed
        return self.work + self.again + exchanged

    @property
    def seconds(self) -> Number:
        return self.busy + self.host

    def launched_in(self, host_s: Number) -> Way:
        """A GPU works while the host launches what follows: the slower of the two sets the pace.

        Now one is slower and now the other, so neither hides the other wholly: the sum of squares, not the maximum.
        """
        return replace(self, host=np.hypot(self.busy, host_s) - self.busy)


@dataclass(frozen=True)
class Both:
    forward: Way
    backward: Way

    @property
    def seconds(self) -> Number:
        return self.forward.seconds + self.backward.seconds


@dataclass(frozen=True)
class MicroBatch:
    """Of one rank: one block, the embedding, and final norm, head and loss."""

    block: Both
    stem: Both
    loss: Both


@dataclass(frozen=True)
class Weigher:
    """Turns bare seconds into those of a long run, with the fitted constants."""

    bare: Bare
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

    def end(self, done: tuple[Pass, Pass]) -> Both:
        tensor = Traffic(self.wire(self.bare.wires.ends))
        ways = (Way(way.parts(self.factors), tensor=tensor).launched_in(self.launch(way.launches)) for way in done)
        return Both(*ways)

    def parts(self, *done: Pass) -> dict[str, Number]:
        return {name: seconds for way in done for name, seconds in way.parts(self.factors).items()}

    def launch(self, count: Number) -> Number:
        """Host seconds; tensor-parallel ranks wait for the slowest host among them in every exchange."""
        return self.given.launch(self.case.software) * count * (1 + self.given.uneven * np.log2(self.case.tp))

    def context(self, seconds: Number, way: Pass) -> Traffic:
        """Keys travel round the ring behind attention to those at hand; Ulysses' exchanges hide behind nothing."""
        if self.case.cp_method == "ulysses":
            return Traffic(exposed=seconds)
        return self.hide(seconds, way.part("attention", self.factors) / self.case.cp).times(self.case.cp - 1)

    def block(self) -> Both:
        case, work, wires = self.case, self.bare.work, self.bare.wires
        ahead, back = work.block
        again = work.again.seconds(self.factors) / case.recompute_every
        repeats = (case.recompute == "full") / case.recompute_every  # exchanges of a block that runs again
        tensor = [self.tensor(self.wire(wire), way) for wire, way in zip(wires.tensor, work.block, strict=True)]
        ring = [self.context(self.wire(wire), way) for wire, way in zip(wires.context, work.block, strict=True)]
        expert = self.wire(wires.expert)
        data = self.data(ahead.seconds(self.factors), back.seconds(self.factors) + again)
        forward = Way(self.parts(ahead, self.bare.copies[0]), 0.0, tensor[0], ring[0], expert, data[0])
        backward = Way(
            self.parts(back, self.bare.copies[1]),
            again,
            tensor[1] + tensor[0].times(repeats * (0.75 if stops_early(case.software) else 1.0)),
            ring[1] + ring[0].times(repeats),
            (1 + repeats) * expert,
            data[1],
        )
        calls = CALL * self.calls()
        launches = back.launches + work.again.launches / case.recompute_every + calls * (1 + repeats)
        ways = (forward, ahead.launches + calls), (backward, launches)
        return Both(*(way.launched_in(self.launch(count)) for way, count in ways))

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
