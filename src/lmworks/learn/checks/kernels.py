"""Exercises of Triton kernels, `src/kernels/`: against PyTorch's own operations, with every load and store counted."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checking.compiler import refusal
from ..checking.expect import Mismatch, expect_at_most, expect_close
from ..checking.kernel_memory import Memory, watch

TARGET = "a target of this exercise"
ONCE = f"{TARGET}: each is read once and written once"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expect_kernel(module: ModuleType, name: str) -> None:
    found = getattr(module, name, None)
    if type(found).__name__ != "InterpretedFunction":
        remark = f"`{name}` has to be a function of this file under `@triton.jit`"
        raise Mismatch(name, "a kernel", f"a {type(found).__name__}" if found else "nothing", remark=remark)


def expect_result(case: str, got: Any, expected: Tensor, rtol: float, atol: float, **inputs: Tensor) -> None:
    expect_close(case, got, expected, rtol=rtol, atol=atol, remark=remark_on(got, expected), **inputs)


def remark_on(got: Any, expected: Tensor) -> str:
    """What only precision keeps from being right looks the same with four digits, so that is said."""
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return ""
    if got.isnan().any() and not expected.isnan().any():
        return "NaN: of what no program has written, or of a load without `other`"
    near = torch.allclose(got.float(), expected.float(), rtol=1e-2, atol=1e-2)
    return "right in two digits: is something rounded to half precision?" if near else ""


def expect_once(case: str, memory: Memory, read: dict[str, Tensor], written: Tensor) -> None:
    """Of every element of these tensors."""
    for name, tensor in read.items():
        expect_at_most(f"{case}: elements of {name} read", memory.of(tensor).read, tensor.numel(), remark=ONCE)
    found = memory.of(written).written
    expect_at_most(f"{case}: elements of the result written", found, written.numel(), remark=ONCE)


def expect_compiled(module: ModuleType, name: str, memory: Memory) -> None:
    """Once it computes what it should: as in its last launch."""
    found = refusal(getattr(module, name), memory.arguments)
    if found:
        remark = "it runs in the interpreter, but for a GPU it does not compile"
        raise Mismatch(f"{name}, compiled", "no error", found[1], {"line": found[0]}, remark)


def triton_add(module: ModuleType) -> None:
    expect_kernel(module, "add_kernel")
    for n, block, dtype in (
        (4, 4, torch.float32),
        (8, 4, torch.float32),
        (1, 4, torch.float32),
        (6, 4, torch.float32),
        (1000, 256, torch.float32),
        (100, 32, torch.float16),
    ):
        x, y = numbers(n).to(dtype), numbers(n, seed=1).to(dtype)
        kept = x.clone(), y.clone()
        case = f"{n} element{'s' * (n > 1)}, blocks of {block}" + (", fp16" if dtype is torch.float16 else "")
        with watch(case) as memory:
            got = module.add(x, y, block)
        for name, tensor, before in (("x", x, kept[0]), ("y", y, kept[1])):
            expect_close(f"{case}: {name} is left as it was", tensor, before, rtol=0, atol=0)
        expect_result(case, got, kept[0] + kept[1], 1e-4, 1e-6, x=x, y=y)
        expect_once(case, memory, {"x": x, "y": y}, got)
    expect_compiled(module, "add_kernel", memory)


def triton_softmax(module: ModuleType) -> None:
    expect_kernel(module, "softmax_kernel")
    hidden = torch.tensor([[float("-inf"), 0.0, float("-inf")], [-300.0, float("-inf"), -301.0]])
    for case, x in (
        ("one row of 1", numbers(1, 1)),
        ("one row of 4", numbers(1, 4)),
        ("one row of 3, in a block of 4", numbers(1, 3)),
        ("two rows of 3, all below −5", -5 - numbers(2, 3).abs()),
        ("two rows of 3, part of rows of 7", numbers(2, 7)[:, 2:5]),
        ("numbers in hundreds", numbers(3, 5) * 300),
        ("−∞ in places", hidden),
        ("fp16", numbers(3, 37).half() * 8),
        ("bf16", numbers(3, 37).bfloat16() * 8),
        ("4 rows of 1,000", numbers(4, 1000)),
    ):
        with watch(case) as memory:
            got = module.softmax(x)
        expected = x.float().softmax(1).to(x.dtype)
        rtol, atol = (1e-4, 1e-6) if x.dtype is torch.float32 else (1e-2, 1e-3)
        expect_result(case, got, expected, rtol, atol, x=x)
        expect_once(case, memory, {"x": x}, got)
    expect_compiled(module, "softmax_kernel", memory)


def triton_matmul(module: ModuleType) -> None:
    expect_kernel(module, "matmul_kernel")
    for M, K, N, blocks in (
        (1, 1, 1, (16, 16, 16)),
        (16, 16, 16, (16, 16, 16)),
        (16, 32, 16, (16, 16, 16)),
        (16, 20, 16, (16, 16, 16)),
        (20, 16, 16, (16, 16, 16)),
        (16, 16, 20, (16, 16, 16)),
        (20, 40, 36, (16, 32, 16)),
        (33, 20, 16, (32, 16, 16)),
    ):
        a, b = numbers(M, K), numbers(K, N, seed=1)
        case = f"({M}, {K}) times ({K}, {N}), blocks of {blocks[0]}, {blocks[1]} and {blocks[2]}"
        with watch(case) as memory:
            got = module.matmul(a, b, *blocks)
        expect_result(case, got, a @ b, 1e-4, 1e-4, a=a, b=b)
        columns, rows = -(-N // blocks[1]), -(-M // blocks[0])
        for name, tensor, times, tile in (
            ("a", a, columns, blocks[0] * blocks[2]),
            ("b", b, rows, blocks[2] * blocks[1]),
        ):
            remark = f"{TARGET}: {name} is read once by each of {times} programs along a side of the grid"
            found = memory.of(tensor)
            most = times * tensor.numel()
            expect_at_most(f"{case}: elements of {name} read", found.read, most, remark=remark)
            remark = f"{TARGET}: a tile at a time"
            expect_at_most(f"{case}: elements of {name} in one load", found.most_read, tile, remark=remark)
        written, remark = memory.of(got).written, f"{TARGET}: each once"
        expect_at_most(f"{case}: elements of c written", written, got.numel(), remark=remark)
    expect_compiled(module, "matmul_kernel", half_precision(module))


def half_precision(module: ModuleType) -> Memory:
    """A large product first, small ones after it, and the large one taken away: fp16 forgets the small ones."""
    a = torch.full((1, 64), 0.5)
    a[0, 0], a[0, -1] = 2048.0, -2048.0
    a, b = a.half(), torch.ones(64, 1).half()
    case = "fp16: 2048 + 62 · 0.5 − 2048"
    with watch(case) as memory:
        got = module.matmul(a, b, 16, 16, 16)
    remark = "the sum along K is in fp32, and rounded to fp16 once, when it is stored"
    expect_close(case, got, torch.tensor([[31.0]]).half(), remark=remark, a=a)
    return memory


def triton_attention(module: ModuleType) -> None:
    expect_kernel(module, "attention_kernel")
    for heads, seq, dim, blocks, scale, dtype in (
        (1, 2, 16, (16, 16), 1.0, torch.float32),
        (1, 1, 16, (16, 16), 1.0, torch.float32),
        (1, 16, 16, (16, 16), 1.0, torch.float32),
        (1, 20, 16, (16, 16), 1.0, torch.float32),
        (2, 40, 32, (16, 32), 1.0, torch.float32),
        (1, 40, 16, (32, 16), 20.0, torch.float32),
        (1, 20, 16, (16, 16), 1.0, torch.float16),
    ):
        q, k, v = (numbers(heads, seq, dim, seed=seed).to(dtype) for seed in range(3))
        q = q * scale
        sizes = f"{heads} head{'s' * (heads > 1)}, {seq} position{'s' * (seq > 1)}"
        kind = ", scores of hundreds" if scale > 1 else ", fp16" if dtype is torch.float16 else ""
        case = f"{sizes}, blocks of {blocks[0]} and {blocks[1]}{kind}"
        with watch(case) as memory:
            got = module.attention(q, k, v, *blocks)
        expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(dtype)
        rtol, atol = (1e-3, 1e-5) if dtype is torch.float32 else (1e-2, 2e-3)
        expect_result(case, got, expected, rtol, atol, q=q, k=k, v=v)
        expect_once(case, memory, {"q": q}, got)
        keys = sum(keys_up_to(min(first + blocks[0], seq), blocks[1], seq) for first in range(0, seq, blocks[0]))
        for name, tensor in (("k", k), ("v", v)):
            remark = f"{TARGET}: the tiles up to the diagonal of each program, each once"
            found = memory.of(tensor)
            expect_at_most(f"{case}: elements of {name} read", found.read, heads * keys * dim, remark=remark)
            remark = f"{TARGET}: a tile at a time, so that no row of scores exists"
            expect_at_most(f"{case}: elements of {name} in one load", found.most_read, blocks[1] * dim, remark=remark)
    expect_compiled(module, "attention_kernel", memory)


def keys_up_to(end: int, block: int, seq: int) -> int:
    """Of the tiles that hold the keys before `end`."""
    return min(-(-end // block) * block, seq)


CHECKS = {
    "triton_add": triton_add,
    "triton_softmax": triton_softmax,
    "triton_matmul": triton_matmul,
    "triton_attention": triton_attention,
}
