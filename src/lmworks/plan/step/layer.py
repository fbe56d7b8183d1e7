"""The cost of one micro-batch on one rank: a block, the embedding, and final norm, head and loss.

Each pass has compute, recompute, collectives (exposed and overlapped) and host launches. Fitted constants turn the
uncalibrated seconds of kernels and idle links into those of a long run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..case import Case, Number
from ..software import Software
from .comm import SHARDED_TENSORS, CommSeconds
from .constants import Constants
from .uncalibrated import Pass, Uncalibrated, reductions_per_micro_batch, stops_early

# Kernel launches that one collective costs the host: the collective, and an event wait on both streams.
LAUNCHES_PER_COLLECTIVE = 3
# Host cost of PyTorch's activation checkpointing for one eager block of our trainer, in kernel launches: a hook for
# each saved tensor, and with selective policies a Python dispatch at every op, twice. Measured with batches too small
# to fill a GPU.
CHECKPOINT_LAUNCHES = {"full": 48, "selective": 145, "mlp": 145}


@dataclass(frozen=True)
class Traffic:
    """Seconds of communication that lengthen the step, and seconds that are overlapped with compute."""

    exposed: Number = 0.0
    hidden: Number = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.exposed + other.exposed, self.hidden + other.hidden)

    def scaled(self, count: Number) -> Traffic:
        return Traffic(self.exposed * count, self.hidden * count)


def overlap(comm: Number, compute: Number, contention: float) -> Traffic:
    """Communication beyond `compute` is exposed; the overlapped rest slows compute down by the share `contention`."""
    hidden = np.minimum(comm, compute)
    return Traffic(comm - hidden + contention * hidden, hidden)


def host_bound_seconds(
    phases: Sequence[tuple[Number, Number]], batches: Number, update: Number, overhead: Number
) -> Number:
    """Seconds by which the host lengthens a step of one GPU.

    `phases` of a micro-batch in order, each (GPU seconds, host seconds); `update`: GPU seconds of the optimizer;
    `overhead`: host seconds of a step beside launches. The host runs ahead wherever the GPU is slower. The step ends
    when the host was the bottleneck up to the end of some phase and the GPU then had the rest to do, or when one of
    them was the bottleneck throughout.
    """
    work, host = sum(busy for busy, _ in phases), sum(launching for _, launching in phases)
    busy = batches * work + update
    end = np.maximum(busy, batches * host + overhead)
    launched, left = 0.0 * host, work
    for seconds, launching in phases:  # of the first micro-batch, or of the last: in between it is neither
        launched, left = launched + launching, left - seconds
        end = np.maximum(end, launched + left + update + (batches - 1) * np.maximum(work, host))
    return end - busy


def checkpoint_launches(software: Software, recompute: str, every: Number) -> Number:
    """Host cost of checkpointing one block in one pass, in launches: half when tensors are saved, half when unpacked.

    0 for compiled blocks, and for other code bases, of which only the kernels are known.
    """
    return CHECKPOINT_LAUNCHES.get(recompute, 0) / 2 / every if software.name == "lmworks" else 0.0


@dataclass(frozen=True)
class PassCost:
    """One forward or backward pass, in seconds."""

    parts: Mapping[str, Number]  # compute, by line of the step-time sheet
    recompute: Number = 0.0
    tp: Traffic = field(default_factory=Traffic)
    cp: Traffic = field(default_factory=Traffic)
    ep: Number = 0.0
    dp: Traffic = field(default_factory=Traffic)
    launches: Number = 0.0  # a count
    offload: Traffic = field(default_factory=Traffic)  # activations to host memory, or back
    host: Number = 0.0  # by which launching takes longer than all this

    @property
    def busy(self) -> Number:
        """GPU seconds: compute, recompute and exposed communication."""
        exposed = self.tp.exposed + self.cp.exposed + self.ep + self.dp.exposed + self.offload.exposed
        return sum(self.parts.values()) + self.recompute + exposed

    @property
    def seconds(self) -> Number:
        return self.busy + self.host


@dataclass(frozen=True)
class ForwardBackward:
    forward: PassCost
    backward: PassCost

    @property
    def seconds(self) -> Number:
        return self.forward.seconds + self.backward.seconds


@dataclass(frozen=True)
class MicroBatch:
    """One rank's costs: one block; the embedding; final norm, head and loss."""

    block: ForwardBackward
    stem: ForwardBackward
    loss: ForwardBackward


