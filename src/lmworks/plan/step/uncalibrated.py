"""All that a step is made of, before the fitted constants: kernels at benchmarked rates, messages on idle links."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ...spec import Gpu
from ..activation_offload import sent_by_all
from ..case import Case, Number
from ..devices.machine import Machine
from ..devices.profile import profile_for
from ..exact.optimizers import STATES
from ..memory.share import cut_over
from ..network import network
from ..ops import Kernel, Workload
from .comm import Exchanges, Weights
from .work import Pass, Work

LINK = 0.8  # of the link to the host that large copies get
HOST = 30e9  # bytes/s of host memory for each GPU of a machine: eight share some 250 GB/s
MACHINE = 8 * HOST
PCIE = 64  # GB/s of the fastest


@dataclass(frozen=True)
class Uncalibrated:
    case: Case
    work: Work
    wires: Exchanges
    copies: tuple[Pass, Pass]  # of a block's weights and gradients, forward and backward
    optimizer: Pass
    offload: Number  # seconds of a step on the way to the host and back, and in its update
    away: Number  # seconds that a block's activations take to the host, in the mean of all blocks, and as many back

    @classmethod
    def of(cls, case: Case) -> Self:
        machine, weights = machine_of(case.gpu, case.software.flash, case.cluster.profile), Weights.of(case)
        optimizer = Pass.of([("optimizer", kernel) for kernel in updates(case, weights)], machine, "fp32")
        there, back = copied(case, weights)
        copies = (
            Pass.of([("copies", Kernel("stream", bytes=there))], machine, "fp32"),
            Pass.of([("copies", Kernel("stream", bytes=back))], machine, "fp32"),
        )
        offload = offloaded(case, owned(case, weights))
        away = sent_by_all(case, network(Workload.of_case(case))) / case.model.layers / shared_link(case)
        return cls(case, Work.of_case(case, machine), Exchanges.of(case), copies, optimizer, offload, away)


@functools.cache
def machine_of(gpu: Gpu, flash: str, profile: str = "") -> Machine:
    """A GPU in a long run, where the clock is down all the time: in a benchmark a short product still finds it up."""
    machine = profile_for(gpu, profile).machine if profile else Machine.of(gpu, flash)
    if machine.laws is None:
        return machine
    hot = {
        dtype: replace(rate, flops=rate.flops / (1 + rate.heat), heat=0.0) for dtype, rate in machine.laws.gemm.items()
    }
    return replace(machine, laws=replace(machine.laws, gemm=hot))


def copied(case: Case, weights: Weights) -> tuple[Number, Number]:
    """Bytes of a block: gathered weights leave their buffer, gradients are packed, or added to earlier ones."""
    software = case.software
    if case.zero == 3:
        gather = 2.0 * (software.gather or case.width) * weights.block
        return gather, gather * case.reshard + 2.0 * software.reduce * weights.block * reductions(case)
    if software.stand_in:  # products add to the gradients themselves
        return 0.0, 0.0
    summed = (2.0 * software.gradients + 2) * weights.block
    return 0.0, np.where((case.accumulation > 1) | (software.master > 0), summed, 0.0)


def reductions(case: Case) -> Number:
    """ZeRO-3, of each micro-batch: our trainer reduces after the last one only, others after every one."""
    return 1 / case.accumulation if case.software.name.startswith("lmworks") else 1.0


def owned(case: Case, weights: Weights) -> Number:
    """Numbers that a rank updates."""
    dense = (case.model.layers * weights.dense + weights.root) / case.pp
    experts = case.model.layers * weights.experts / case.pp
    over, over_experts = cut_over(case) if case.zero else (1, 1)
    return dense / over + experts / over_experts


def updates(case: Case, weights: Weights) -> list[Kernel]:
    """Clipping passes over the gradients; the update reads p, g and states and writes p and states."""
    numbers, code = owned(case, weights), case.software
    gradients, both = (4, 12) if code.master else (code.gradients, 2 * (code.weights + code.low) + code.gradients)
    clip = Kernel("stream", bytes=1.0 * code.clips * gradients * numbers)
    if case.offload != "none":
        return [clip]
    return [clip, Kernel("optimizer", bytes=(both + 2 * STATES[case.optimizer]) * numbers)]


def offloaded(case: Case, numbers: Number) -> Number:
    """Gradients to the host, its update, new weights back; `full`: weights come for every pass. Nothing hides it."""
    if case.offload == "none":
        return 0.0
    passes = 2 * case.accumulation if case.offload == "full" else 1
    return numbers * ((4.0 + 4.0 * passes) / link(case.gpu) + 28.0 / HOST)


def link(gpu: Gpu) -> float:
    """Bytes/s between a GPU and its host."""
    return LINK * 1e9 * (gpu.host_gbs or 16.0)


def shared_link(case: Case) -> float:
    """The same where all GPUs of a machine copy at once, and share its memory: a GPU alone was measured to have all of
    its link. Memory that is joined by more than PCIe is taken to be as fast.
    """
    alone = link(case.gpu)
    return alone if case.gpu.host_gbs > PCIE else min(alone, MACHINE / case.cluster.gpus_per_node)
