"""The bytes that a kernel reads and writes, beside the same op by op in PyTorch and in LMWorks' own kernels.

Counted in Triton's interpreter, and for PyTorch from the tensors that each of its operations takes and gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..beside import numbers


@dataclass(frozen=True)
class Moved:
    what: str
    read: int  # bytes
    written: int
    operations: int = 0  # 0: not told


def table(title: str, lines: list[Moved]) -> list[str]:
    """The columns that have something to tell."""
    heads = ["", "read", "written", *(["operations a byte"] if any(one.operations for one in lines) else [])]
    cells = [
        heads,
        *(
            [one.what, f"{one.read:,}", f"{one.written:,}", f"{one.operations / (one.read + one.written):.1f}"]
            for one in lines
        ),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    return [
        f"Bytes that are moved for {title}:",
        *(
            "  ".join(["", f"{row[0]:<{widths[0]}}", *(f"{row[at]:>{widths[at]}}" for at in range(1, len(heads)))])
            for row in cells
        ),
    ]


def of_kernels(what: str, run: Callable[[], Any], operations: int = 0) -> Moved:
    from .kernel_memory import watch

    with watch(what) as memory:
        run()
    return Moved(what, *memory.bytes(), operations)


def op_by_op(what: str, run: Callable[[], Any]) -> Moved:
    """Each operation reads its tensors from memory, and writes its result there; a view does neither."""
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    read = written = 0

    class Counting(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
            nonlocal read, written
            found = function(*arguments, **(named or {}))
            given = [one for one in arguments if isinstance(one, Tensor)]
            if isinstance(found, Tensor) and found.data_ptr() not in {one.data_ptr() for one in given}:
                read += sum(one.nbytes for one in given)
                written += found.nbytes
            return found

    with Counting():
        run()
    return Moved(what, read, written)


# --- exercises -------------------------------------------------------------------------------------------


def triton_add(module: ModuleType) -> list[str]:
    import torch

    from ...kernels.rms_norm import add_rms_norm, rms_norm

    x, delta, weight = numbers(16, 256), numbers(16, 256, seed=1), torch.ones(256)

    def apart() -> None:
        rms_norm(module.add(x, delta), weight, 1e-6, implementation="triton")

    return table("a sum and its RMSNorm, 16 rows of 256 numbers in fp32", [
        of_kernels("yours, then LMWorks' RMSNorm", apart),
        of_kernels("LMWorks' kernel that does both", lambda: add_rms_norm(x, delta, weight, 1e-6, "triton")),
    ])  # fmt: skip


def triton_softmax(module: ModuleType) -> list[str]:
    x = numbers(16, 1000)

    def plain() -> None:
        weights = (x - x.amax(1, keepdim=True)).exp()
        weights / weights.sum(1, keepdim=True)

    return table("the softmax of 16 rows of 1,000 numbers in fp32", [
        of_kernels("yours", lambda: module.softmax(x)),
        op_by_op("PyTorch: maximum, −, exp, sum, ÷", plain),
    ])  # fmt: skip


def triton_matmul(module: ModuleType) -> list[str]:
    size = 128
    a, b = numbers(size, size), numbers(size, size, seed=1)

    def with_tiles(tile: int) -> Moved:
        what = f"yours, tiles of {tile} × {tile}"
        return of_kernels(what, lambda: module.matmul(a, b, tile, tile, tile), operations=2 * size**3)

    alone = Moved("a program a number", 4 * 2 * size**3, 4 * size**2, 2 * size**3)
    return table(f"a product of {size} × {size} matrices in fp32", [alone, *map(with_tiles, (16, 32, 64))])


def triton_attention(module: ModuleType) -> list[str]:
    import torch

    from ...kernels.training.flash_attention import flash_attention

    heads, seq, dim = 2, 256, 64
    q, k, v = (numbers(heads, seq, dim, seed=seed) for seed in range(3))
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)

    def plain() -> None:
        scores = (q @ k.transpose(1, 2) / math.sqrt(dim)).masked_fill(hidden, -math.inf)
        scores.softmax(-1) @ v

    ours = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return table(f"causal attention, {heads} heads, {seq} positions, width {dim}, fp32", [
        of_kernels("yours, tiles of 32 × 32", lambda: module.attention(q, k, v, 32, 32)),
        of_kernels("LMWorks' flash attention, the same tiles", lambda: flash_attention(*ours, implementation="triton")),
        op_by_op("PyTorch: q·kᵀ, ÷, mask, softmax, · v", plain),
    ])  # fmt: skip


TRAFFIC: dict[str, Callable[[ModuleType], list[str]]] = {
    "triton_add": triton_add,
    "triton_softmax": triton_softmax,
    "triton_matmul": triton_matmul,
    "triton_attention": triton_attention,
}
