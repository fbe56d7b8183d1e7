"""The cost of one micro-batch on one rank: a block, the embedding, and final norm, head and loss.

Each pass has compute, recompute, collectives (exposed and overlapped) and host launches. Fitted constants turn the
uncalibrated seconds of kernels and idle links into those of a long run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..case import Case, Number
from .comm import SHARDED_TENSORS, CommSeconds
from .constants import Constants
from .uncalibrated import Pass, Uncalibrated, stops_early

# Kernel launches that one collective costs the host: the collective, and an event wait on both streams.
LAUNCHES_PER_COLLECTIVE = 3
# Host cost of PyTorch's activation checkpointing, in kernel launches of one block in one pass: a hook for each saved
# tensor, and with selective policies a Python dispatch at every op; half of it when tensors are saved, half when they
# are unpacked. By code base and policy; measured of our eager blocks, with batches too small to fill a GPU. Compiled
# blocks have no hooks, and of other code bases only the kernels are known.
CHECKPOINT_LAUNCHES = {("lmworks", "full"): 24.0, ("lmworks", "selective"): 72.5, ("lmworks", "mlp"): 72.5}
FORWARD, BACKWARD = 0, 1  # of a pair of passes


class Traffic(NamedTuple):
    """Seconds of communication that lengthen the step, and seconds that are overlapped with compute."""

    exposed: Number = 0.0
    hidden: Number = 0.0


def overlap(comm: Number, compute: Number, contention: float) -> Traffic:
    """Communication beyond `compute` is exposed; the overlapped rest slows compute down by the share `contention`."""
    hidden = np.minimum(comm, compute)
    return Traffic(comm - hidden + contention * hidden, hidden)


@dataclass(frozen=True)
class PassCost:
    """One forward or backward pass, in seconds."""

    parts: Mapping[str, Number]  # by line of the step-time sheet: compute, exposed communication, waiting for the host
    hidden: Mapping[str, Number]  # overlapped communication, by axis
    busy: Number  # GPU seconds: all parts but the host's
    seconds: Number
    launches: Number  # a count


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
    # Seconds of a block's weight gradients, which split-backward schedules delay: half of its backward GEMMs, or 0
    # where recompute leaves the backward pass whole.
    weight_gradients: Number


@dataclass(frozen=True)
class Calibrated:
    """Uncalibrated seconds with the fitted constants applied."""

    case: Case
    uncalibrated: Uncalibrated
    fitted: Constants
    factors: Mapping[str, Number]  # by kind of kernel
    launch_s: float  # host seconds per kernel launch
    step_s: float  # host seconds of a step beside its launches

    def comm_seconds(self, comm: CommSeconds) -> Number:
        """Inter-node messages cross the links inside a node too: never faster than those."""
        return self.fitted.links * comm.intra_node + max(self.fitted.links, self.fitted.network) * comm.inter_node

    def launch_seconds(self, count: Number) -> Number:
        """Host seconds; tensor-parallel ranks wait for the slowest host in every collective."""
        skew = 1 + self.fitted.host_skew * np.log2(self.case.tp)
        return self.launch_s * count * skew * self.case.host * (not self.case.software.one_graph)

    def vocab_parallel(self, forward: Pass, backward: Pass) -> ForwardBackward:
        """Embedding, or final norm, head and loss; tensor-parallel ranks have a part of the vocabulary each."""
        traffic = {"tp": Traffic(self.comm_seconds(self.uncalibrated.comm.vocab))}
        return ForwardBackward(
            self.cost(forward.parts(self.factors), traffic, forward.launches),
            self.cost(backward.parts(self.factors), traffic, backward.launches),
        )

    def cost(self, compute: Mapping[str, Number], traffic: Mapping[str, Traffic], launches: Number) -> PassCost:
        """A pass with its host-bound time. Ranks of a group synchronise in every block, and so do their hosts.

        Host and GPU alternate as the bottleneck, so neither hides the other wholly: √(GPU² + host²), not the maximum.
        One GPU alone is priced per step (`host_wait_seconds`).
        """
        parts, hidden = dict(compute), {}
        for axis, comm in traffic.items():
            parts[axis], hidden[axis] = comm
        busy = sum(parts.values())
        host_s = np.where(np.equal(self.case.world, 1), 0.0, self.launch_seconds(launches))
        seconds = np.hypot(busy, host_s)
        return PassCost({**parts, "host": seconds - busy}, hidden, busy, seconds, launches)

    def block(self) -> ForwardBackward:
        case, work = self.case, self.uncalibrated.work
        forward, backward = work.block[0].parts(self.factors), work.block[1].parts(self.factors)
        recompute = sum(work.recomputed.parts(self.factors).values()) / case.recompute_every
        there = self.traffic(FORWARD, forward, sum(forward.values()))
        back = self.traffic(BACKWARD, backward, sum(backward.values()) + recompute)
        repeats = (case.recompute == "full") / case.recompute_every  # collectives of a block that is recomputed
        if case.recompute == "full":
            for axis, share in (("tp", repeats * (0.75 if stops_early(case.software) else 1.0)), ("cp", repeats)):
                once, more = back[axis], there[axis]
                back[axis] = Traffic(once.exposed + share * more.exposed, once.hidden + share * more.hidden)
        copies, copies_back = self.uncalibrated.copies
        both = sum(forward.values()) + sum(backward.values()) + recompute
        there["ep"], back["ep"] = self.expert_parallel(1, both / 2), self.expert_parallel(1 + repeats, both / 2)
        forward |= copies.parts(self.factors)
        backward |= {**copies_back.parts(self.factors), "recompute": recompute}
        # Collectives of a block in one direction, as launches.
        tp_calls = 2 * (1 + case.sp) * np.where(case.tp > 1, 1, 0)
        ep_calls = 2 * bool(case.model.experts) * np.where(case.ep > 1, 1, 0)
        collectives = LAUNCHES_PER_COLLECTIVE * (tp_calls + ep_calls + (case.cp - 1) + (case.zero == 3))
        hooks = CHECKPOINT_LAUNCHES.get((case.software.name, case.recompute), 0.0) / case.recompute_every
        launches = work.block[0].launches + collectives + hooks
        again = work.recomputed.launches / case.recompute_every
        launches_back = work.block[1].launches + again + hooks + collectives * (1 + repeats)
        return ForwardBackward(self.cost(forward, there, launches), self.cost(backward, back, launches_back))

    def traffic(self, direction: int, parts: Mapping[str, Number], compute: Number) -> dict[str, Traffic]:
        """Communication of a block in one direction, by axis; `compute`: its seconds, `parts` by kind of work."""
        case, comm, fitted = self.case, self.uncalibrated.comm, self.fitted
        tensor = Traffic(self.comm_seconds(comm.tp[direction]))
        if case.software.async_tp:  # in pieces that overlap with the GEMMs they feed
            tensor = overlap(tensor.exposed, parts["matmul"], fitted.async_tp_contention)
        context = Traffic(self.comm_seconds(comm.cp[direction]))  # the all-to-alls of Ulysses are exposed
        if case.cp_method != "ulysses":  # each hop of the ring overlaps with attention over the keys at hand
            hop = overlap(context.exposed, parts["attention"] / case.cp, fitted.contention)
            context = Traffic(hop.exposed * (case.cp - 1), hop.hidden * (case.cp - 1))
        # A copy engine of its own: GEMMs beside it were measured to take as long as alone, so no contention.
        offload = overlap(self.uncalibrated.activation_offload, compute, 0.0)
        beside = compute
        if case.software.gathers_by_module:
            beside = compute * parts["matmul"] / sum(parts.values())
        return {"tp": tensor, "cp": context, "dp": self.data_parallel(direction, beside), "offload": offload}

    def expert_parallel(self, times: Number, compute: Number) -> Traffic:
        """`compute`: seconds of a pass of another micro-batch, the mean of both directions."""
        seconds = times * self.comm_seconds(self.uncalibrated.comm.ep)
        overlapped = self.case.software.overlapped_dispatch
        return overlap(seconds, compute, self.fitted.contention) if overlapped else Traffic(seconds)

    def data_parallel(self, direction: int, compute: Number) -> Traffic:
        """ZeRO-3: all-gather of the next block and reduce-scatter of the last one, beside `compute` of this block."""
        case, comm = self.case, self.uncalibrated.comm
        if case.zero < 3:
            return Traffic()
        seconds, per_tensor = self.comm_seconds(comm.all_gather), case.software.per_tensor_gather
        if per_tensor:
            seconds = seconds + self.launch_s * SHARDED_TENSORS * case.dp_shard * case.cp
        if direction == BACKWARD:
            recomputed = (per_tensor and case.recompute == "full") / case.recompute_every
            reduce = self.comm_seconds(comm.reduce_scatter)
            seconds = seconds * (case.reshard + recomputed) + reduce * comm.reductions
        return overlap(seconds, compute, self.fitted.contention) if case.software.overlap else Traffic(seconds)

    def host_wait_seconds(self, micro_batch: MicroBatch, update: Number) -> Number:
        """Seconds of a step in which one GPU waits for its host; `update`: seconds of the optimizer."""
        case, layers = self.case, self.case.model.layers
        block, stem, loss = micro_batch.block, micro_batch.stem, micro_batch.loss
        phases = [
            (stem.forward.busy + layers * block.forward.busy, stem.forward.launches + layers * block.forward.launches),
            (loss.forward.busy + loss.backward.busy, loss.forward.launches + loss.backward.launches),
            (
                stem.backward.busy + layers * block.backward.busy,
                stem.backward.launches + layers * block.backward.launches,
            ),
        ]
        launched = [(busy, self.launch_seconds(launches)) for busy, launches in phases]
        optimizer = self.launch_seconds(self.uncalibrated.optimizer.launches)
        return host_bound_seconds(launched, case.accumulation, update, optimizer + self.step_s * case.host)


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
