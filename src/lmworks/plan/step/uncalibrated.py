"""A step before the fitted constants: kernels at benchmarked rates, collectives on idle links, optimizer, offload.

Every kernel of the op list at the machine's rate, by part of the step-time sheet and by kind of kernel, so that
fitted factors per kind can be applied afterwards. Numbers may be arrays of candidates.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from ...spec import Gpu, SpecError
from ..activation_offload import total_offloaded_bytes
from ..case import Case, Number
from ..devices.machine import Machine
from ..devices.profile import profile_for
from ..devices.rates import gpu_rates
from ..exact.optimizers import STATES
from ..network import Network, network
from ..ops import GEMM_ONLY, Kernel, Op, Workload
from ..software import Software
from .comm import StepComm, Weights
from .constants import REFERENCE_LAUNCH_S

REENTRANT = ("megatron", "deepspeed", "huggingface")  # code bases whose checkpointing recomputes a whole block
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Pass:
    """Ops in one direction: seconds by (part, kind of kernel), and how many kernels the host launches."""

    seconds_by_kind: Mapping[tuple[str, str], Number]
    launches: Number = 0.0

    @classmethod
    def of(cls, ops: Iterable[Op], direction: Direction, machine: Machine, dtype: str) -> Self:
        by_kind: dict[tuple[str, str], Number] = defaultdict(float)
        launches: Number = 0.0
        for op in ops:
            for kernel in getattr(op, direction):
                key = (op.part, "casts" if op.part == "casts" else kernel.kind)
                kernel_dtype = "bf16" if kernel.bf16_only and dtype in GEMM_ONLY else dtype
                by_kind[key] = by_kind[key] + machine.seconds(kernel, kernel_dtype)
                scores = kernel.kind == "gemm" and op.part == "attention"  # of all heads in one launch
                launches = launches + (1.0 if scores else kernel.count)
        return cls(dict(by_kind), launches)

    def parts(self, factors: Mapping[str, Number]) -> dict[str, Number]:
        """Seconds by part, each kind of kernel times its factor."""
        parts: dict[str, Number] = defaultdict(float)
        for (part, kind), seconds in self.seconds_by_kind.items():
            parts[part] = parts[part] + factors[kind] * seconds
        return dict(parts)


@dataclass(frozen=True)
class Work:
    """(forward, backward) of each; `recomputed`: kernels of a block that its backward pass recomputes."""

    block: tuple[Pass, Pass]
    recomputed: Pass
    stem: tuple[Pass, Pass]
    loss: tuple[Pass, Pass]

    @classmethod
    def of(cls, net: Network, machine: Machine, dtype: str, recompute: str, accumulation: Number = 1) -> Self:
        wide = "bf16" if dtype in GEMM_ONLY else dtype
        block, again = list(net.block), recomputed_ops(net, recompute)
        if dtype in GEMM_ONLY:
            software = net.load.software
            block = [*block, casts(block, software, accumulation)]
            again = [*again, casts(again, software, accumulation)]
        return cls(
            (Pass.of(block, "forward", machine, dtype), Pass.of(block, "backward", machine, dtype)),
            Pass.of(again, "forward", machine, dtype),
            (Pass.of(net.stem, "forward", machine, wide), Pass.of(net.stem, "backward", machine, wide)),
            (Pass.of(net.loss, "forward", machine, wide), Pass.of(net.loss, "backward", machine, wide)),
        )


def casts(ops: Iterable[Op], software: Software, accumulation: Number) -> Op:
    """Passes that cast operands of these GEMMs to fp8 or fp4."""
    make = fused_casts if software.fused_casts else unfused_casts
    made = [make(op, software, accumulation) for op in ops]
    chain = itertools.chain.from_iterable
    return Op("casts", "casts", tuple(chain(one[0] for one in made)), tuple(chain(one[1] for one in made)))


Casts = tuple[tuple[Kernel, ...], tuple[Kernel, ...]]  # forward, backward


def low_products(kernels: Iterable[Kernel]) -> list[Kernel]:
    return [kernel for kernel in kernels if kernel.kind == "gemm" and not kernel.bf16_only]


def unfused_casts(op: Op, software: Software, accumulation: Number) -> Casts:
    """Both operands of every GEMM: read for the absolute maximum, read again, written in a byte."""

    def passes(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
        sizes = [(m * k + k * n, kernel.count) for kernel in low_products(kernels) for m, k, n in [kernel.shape]]
        return tuple(Kernel("stream", bytes=software.casts * size, count=count) for size, count in sizes)

    return passes(op.forward), passes(op.backward)


CAST_AND_TRANSPOSE = 4.0  # bytes an element: two read, one written twice


def fused_casts(op: Op, software: Software, accumulation: Number) -> Casts:
    """An operand is cast once, unless the kernel that makes it writes it so; a weight in the first micro-batch."""
    forward, backward = [], []
    for kernel in low_products(op.forward):
        m, k, n = kernel.shape
        cast = [k * n / accumulation] + [m * k] * (not op.input_from_kernel)
        forward += [Kernel("stream", bytes=CAST_AND_TRANSPOSE * size, count=kernel.count) for size in cast]
        gradient = [m * n] * (not op.gradient_from_kernel) * bool(op.backward)
        backward += [Kernel("stream", bytes=CAST_AND_TRANSPOSE * size, count=kernel.count) for size in gradient]
    return tuple(forward), tuple(backward)


def stops_early(software: Software) -> bool:
    """Whether recompute of a block stops at the last tensor that the backward pass needs, before the last GEMM.

    Our compiled block does not: it is one graph, and a profile of an 8B step shows every GEMM of it again.
    """
    return not (software.graph or software.name.startswith(REENTRANT))


def recomputed_ops(net: Network, recompute: str) -> list[Op]:
    """Ops of a block whose forward kernels its backward pass runs again.

    `full`: all, but for the last GEMM where recompute stops early; `selective`: all but attention and the saved GEMMs;
    `mlp`: as `selective`, and the MLP's GEMMs but for the last; `attention`: core attention alone.
    """
    software = net.load.software
    if recompute == "full":
        return [op for op in net.block if not (stops_early(software) and op.name == "down")]
    if recompute == "attention":
        return [op for op in net.block if op.name == "attention"]
    if recompute not in ("selective", "mlp"):
        return []
    cheap = [op for op in net.block if op.part not in ("matmul", "attention")]
    if recompute == "mlp":
        wide, model = [op for op in net.halves[1] if op.part == "matmul"], net.load.model
        # Expert gates need the experts' outputs; nothing needs the last GEMM of a dense MLP.
        return cheap + (wide if model.experts and not model.shared_experts else wide[:-1])
    products = [op for op in net.block if op.part == "matmul"]
    share = software.selective_recompute_share
    return cheap + [
        replace(op, forward=tuple(replace(one, count=one.count * share) for one in op.forward)) for op in products
    ]


# --- a whole step ----------------------------------------------------------------------------------------


HOST_LINK_EFFICIENCY = 0.8  # share of the host link's datasheet bandwidth that large copies reach; modelled
HOST_BYTES_PER_S = 30e9  # host memory bandwidth per GPU of a node: eight share some 250 GB/s; modelled
NODE_HOST_BYTES_PER_S = 8 * HOST_BYTES_PER_S
PCIE_GBS = 64  # GB/s of PCIe 5.0 x16, one direction; its specification


@dataclass(frozen=True)
class Uncalibrated:
    case: Case
    work: Work
    comm: StepComm
    copies: tuple[Pass, Pass]  # of a block's gathered weights and packed gradients, forward and backward
    optimizer: Pass
    offload: Number  # seconds of a step for optimizer offload: copies, and the update on the CPU
    activation_offload: Number  # seconds to copy one block's activations to the host, mean over blocks; the same back

    @classmethod
    def of(cls, case: Case) -> Self:
        if case.recompute == "budget":
            raise SpecError("parallel.recompute = 'budget' has no closed form; plan with none, selective, mlp or full")
        machine, weights = sustained_machine(case.gpu, case.software.flash, case.cluster.profile), Weights.of(case)
        case = case.replace(host=case.host * machine.launch_s / REFERENCE_LAUNCH_S)
        net, comm, updated = network(Workload.of_case(case)), StepComm.of(case, weights), updated_params(case, weights)
        copies = weight_copies(case, weights, comm.reductions)
        activations: Number = 0.0
        if np.any(case.offload_activations):
            activations = total_offloaded_bytes(case, net) / case.model.layers / shared_host_link(case)
        return cls(
            case,
            Work.of(net, machine, case.dtype, case.recompute, case.accumulation),
            comm,
            (Pass.of([copies], "forward", machine, "fp32"), Pass.of([copies], "backward", machine, "fp32")),
            Pass.of([optimizer_update(case, updated)], "forward", machine, "fp32"),
            optimizer_offload_seconds(case, updated) if case.offload != "none" else 0.0,
            activations,
        )


@functools.cache
def sustained_machine(gpu: Gpu, flash: str, profile: str = "") -> Machine:
    """A GPU at the sustained clock of a long run; short GEMM benchmarks still see the boost clock."""
    machine = profile_for(gpu, profile).machine if profile else Machine.of(gpu, flash)
    if machine.laws is None:
        return machine
    # A profile that was fitted to runs has factors on laws, whichever attention kernel a code base has.
    laws = gpu_rates(gpu, flash) if profile and machine.tag == "fitted" else machine.laws
    hot = {dtype: replace(rate, flops=rate.flops / (1 + rate.heat), heat=0.0) for dtype, rate in laws.gemm.items()}
    return replace(machine, laws=replace(laws, gemm=hot))


def weight_copies(case: Case, weights: Weights, reductions: Number) -> Op:
    """Per block: gathered weights out of their buffer; gradients packed, or accumulated."""
    software = case.software
    forward: Number = 0.0
    backward: Number = 0.0
    if case.zero == 3:
        forward = 2.0 * (weights.gathered_dense + weights.gather * weights.experts)
        backward = forward * case.reshard + 2.0 * software.reduce * weights.trained_block * reductions
    elif not software.wgrad_placeholder:  # with wgrad fusion, GEMMs accumulate into the gradients
        summed = (2.0 * software.gradients + 2) * weights.trained_block
        backward = np.where((case.accumulation > 1) | (software.master > 0), summed, 0.0)
    return Op("copies", "copies", (Kernel("stream", bytes=forward),), (Kernel("stream", bytes=backward),))


def updated_params(case: Case, weights: Weights) -> Number:
    """Parameters that a rank updates. Our trainer deals whole experts: of two over four ranks the first has one."""
    dense = (case.model.layers * weights.trained_dense + weights.trained_root) / case.pp
    experts = case.model.layers * weights.trained_experts / case.pp
    if not case.zero:
        return dense + experts
    whole = np.where(np.equal(case.dp_shard, 1), case.dp, case.dp_shard) * case.cp
    over_experts = np.maximum(1, whole * case.tp // case.expert_tp // case.ep)
    if case.model.experts and case.is_lmworks:
        mine = case.model.experts // case.ep
        over_experts = mine / np.ceil(mine / over_experts)
    return dense / (case.dp_shard * case.cp) + experts / over_experts


def optimizer_update(case: Case, numbers: Number) -> Op:
    """Gradient clipping, and the update of `numbers` weights, which reads p, g and states and writes p and states."""
    code = case.software
    gradients, both = (4, 12) if code.master else (code.gradients, 2 * (code.weights + code.low_bytes) + code.gradients)
    clip = Kernel("stream", bytes=1.0 * code.clip_passes * gradients * numbers)
    update = Kernel("optimizer", bytes=(both + 2 * STATES[case.optimizer]) * numbers)
    return Op("update", "optimizer", (clip, update) if case.offload == "none" else (clip,))


def optimizer_offload_seconds(case: Case, numbers: Number) -> Number:
    """Gradients to the host, CPU update, weights back; `full`: weights copied for every pass. Not overlapped."""
    passes = 2 * case.accumulation if case.offload == "full" else 1
    return numbers * ((4.0 + 4.0 * passes) / host_link(case.gpu) + 28.0 / HOST_BYTES_PER_S)


def host_link(gpu: Gpu) -> float:
    """Bytes/s of large copies between a GPU and its host."""
    return HOST_LINK_EFFICIENCY * 1e9 * (gpu.host_gbs or 16.0)


def shared_host_link(case: Case) -> float:
    """`host_link` where all GPUs of a node copy at once and share its memory bandwidth.

    One GPU alone was measured to reach its full link. Hosts joined by more than PCIe are assumed to keep up.
    """
    one_gpu = host_link(case.gpu)
    return one_gpu if case.gpu.host_gbs > PCIE_GBS else min(one_gpu, NODE_HOST_BYTES_PER_S / case.cluster.gpus_per_node)
