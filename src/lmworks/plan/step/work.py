"""What one rank computes for one micro-batch: seconds of one block and of what stands before and after the blocks.

Every kernel of the op list at the machine's rate, by the part of the sheet it belongs to and by its kind, so that what
a long run adds to each kind can be weighed in afterwards. Numbers may be arrays of candidates.
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

REENTRANT = ("megatron", "deepspeed", "huggingface")  # code that runs all of a block again
Named = tuple[str, Kernel]  # a kernel and its part of the sheet


@dataclass(frozen=True)
class Pass:
    """Seconds by (part, kind of kernel), and how many kernels the host launches."""

    raw: Mapping[tuple[str, str], Number]
    launches: Number = 0.0

    @classmethod
    def of(cls, kernels: Iterable[Named], machine: Machine, dtype: str) -> Self:
        raw: dict[tuple[str, str], Number] = defaultdict(float)
        launches: Number = 0.0
        for part, kernel in kernels:
            key = (part, "casts" if part == "casts" else kernel.kind)
            raw[key] = raw[key] + machine.seconds(kernel, "bf16" if kernel.wide and dtype == "fp8" else dtype)
            batched = kernel.kind == "gemm" and part == "attention"  # scores of all heads are one launch
            launches = launches + (1.0 if batched else kernel.count)
        return cls(dict(raw), launches)

    def parts(self, factors: Mapping[str, Number]) -> dict[str, Number]:
        """By part, each kind of kernel times its factor."""
        parts: dict[str, Number] = defaultdict(float)
        for (part, kind), seconds in self.raw.items():
            parts[part] = parts[part] + factors[kind] * seconds
        return dict(parts)

    def seconds(self, factors: Mapping[str, Number]) -> Number:
        return sum(factors[kind] * seconds for (_, kind), seconds in self.raw.items())

    def part(self, name: str, factors: Mapping[str, Number]) -> Number:
        found = (factors[kind] * seconds for (part, kind), seconds in self.raw.items() if part == name)
        return sum(found, np.float64(0.0))


@dataclass(frozen=True)
class Work:
    """Forward and backward of each; `again` is what the backward pass of a block computes once more."""

    block: tuple[Pass, Pass]
    again: Pass
    stem: tuple[Pass, Pass]
    loss: tuple[Pass, Pass]

    @classmethod
    def of(cls, net: Network, machine: Machine, dtype: str, recompute: str) -> Self:
        wide = "bf16" if dtype == "fp8" else dtype  # only the products of blocks are in 8 bits

        def run(found: list[Named], dtype: str) -> Pass:
            casts = narrow(found, net.load.software.casts) if dtype == "fp8" else []
            return Pass.of([*found, *casts], machine, dtype)

        def both(ops: Iterable[Op], dtype: str) -> tuple[Pass, Pass]:
            ops = tuple(ops)
            return run(kernels(ops, "forward"), dtype), run(kernels(ops, "backward"), dtype)

        again = run(repeated(net, recompute), dtype)
        return cls(both(net.block, dtype), again, both(net.stem, wide), both(net.loss, wide))

    @classmethod
    def of_case(cls, case: Case, machine: Machine) -> Self:
        return cls.of(network(Workload.of_case(case)), machine, case.dtype, case.recompute)


def kernels(ops: Iterable[Op], direction: str) -> list[Named]:
    return [(op.part, kernel) for op in ops for kernel in getattr(op, direction)]


def narrow(found: Iterable[Named], width: float) -> list[Named]:
    """Passes that cast the operands of products to 8 bits: read for the largest, read again, written in one byte."""
    products = [kernel for _, kernel in found if kernel.kind == "gemm" and not kernel.wide]
    sizes = [(m * k + k * n, kernel.count) for kernel in products for m, k, n in [kernel.shape]]
    return [("casts", Kernel("stream", bytes=width * size, count=count)) for size, count in sizes]


def stops_early(software: Software) -> bool:
    """Whether a block that runs again stops at the last tensor that is asked for, short of its last product.

    Our compiled block cannot: it is one graph, and a profile of an 8B step has every product of it again.
    """
    return not (software.graph or software.name.startswith(REENTRANT))


def repeated(net: Network, recompute: str) -> list[Named]:
    """What a block's backward pass computes again.

    `full`: all of it, but for the last product where PyTorch stops at the last tensor that is asked for; `selective`:
    all but attention and the products that are kept; `mlp`: as `selective`, and the MLP's products but for the last;
    `attention`: its inside alone.
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
        # The gates of experts ask for their results; nobody asks for the last product of an MLP.
        return cheap + kernels(wide if model.experts and not model.shared_experts else wide[:-1], "forward")
    products = kernels([op for op in net.block if op.part == "matmul"], "forward")
    return cheap + [(part, replace(kernel, count=kernel.count * software.again)) for part, kernel in products]
