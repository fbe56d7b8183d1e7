"""What one rank computes for one micro-batch: seconds of one block and of what stands before and after the blocks.

Every kernel of the op list at the machine's rate, times what a long run adds to it. Numbers may be arrays of
candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from .case import Case, Number
from .constants import Constants, family
from .machine import Machine
from .network import Network, network
from .ops import Kernel, Op, Workload

Clock = Callable[[Kernel, str], Any]  # seconds of all launches of a kernel in a number format


@dataclass(frozen=True)
class Pass:
    """Seconds by part of the sheet, and how many kernels the host launches."""

    parts: Mapping[str, Number]
    launches: Number = 0.0

    @property
    def seconds(self) -> Number:
        return sum(self.parts.values())

    @classmethod
    def of(cls, kernels: Iterable[tuple[str, Kernel]], clock: Clock, dtype: str) -> Self:
        parts: dict[str, Number] = defaultdict(float)
        launches: Number = 0.0
        for part, kernel in kernels:
            parts[part] = parts[part] + clock(kernel, dtype)
            launches = launches + kernel.count
        return cls(dict(parts), launches)


@dataclass(frozen=True)
class Work:
    """`again` is what the backward pass of a block computes once more."""

    forward: Pass
    backward: Pass
    again: Pass
    stem: tuple[Pass, Pass]  # forward, backward
    loss: tuple[Pass, Pass]

    @classmethod
    def of(cls, net: Network, clock: Clock, dtype: str, recompute: str) -> Self:
        wide = "bf16" if dtype == "fp8" else dtype  # only the products of blocks are in 8 bits
        again = [op for op in net.block if computed_again(op, recompute)]
        return cls(
            Pass.of(kernels(net.block, "forward"), clock, dtype),
            Pass.of(kernels(net.block, "backward"), clock, dtype),
            Pass.of(kernels(again, "forward"), clock, dtype),
            (Pass.of(kernels(net.stem, "forward"), clock, wide), Pass.of(kernels(net.stem, "backward"), clock, wide)),
            (Pass.of(kernels(net.loss, "forward"), clock, wide), Pass.of(kernels(net.loss, "backward"), clock, wide)),
        )


def kernels(ops: Iterable[Op], direction: str) -> Iterable[tuple[str, Kernel]]:
    return [(op.part, kernel) for op in ops for kernel in getattr(op, direction)]


def computed_again(op: Op, recompute: str) -> bool:
    """`full`: all of a block; `selective`: all but products and attention; `attention`: its inside alone."""
    if recompute == "full":
        return True
    return op.name == "attention" if recompute == "attention" else recompute == "selective" and not np.any(op.dear)


def work_of(case: Case, clock: Clock) -> Work:
    return Work.of(network(Workload.of_case(case)), clock, case.dtype, case.recompute)


def clock_of(case: Case, machine: Machine, given: Constants) -> Clock:
    """The machine's rates, and what a long run of this code base adds."""
    kind = family(case.gpu)
    factors = {
        "gemm": given.products.get(kind, 1.0),
        "attention": given.attention.get(kind, 1.0),
        "attention_backward": given.attention.get(kind, 1.0),
    }

    def clock(kernel: Kernel, dtype: str) -> Any:
        seconds = machine.seconds(kernel, dtype) * factors.get(kernel.kind, given.memory)
        if dtype == "fp8" and kernel.kind == "gemm":
            seconds = seconds + given.memory * machine.seconds(cast(kernel), dtype)
        return seconds

    return clock


def cast(kernel: Kernel) -> Kernel:
    """Both operands of a product in 8 bits: read for their largest number, read again and written in one byte."""
    m, k, n = kernel.shape
    return Kernel("stream", bytes=5.0 * (m * k + k * n), count=kernel.count)


def share(done: Pass, part: str) -> Number:
    return done.parts.get(part, np.float64(0.0))
