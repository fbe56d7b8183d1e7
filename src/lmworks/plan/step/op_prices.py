"""The price of a step op by op: what `predict.time_of` adds up, before it is added up.

Rows sum to the step time of the same spec. Kernels are those of the op list; what is not an op of the network (waiting
for the host, communication, bubble …) is a row of the step-time sheet as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...spec import RunSpec
from ..case import Case
from ..devices.machine import Machine
from ..devices.profile import Profile, profile_of
from ..exact.collectives import collectives
from ..exact.exchanges import LAST
from ..exact.optimizers import STATES, optimizer_of
from ..network import Network, network, optimizer, trained_params
from ..ops import GEMM_ONLY, Kernel, Op, Workload
from .comm import Weights
from .constants import constants, factor
from .cpu_ranks import exposed_buckets, fabric_of, not_priced, seconds
from .one_device import activation_offload_seconds, host_wait_seconds
from .price import Step, timeline
from .uncalibrated import (
    Pass,
    Uncalibrated,
    Work,
    casts,
    optimizer_update,
    recomputed_ops,
    sustained_machine,
    updated_params,
)

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"


@dataclass(frozen=True)
class OpPrice:
    """Of one step of one rank."""

    op: str
    part: str  # of the step-time sheet
    way: str  # forward, backward, recompute; empty where an op has none
    seconds: float  # with host_s
    host_s: float = 0.0  # launches, where the host cannot run ahead (a CPU)
    flops: float = 0.0
    bytes: float = 0.0  # of kernels that memory bounds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def op_prices(spec: RunSpec, machine: Machine | None) -> list[OpPrice] | None:
    """None wherever `predict.time_of` gives no time, and for an activation budget, whose blocks differ."""
    gpu = spec.cluster.accelerator
    if machine is None or not machine.covers(spec.precision.dtype) or spec.parallel.recompute == "budget":
        return None
    if gpu is not None and (machine.tag != "measured" or spec.parallel.world > 1):
        return of_layout(Case.of(spec, gpu))
    if spec.parallel.world == 1:
        return of_one_device(spec, machine)
    profile = profile_of(spec.cluster) if spec.cluster.profile else None
    if machine.device != "cpu" or profile is None or not_priced(spec, profile):
        return None
    return of_cpu_ranks(spec, machine, profile)


@dataclass(frozen=True)
class Passes:
    """Kernels of an op in one pass over one micro-batch."""

    op: Op
    way: str
    kernels: tuple[Kernel, ...]
    where: str  # stem, block or loss


def passes_of(net: Network, recompute: str) -> Iterable[Passes]:
    for where in ("stem", "block", "loss"):
        for op in getattr(net, where):
            yield Passes(op, FORWARD, op.forward, where)
            yield Passes(op, BACKWARD, op.backward, where)
    for op in recomputed_ops(net, recompute):
        yield Passes(op, RECOMPUTE, op.forward, "block")


def timed(one: Passes, net: Network, machine: Machine, dtype: str) -> Pass:
    """As Work.of times them: only GEMMs of blocks are in fp8 or fp4, with the casts of their operands."""
    if one.where != "block" and dtype in GEMM_ONLY:
        dtype = "bf16"
    ops = [one.op, casts([one.op], net.load.software, 1)] if dtype in GEMM_ONLY else [one.op]
    return Pass.of(ops, "backward" if one.way == BACKWARD else "forward", machine, dtype)


def amounts(kernels: Iterable[Kernel]) -> tuple[float, float]:
    """FLOPs, and bytes of what memory bounds."""
    every = list(kernels)
    return sum(float(one.flops * one.count) for one in every), sum(float(one.bytes * one.count) for one in every)


def of_one_device(spec: RunSpec, machine: Machine) -> list[OpPrice]:
    load = Workload.of(spec, machine.device)
    net, dtype, recompute = network(load), load.dtype, spec.parallel.recompute
    batches, layers = spec.accumulation, spec.model.layers
    on_cpu = machine.device != "cuda"
    found = []
    for one in passes_of(net, recompute):
        done = timed(one, net, machine, dtype)
        every = spec.parallel.recompute_every if one.way == RECOMPUTE else 1
        times = batches * (layers if one.where == "block" else 1) / every
        launch_s = machine.launch_backward_s if one.way == BACKWARD else machine.launch_s
        host = times * launch_s * float(done.launches) if on_cpu else 0.0
        spent = times * float(sum(done.seconds_by_kind.values()))
        flops, moved = amounts(one.kernels)
        found.append(OpPrice(one.op.name, one.op.part, one.way, spent + host, host, times * flops, times * moved))
    trained = trained_params(spec.model, load.adapters)
    updates = optimizer(trained, load.software, STATES[optimizer_of(spec)])
    for op in updates:
        done = Pass.of([op], "forward", machine, "fp32")
        spent = float(sum(done.seconds_by_kind.values()))
        found.append(OpPrice(op.name, op.part, "", spent, 0.0, *amounts(op.forward)))
    work = Work.of(net, machine, dtype, recompute)
    if spec.parallel.offload_activations:
        found.append(OpPrice("offload", "offload", "", activation_offload_seconds(spec, work, machine)))
    if not on_cpu:
        update = Pass.of(updates, "forward", machine, "fp32")
        found.append(OpPrice("host", "launches", "", host_wait_seconds(spec, work, update, machine)))
    return found


def of_cpu_ranks(spec: RunSpec, machine: Machine, profile: Profile) -> list[OpPrice]:
    fabric, calls = fabric_of(spec, machine, profile), collectives(spec)
    found = of_one_device(spec, machine)
    wire: dict[str, float] = {}
    if spec.parallel.strategy == "ddp":
        gradients = [call for call in calls if call.when == LAST]
        calls = [call for call in calls if call.when != LAST]
        wire["all-reduce"] = exposed_buckets(spec, machine, fabric, gradients)
    else:
        shards = spec.parallel.dp_shard
        found = [
            replace(one, seconds=one.seconds / shards, flops=one.flops / shards, bytes=one.bytes / shards)
            if one.part == "optimizer"
            else one
            for one in found
        ]
    for call in calls:
        wire[call.kind] = wire.get(call.kind, 0.0) + seconds(fabric, call)
    return found + [OpPrice(kind, "communication", "", spent) for kind, spent in wire.items()]


def of_layout(case: Case) -> list[OpPrice]:
    """Of the slowest rank of any layout of GPUs."""
    fitted = constants()
    whole = timeline(case)
    uncalibrated = Uncalibrated.of(case)
    step = Step.of(uncalibrated, fitted)
    factors, software = step.calibrated.factors, factor(fitted.software, case.software.name)
    count = {"stem": step.rank.stem, "block": step.rank.layers, "loss": step.rank.head}
    machine, net = (
        sustained_machine(case.gpu, case.software.flash, case.cluster.profile),
        network(Workload.of_case(case)),
    )
    found = []
    for one in passes_of(net, case.recompute):
        done = timed(one, net, machine, case.dtype)
        times = float(case.accumulation * count[one.where] / (case.recompute_every if one.way == RECOMPUTE else 1))
        spent = software * times * float(sum(done.parts(factors).values()))
        flops, moved = amounts(one.kernels)
        found.append(OpPrice(one.op.name, one.op.part, one.way, spent, 0.0, times * flops, times * moved))
    flops, moved = amounts(optimizer_update(case, updated_params(case, Weights.of(case))).forward)
    found.append(OpPrice("update", "optimizer", "", float(whole.parts["optimizer"]), 0.0, flops, moved))
    ops = {one.op.part for one in passes_of(net, "none")} | {"casts", "recompute", "optimizer"}
    found += [OpPrice(part, part, "", float(spent)) for part, spent in whole.parts.items() if part not in ops]
    return found
