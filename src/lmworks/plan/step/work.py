"""Compute time of one micro-batch on one rank: of one block, of the embedding, and of head and loss.

Every kernel of the op list at the machine's rate, by part of the step-time sheet and by kind of kernel, so that fitted
factors per kind can be applied afterwards. Numbers may be arrays of candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ..case import Case, Number
from ..devices.machine import Machine
from ..network import Network, network
from ..ops import Kernel, Op, Workload
from ..software import Software

REENTRANT = ("megatron", "deepspeed", "huggingface")  # code bases whose checkpointing recomputes a whole block
PartKernel = tuple[str, Kernel]  # a kernel and its part of the step-time sheet


@dataclass(frozen=True)
class Pass:
    """Seconds by (part, kind of kernel), and how many kernels the host launches."""

    seconds_by_kind: Mapping[tuple[str, str], Number]
    launches: Number = 0.0

    @classmethod
    def of(cls, kernels: Iterable[PartKernel], machine: Machine, dtype: str) -> Self:
        by_kind: dict[tuple[str, str], Number] = defaultdict(float)
        launches: Number = 0.0
        for part, kernel in kernels:
            key = (part, "casts" if part == "casts" else kernel.kind)
            kernel_dtype = "bf16" if kernel.bf16_only and dtype == "fp8" else dtype
            by_kind[key] = by_kind[key] + machine.seconds(kernel, kernel_dtype)
            batched = kernel.kind == "gemm" and part == "attention"  # attention scores of all heads are one launch
            launches = launches + (1.0 if batched else kernel.count)
        return cls(dict(by_kind), launches)

    def parts(self, factors: Mapping[str, Number]) -> dict[str, Number]:
        """By part, each kind of kernel times its factor."""
        parts: dict[str, Number] = defaultdict(float)
        for (part, kind), seconds in self.seconds_by_kind.items():
            parts[part] = parts[part] + factors[kind] * seconds
        return dict(parts)

    def seconds(self, factors: Mapping[str, Number]) -> Number:
        return sum(factors[kind] * seconds for (_, kind), seconds in self.seconds_by_kind.items())

    def part(self, name: str, factors: Mapping[str, Number]) -> Number:
        found = (factors[kind] * seconds for (part, kind), seconds in self.seconds_by_kind.items() if part == name)
        return sum(found, np.float64(0.0))


@dataclass(frozen=True)
class Work:
    """(forward, backward) of each; `recomputed`: kernels of a block that its backward pass recomputes."""

    block: tuple[Pass, Pass]
    recomputed: Pass
    stem: tuple[Pass, Pass]
    loss: tuple[Pass, Pass]

    @classmethod
    def of(cls, net: Network, machine: Machine, dtype: str, recompute: str) -> Self:
        wide = "bf16" if dtype == "fp8" else dtype  # only GEMMs of blocks are in fp8

        def run(found: list[PartKernel], dtype: str) -> Pass:
            casts = fp8_casts(found, net.load.software.casts) if dtype == "fp8" else []
            return Pass.of([*found, *casts], machine, dtype)

        def both(ops: Iterable[Op], dtype: str) -> tuple[Pass, Pass]:
            ops = tuple(ops)
            return run(kernels(ops, "forward"), dtype), run(kernels(ops, "backward"), dtype)

        recomputed = run(recomputed_kernels(net, recompute), dtype)
        return cls(both(net.block, dtype), recomputed, both(net.stem, wide), both(net.loss, wide))

    @classmethod
    def of_case(cls, case: Case, machine: Machine) -> Self:
        return cls.of(network(Workload.of_case(case)), machine, case.dtype, case.recompute)


def kernels(ops: Iterable[Op], direction: str) -> list[PartKernel]:
    return [(op.part, kernel) for op in ops for kernel in getattr(op, direction)]


def fp8_casts(found: Iterable[PartKernel], width: float) -> list[PartKernel]:
    """Passes that cast GEMM operands to fp8: read for the absolute maximum, read again, written in one byte."""
    products = [kernel for _, kernel in found if kernel.kind == "gemm" and not kernel.bf16_only]
    sizes = [(m * k + k * n, kernel.count) for kernel in products for m, k, n in [kernel.shape]]
    return [("casts", Kernel("stream", bytes=width * size, count=count)) for size, count in sizes]


def stops_early(software: Software) -> bool:
    """Whether recompute of a block stops at the last tensor that the backward pass needs, before the last GEMM.

    Our compiled block does not: it is one graph, and a profile of an 8B step shows every GEMM of it again.
    """
    return not (software.graph or software.name.startswith(REENTRANT))


def recomputed_kernels(net: Network, recompute: str) -> list[PartKernel]:
    """Kernels that a block's backward pass recomputes.

    `full`: all, but for the last GEMM where recompute stops early; `selective`: all but attention and the saved GEMMs;
    `mlp`: as `selective`, and the MLP's GEMMs but for the last; `attention`: core attention alone.
    """
    software = net.load.software
    if recompute == "full":
        return kernels([op for op in net.block if not (stops_early(software) and op.name == "down")], "forward")
    if recompute == "attention":
        return kernels([op for op in net.block if op.name == "attention"], "forward")
    if recompute not in ("selective", "mlp"):
        return []
    cheap = kernels([op for op in net.block if op.part not in ("matmul", "attention")], "forward")
    if recompute == "mlp":
        wide, model = [op for op in net.halves[1] if op.part == "matmul"], net.load.model
        # Expert gates need the experts' outputs; nothing needs the last GEMM of a dense MLP.
        return cheap + kernels(wide if model.experts and not model.shared_experts else wide[:-1], "forward")
    products = kernels([op for op in net.block if op.part == "matmul"], "forward")
    share = software.selective_recompute_share
    return cheap + [(part, replace(kernel, count=kernel.count * share)) for part, kernel in products]
