"""One micro-batch on one rank: a block, what stands before and after the blocks, and what is exchanged meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .case import Case, Number
from .comm import (
    Links,
    Traffic,
    Weights,
    context_parallel,
    expert_parallel,
    gather_block,
    hide,
    reduce_block,
    tensor_parallel,
    vocabulary_parallel,
)
from .ops import Kernel
from .work import Clock, Pass, Work, share


@dataclass(frozen=True)
class Way:
    """Forward or backward, seconds of each kind of cost."""

    work: Number
    again: Number = 0.0  # computed once more
    tensor: Number = 0.0
    context: Traffic = Traffic()
    expert: Number = 0.0
    data: Traffic = Traffic()
    host: Number = 0.0  # by which launching takes longer than all this

    @property
    def busy(self) -> Number:
        exchanged = self.tensor + self.context.exposed + self.expert + self.data.exposed
        return self.work + self.again + exchanged

    @property
    def seconds(self) -> Number:
        return self.busy + self.host

    def launched_in(self, host_s: Number) -> Way:
        """A GPU works while the host launches what follows: the slower of the two sets the pace."""
        return replace(self, host=np.maximum(0.0, host_s - self.busy))


@dataclass(frozen=True)
class Both:
    """Forward and backward."""

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


def micro_batch(case: Case, work: Work, clock: Clock, links: Links) -> MicroBatch:
    weights = Weights.of(case)
    ends = vocabulary_parallel(case, links) / 4  # embedding and head, each way
    return MicroBatch(
        block(case, work, clock, links, weights),
        Both(*(end(links, done, ends) for done in work.stem)),
        Both(*(end(links, done, ends) for done in work.loss)),
    )


def end(links: Links, done: Pass, tensor: Number) -> Way:
    return Way(done.seconds, tensor=tensor).launched_in(links.given.launch_s * done.launches)


def block(case: Case, work: Work, clock: Clock, links: Links, weights: Weights) -> Both:
    launch_s = links.given.launch_s
    again = work.again.seconds / case.recompute_every
    repeats = (case.recompute == "full") / case.recompute_every  # exchanges of a block that runs again
    there, back = tensor_parallel(case, links)
    attention = (share(work.forward, "attention"), share(work.backward, "attention"))
    context, context_back = context_parallel(case, links, *attention)
    expert = expert_parallel(case, links)
    copies = copy_seconds(case, clock, weights)
    data, data_back = data_parallel(case, links, weights, work.forward.seconds, work.backward.seconds + again)
    forward = Way(work.forward.seconds + copies[0], 0.0, there, context, expert, data)
    backward = Way(
        work.backward.seconds + copies[1],
        again,
        back + repeats * there,
        context_back + context.times(repeats),
        (1 + repeats) * expert,
        data_back,
    )
    launches = work.backward.launches + work.again.launches / case.recompute_every
    return Both(forward.launched_in(launch_s * work.forward.launches), backward.launched_in(launch_s * launches))


def data_parallel(
    case: Case, links: Links, weights: Weights, forward: Number, backward: Number
) -> tuple[Traffic, Traffic]:
    """ZeRO-3: the next block is gathered while this one works; gradients leave while the next block's are made."""
    if case.zero < 3:
        return Traffic(), Traffic()
    contention = links.given.contention
    gather, reduce = gather_block(case, links, weights), reduce_block(case, links, weights)
    back = gather * case.reshard + reduce * each_time(case)
    return hide(gather, forward, contention), hide(back, backward, contention)


def each_time(case: Case) -> Number:
    """ZeRO-3: our trainer reduces after the last micro-batch only, others after every one."""
    return 1 / case.accumulation if case.software.name.startswith("lmworks") else 1.0


def copy_seconds(case: Case, clock: Clock, weights: Weights) -> tuple[Number, Number]:
    """Of a block: gathered weights leave the buffer they came in, gradients are packed, or added to earlier ones."""
    if case.zero == 3:
        width = case.software.gather or case.width
        gather = clock(Kernel("stream", bytes=2.0 * width * weights.block), case.dtype)
        reduce = clock(Kernel("stream", bytes=2.0 * case.software.reduce * weights.block), case.dtype)
        return gather, gather * case.reshard + reduce * each_time(case)
    summed = clock(Kernel("stream", bytes=(2.0 * case.software.gradients + 2) * weights.block), case.dtype)
    return 0.0, np.where((case.accumulation > 1) | (case.software.master > 0), summed, 0.0)
