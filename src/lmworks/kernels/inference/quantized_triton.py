"""Products of a few rows with int8 and int4 weights, x · (q · scale)ᵀ, on tensor cores (formats: `quantized`).

Unpacking takes the time, not the products, so it is done on 32-bit words, two at once. int8: a tile of words (channels,
words) gives four tiles of weights, one for each byte, and tile t is multiplied with inputs t, t + 4, t + 8 … of x: 2
instructions a weight, where a compiler's conversion of bytes takes many more. int4: the eight nibbles of a word are one
weight from each eighth of a pair of groups, so that tile t of eight is multiplied with the t-th eighth of x and nothing
is interleaved: 1.5 instructions a weight.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_support import pdl_options, pdl_wait, power_of_two, tl, triton
from .linear_triton import PROGRAMS, Tile, channels_of, num_splits, split_buffers, split_k_range, store

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
INT8_PER_WORD = 4
INT4_MIN_GROUP = 64  # an eighth of a pair of groups is then 16 inputs: one tensor core instruction


# --- int8 -----------------------------------------------------------------------------------------------


def int8_unpack_ptx() -> str:
    """PTX: words a, b → four pairs (byte t of a, byte t of b) as two bf16 in a register.

    A byte is l − 128 s, with l its low seven bits and s the highest. 0x4300 | l are the bits of 128 + l, and
    0xc300 | 128 s those of −128 − 128 s.
    """
    lines = [".reg .b32 pair, less, one;", "mov.b32 one, 0x3f803f80;"]
    for t in range(INT8_PER_WORD):
        lines += [
            f"prmt.b32 pair, $4, $5, {0x4400 + 0x1111 * t:#x};",
            "lop3.b32 less, pair, 0x00800080, 0xc300c300, 0xea;",
            "lop3.b32 pair, pair, 0x007f007f, 0x43004300, 0xea;",
            f"fma.rn.bf16x2 ${t}, pair, one, less;",
        ]
    return "\n".join(("{", *lines, "}"))


INT8_PTX = tl.constexpr(int8_unpack_ptx())
INT8_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * INT8_PER_WORD + ["r", "r"]))


@triton.jit
def unpack_int8(words):
    """The four bytes of each word as numbers, the lowest first."""
    if INTERPRETED:
        b0 = ((words << 24) >> 24).to(tl.float32)
        b1 = ((words << 16) >> 24).to(tl.float32)
        b2 = ((words << 8) >> 24).to(tl.float32)
        b3 = (words >> 24).to(tl.float32)
    else:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            INT8_PTX,
            INT8_CONSTRAINTS,
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return b0, b1, b2, b3


@triton.jit
def deinterleave_4(x):
    """(rows, inputs) → four (inputs / 4, rows): inputs t, t + 4, …"""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return tl.trans(x0), tl.trans(x1), tl.trans(x2), tl.trans(x3)


@triton.jit(do_not_specialize=["M", "splits"])
def int8_kernel(x, w, scale, out, partials, counters, M, N, K, splits, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, SPLIT_K: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """x (M, K), w (N, K / 4) words, scale (N) → out (M, N), in steps of BK weights."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = channels_of(tl.program_id(1), N, BN, GATED)
    row = tl.where(n < N, n, 0).to(tl.int64)
    column = tl.where(m < M, m, 0).to(tl.int64)
    word, k = tl.arange(0, BK // 4), tl.arange(0, BK)
    first, end = split_k_range(tl.cdiv(K, BK), splits)
    pdl_wait(PDL)
    sums = tl.zeros((BN, BM), tl.float32)
    for step in range(first, end):
        here, there = step * (BK // 4) + word, step * BK + k
        words = tl.load(w + row[:, None] * (K // 4) + here[None, :], mask=(here < K // 4)[None, :], other=0)
        part = tl.load(x + column[:, None] * K + there[None, :], mask=(there < K)[None, :], other=0.0)
        b0, b1, b2, b3 = unpack_int8(words)
        x0, x1, x2, x3 = deinterleave_4(part)
        sums = tl.dot(b0.to(part.dtype), x0, sums)
        sums = tl.dot(b1.to(part.dtype), x1, sums)
        sums = tl.dot(b2.to(part.dtype), x2, sums)
        sums = tl.dot(b3.to(part.dtype), x3, sums)
    sums *= tl.load(scale + row)[:, None]
    store(sums, out, partials, counters, m, n, M, N, splits, SPLIT_K, GATED)


@triton.jit
def int8_dequantize_kernel(q, scale, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out (N, K) = q · scale."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    place = n[:, None] * K + k[None, :]
    wide = tl.load(q + place, mask=inside, other=0).to(tl.float32) * tl.load(scale + n, mask=n < N, other=0.0)[:, None]
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=inside)


def int8_linear(x: Tensor, q: Tensor, scale: Tensor, gate: bool = False) -> Tensor:
    """x (…, in) · (q · scale)ᵀ in half precision; the number of inputs divides by 4."""
    channels, inputs = q.shape
    rows = x.numel() // inputs
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], channels // (1 + gate), dtype=x.dtype, device=x.device)
    tile = int8_tile(rows, channels, inputs, gate)
    grid, partials, counters = split_buffers(out, rows, channels, tile, gate)
    int8_kernel[grid](
        x, q.view(torch.int32), scale, out, partials, counters, rows, channels, inputs, tile.split, tile.rows,
        tile.channels, tile.inputs, tile.split > 1, gate, **pdl_options(x.device), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return out


def int8_tile(rows: int, channels: int, inputs: int, gate: bool) -> Tile:
    """Tuned on an H200 for 1, 8, 16, 64 and 139 rows (benchmarks/results/quant_tune.txt)."""
    most, steps = min(64, max(8, power_of_two(rows))), triton.cdiv(inputs, 128)
    if channels >= 64 * PROGRAMS:
        if most == 16 or (most == 8 and channels >= 256 * PROGRAMS):
            return Tile(most, 64, 256, 1, stages=3, warps=2)
        return Tile(most, 128, 128, 1, stages=4, warps=4)
    if most == 64 and channels > 2048:
        split = num_splits(triton.cdiv(channels, 128), steps, PROGRAMS // 2)
        return Tile(most, 128, 128, split, stages=4, warps=8 if gate and split > 1 else 4)  # with 4 registers spill
    lines = 32 if channels <= 2048 and most < 32 else 64
    split = num_splits(triton.cdiv(channels, lines) * triton.cdiv(rows, most), steps)
    return Tile(most, lines, 128, split, stages=4, warps=2 if lines == 32 or most == 16 else 4)


def int8_dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole weight (out, in) in half precision."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    int8_dequantize_kernel[(triton.cdiv(q.shape[0], 8), triton.cdiv(q.shape[1], 1024))](
        q, scale, out, *q.shape, 8, 1024
    )
    return out


# --- int4 -----------------------------------------------------------------------------------------------


def int4_unpack_ptx() -> str:
    """PTX: words a, b → eight pairs (nibble t of a, nibble t of b) less 8, as two bf16 in a register.

    The halves of both words side by side; a nibble of each by shift and mask; 0x4300 | n are the bits of 128 + n.
    """
    lines = [
        ".reg .b32 low, high, pair, one, less;",
        "mov.b32 one, 0x3f803f80;",
        "mov.b32 less, 0xc308c308;",
        "prmt.b32 low, $8, $9, 0x5410;",
        "prmt.b32 high, $8, $9, 0x7632;",
    ]
    for t in range(8):
        half = "low" if t < 4 else "high"
        lines += [
            f"shr.b32 pair, {half}, {4 * (t % 4)};",
            "lop3.b32 pair, pair, 0x000f000f, 0x43004300, 0xea;",
            f"fma.rn.bf16x2 ${t}, pair, one, less;",
        ]
    return "\n".join(("{", *lines, "}"))


INT4_PTX = tl.constexpr(int4_unpack_ptx())
INT4_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r", "r"]))


@triton.jit
def unpack_int4(words):
    """The eight nibbles n of each word, as n − 8."""
    if INTERPRETED:
        n0 = (words & 15).to(tl.float32) - 8
        n1 = ((words >> 4) & 15).to(tl.float32) - 8
        n2 = ((words >> 8) & 15).to(tl.float32) - 8
        n3 = ((words >> 12) & 15).to(tl.float32) - 8
        n4 = ((words >> 16) & 15).to(tl.float32) - 8
        n5 = ((words >> 20) & 15).to(tl.float32) - 8
        n6 = ((words >> 24) & 15).to(tl.float32) - 8
        n7 = ((words >> 28) & 15).to(tl.float32) - 8
    else:
        n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
            INT4_PTX,
            INT4_CONSTRAINTS,
            [words],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )  # fmt: skip
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def multiply_add(weights, x_at, inside, total):
    x = tl.load(x_at, mask=inside, other=0.0)
    return tl.dot(weights.to(x.dtype), x, total)


@triton.jit
def load_scales(scales, step, end):
    """Scales of both groups of a step, if step < end."""
    there = tl.zeros_like(scales.to(tl.int64)) + step < end
    return tl.load(scales + 2 * step, mask=there), tl.load(scales + 2 * step + 1, mask=there)


@triton.jit(do_not_specialize=["M", "splits"])
def int4_kernel(x, w, scale, out, partials, counters, M, N, K, splits, GROUP: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, SPLIT_K: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """x (M, K), w (N, K / 8) words, scale (N, K / GROUP) → out (M, N); a step is a pair of groups."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = channels_of(tl.program_id(1), N, BN, GATED)
    row = tl.where(n < N, n, 0).to(tl.int64)
    inside = (m < M)[None, :]
    W: tl.constexpr = GROUP // 4
    i = tl.arange(0, W)
    start, end = split_k_range(K // (2 * GROUP), splits)
    scales = scale + row * (K // GROUP)
    sums = tl.zeros((BN, BM), tl.float32)
    s0, s1 = load_scales(scales, start, end)
    for step in range(start, end):
        words = tl.load(w + row[:, None] * (K // 8) + (step * W + i)[None, :])
        at = x + m[None, :].to(tl.int64) * K + (step * 2 * GROUP + i)[:, None]
        next0, next1 = load_scales(scales, step + 1, end)  # prefetched during the products
        n0, n1, n2, n3, n4, n5, n6, n7 = unpack_int4(words)
        none = tl.zeros((BN, BM), tl.float32)
        first = multiply_add(n0, at, inside, none)
        first = multiply_add(n1, at + W, inside, first)
        first = multiply_add(n2, at + 2 * W, inside, first)
        first = multiply_add(n3, at + 3 * W, inside, first)
        sums += first * s0.to(tl.float32)[:, None]
        second = multiply_add(n4, at + 4 * W, inside, none)
        second = multiply_add(n5, at + 5 * W, inside, second)
        second = multiply_add(n6, at + 6 * W, inside, second)
        second = multiply_add(n7, at + 7 * W, inside, second)
        sums += second * s1.to(tl.float32)[:, None]
        s0, s1 = next0, next1
    store(sums, out, partials, counters, m, n, M, N, splits, SPLIT_K, GATED)


@triton.jit
def int4_dequantize_kernel(w, scale, out, N, K, GROUP: tl.constexpr, BN: tl.constexpr):
    """out (N, K) = q · scale: BN rows and one pair of groups per program."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    inside = (n < N)[:, None]
    pair = tl.program_id(1)
    W: tl.constexpr = GROUP // 4
    i = tl.arange(0, W)
    n0, n1, n2, n3, n4, n5, n6, n7 = unpack_int4(
        tl.load(w + n[:, None] * (K // 8) + pair * W + i[None, :], mask=inside, other=0)
    )
    s = scale + n[:, None] * (K // GROUP) + 2 * pair
    first = tl.load(s, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(s + 1, mask=inside, other=0.0).to(tl.float32)
    at = out + n[:, None] * K + pair * (2 * GROUP) + i[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(at, (n0.to(tl.float32) * first).to(kind), mask=inside)
    tl.store(at + W, (n1.to(tl.float32) * first).to(kind), mask=inside)
    tl.store(at + 2 * W, (n2.to(tl.float32) * first).to(kind), mask=inside)
    tl.store(at + 3 * W, (n3.to(tl.float32) * first).to(kind), mask=inside)
    tl.store(at + 4 * W, (n4.to(tl.float32) * second).to(kind), mask=inside)
    tl.store(at + 5 * W, (n5.to(tl.float32) * second).to(kind), mask=inside)
    tl.store(at + 6 * W, (n6.to(tl.float32) * second).to(kind), mask=inside)
    tl.store(at + 7 * W, (n7.to(tl.float32) * second).to(kind), mask=inside)


def int4_linear(x: Tensor, words: Tensor, scale: Tensor, gate: bool = False) -> Tensor:
    """x (…, in) · (q · scale)ᵀ in half precision; groups of INT4_MIN_GROUP or more."""
    channels, inputs = words.shape[0], x.shape[-1]
    rows, group = x.numel() // inputs, inputs // scale.shape[1]
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], channels // (1 + gate), dtype=x.dtype, device=x.device)
    tile = int4_tile(rows, channels, inputs, group)
    grid, partials, counters = split_buffers(out, rows, channels, tile, gate)
    # Without programmatic dependent launch: with it a step of one sequence took 2.45 ms instead of 2.24, of eight 2.66
    # instead of 2.58. The cause is unknown.
    int4_kernel[grid](
        x, words, scale, out, partials, counters, rows, channels, inputs, tile.split, group, tile.rows, tile.channels,
        tile.split > 1, gate, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def int4_tile(rows: int, channels: int, inputs: int, group: int) -> Tile:
    """Tuned on an H200 for 1, 16 and 139 rows (benchmarks/results/quant_tune.txt)."""
    most, steps = min(64, max(8, power_of_two(rows))), inputs // (2 * group)
    if most > 16:
        tiles = triton.cdiv(channels, 64) * triton.cdiv(rows, most)
        return Tile(most, 64, group, num_splits(tiles, 2 * steps), stages=4 if most < 64 else 3, warps=4)
    if channels <= 2048:
        split = num_splits(triton.cdiv(channels, 32), steps, PROGRAMS // 2, min_steps=2)
        return Tile(most, 32, group, split, stages=3, warps=2)
    # Three programs per multiprocessor.
    return Tile(most, 64, group, num_splits(triton.cdiv(channels, 64), steps, 3 * PROGRAMS // 2), stages=3, warps=2)


def int4_dequantize(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole weight (out, in) in half precision."""
    channels, inputs = words.shape[0], 8 * words.shape[1]
    group = inputs // scale.shape[1]
    out = torch.empty(channels, inputs, dtype=dtype, device=words.device)
    grid = (triton.cdiv(channels, 32), inputs // (2 * group))
    int4_dequantize_kernel[grid](words, scale, out, channels, inputs, group, 32)
    return out