@dataclass(frozen=True)
class Calibrated:
    """Uncalibrated seconds with the fitted constants applied."""

    uncalibrated: Uncalibrated
    fitted: Constants
    factors: Mapping[str, Number]  # by kind of kernel

    @property
    def case(self) -> Case:
        return self.uncalibrated.case

    def comm_seconds(self, comm: CommSeconds) -> Number:
        """Inter-node messages cross the links inside a node too: never faster than those."""
        return self.fitted.links * comm.intra_node + max(self.fitted.links, self.fitted.network) * comm.inter_node

    def launch_seconds(self, count: Number) -> Number:
        """Host seconds; tensor-parallel ranks wait for the slowest host in every collective."""
        skew = 1 + self.fitted.host_skew * np.log2(self.case.tp)
        return self.fitted.launch_seconds(self.case.software) * count * skew * self.case.host

    def with_host(self, cost: PassCost) -> PassCost:
        """The pass with its host-bound time. Ranks of a group synchronise in every block, and so do their hosts.

        Host and GPU alternate as the bottleneck, so neither hides the other wholly: √(GPU² + host²), not the maximum.
        One GPU alone is priced per step (`host_wait_seconds`).
        """
        host_s = np.where(np.equal(self.case.world, 1), 0.0, self.launch_seconds(cost.launches))
        return replace(cost, host=np.hypot(cost.busy, host_s) - cost.busy)

    def host_wait_seconds(self, phases: Sequence[tuple[Number, Number]], update: Number) -> Number:
        """Seconds of a step in which one GPU waits for its host.

        `phases` of a micro-batch: (GPU seconds, launches); `update`: seconds of the optimizer.
        """
        case = self.case
        launched = [(busy, self.launch_seconds(launches)) for busy, launches in phases]
        optimizer = self.launch_seconds(self.uncalibrated.optimizer.launches)
        overhead = optimizer + self.fitted.step_overhead(case.software) * case.host
        return host_bound_seconds(launched, case.accumulation, update, overhead)

    def micro_batch(self) -> MicroBatch:
        work = self.uncalibrated.work
        return MicroBatch(self.block(), self.first_or_last(work.stem), self.first_or_last(work.loss))

    def first_or_last(self, done: tuple[Pass, Pass]) -> ForwardBackward:
        """Embedding, or head and loss."""
        tp = Traffic(self.comm_seconds(self.uncalibrated.comm.vocab))
        costs = (PassCost(one_pass.parts(self.factors), tp=tp, launches=one_pass.launches) for one_pass in done)
        return ForwardBackward(*(self.with_host(cost) for cost in costs))

    def block(self) -> ForwardBackward:
        case, work, comm = self.case, self.uncalibrated.work, self.uncalibrated.comm
        forward, backward = work.block
        recompute = work.recomputed.seconds(self.factors) / case.recompute_every
        repeats = (case.recompute == "full") / case.recompute_every  # collectives of a block that is recomputed
        tp = [self.tp(self.comm_seconds(each), way) for each, way in zip(comm.tp, work.block, strict=True)]
        cp = [self.cp(self.comm_seconds(each), way) for each, way in zip(comm.cp, work.block, strict=True)]
        ep = self.comm_seconds(comm.ep)
        compute = forward.seconds(self.factors), backward.seconds(self.factors) + recompute
        dp = self.dp(*compute)
        # A copy engine of its own: GEMMs beside it were measured to take as long as alone, so no contention.
        offload = [overlap(self.uncalibrated.activation_offload, seconds, 0.0) for seconds in compute]
        # Collectives of a block in one direction.
        tp_calls = 2 * (1 + case.sp) * np.where(case.tp > 1, 1, 0)
        ep_calls = 2 * bool(case.model.experts) * np.where(case.ep > 1, 1, 0)
        collectives = LAUNCHES_PER_COLLECTIVE * (tp_calls + ep_calls + (case.cp - 1) + (case.zero == 3))
        hooks = checkpoint_launches(case.software, case.recompute, case.recompute_every)
        copies = self.uncalibrated.copies
        forward_cost = PassCost(
            {**forward.parts(self.factors), **copies[0].parts(self.factors)},
            0.0,
            tp[0],
            cp[0],
            ep,
            dp[0],
            forward.launches + collectives + hooks,
            offload[0],
        )
        backward_cost = PassCost(
            {**backward.parts(self.factors), **copies[1].parts(self.factors)},
            recompute,
            tp[1] + tp[0].scaled(repeats * (0.75 if stops_early(case.software) else 1.0)),
            cp[1] + cp[0].scaled(repeats),
            (1 + repeats) * ep,
            dp[1],
            backward.launches + work.recomputed.launches / case.recompute_every + hooks + collectives * (1 + repeats),
            offload[1],
        )
        return ForwardBackward(self.with_host(forward_cost), self.with_host(backward_cost))

    def tp(self, comm: Number, compute: Pass) -> Traffic:
        """Exposed; with async TP cut into pieces that overlap with the GEMMs they feed."""
        if not self.case.software.async_tp:
            return Traffic(comm)
        return overlap(comm, compute.part("matmul", self.factors), self.fitted.async_tp_contention)

    def cp(self, comm: Number, compute: Pass) -> Traffic:
        """Ring attention overlaps each hop with attention over the keys at hand; Ulysses' all-to-alls are exposed."""
        if self.case.cp_method == "ulysses":
            return Traffic(exposed=comm)
        attention = compute.part("attention", self.factors) / self.case.cp
        return overlap(comm, attention, self.fitted.contention).scaled(self.case.cp - 1)

    def dp(self, forward: Number, backward: Number) -> tuple[Traffic, Traffic]:
        """ZeRO-3: all-gather of the next block and reduce-scatter of the last one, overlapped with this block."""
        case, comm = self.case, self.uncalibrated.comm
        if case.zero < 3:
            return Traffic(), Traffic()
        gather, reduce = self.comm_seconds(comm.all_gather), self.comm_seconds(comm.reduce_scatter)
        recomputed: Number = 0.0
        if case.software.per_tensor_gather:
            gather = gather + self.fitted.launch_seconds(case.software) * SHARDED_TENSORS * case.dp_shard * case.cp
            recomputed = (case.recompute == "full") / case.recompute_every
        back = gather * (case.reshard + recomputed) + reduce * reductions_per_micro_batch(case)
        if not case.software.overlap:
            return Traffic(gather), Traffic(back)
        contention = self.fitted.contention
        return overlap(gather, forward, contention), overlap(back, backward, contention)
