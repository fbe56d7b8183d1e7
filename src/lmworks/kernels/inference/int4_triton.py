"""int4 weights past a few rows (format: `quantized`).

A word of eight nibbles is one weight from each of eight stretches of a pair of groups. Unpacking a tile of words
(channels, words) thus gives eight tiles of weights, and tile t meets the t-th stretch of x: plain matrices, nothing is
interleaved. On tensor cores from one row on: turning nibbles into numbers is what takes the time (1.5 instructions a
weight, as two words are taken at once), and the products come for free.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_support import power_of_two, tl, triton
from .decode_linear_triton import PROGRAMS, Tile, channels_of, split_buffers, split_k_range, split_of, store

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LEAST_GROUP = 64  # of which a stretch is 16 inputs: what a tensor core takes at once


def spread() -> str:
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


SPREAD = tl.constexpr(spread())
REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r", "r"]))


@triton.jit
def nibbles(words):
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
            SPREAD,
            REGISTERS,
            [words],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )  # fmt: skip
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def times(n, at, inside, onto):
    part = tl.load(at, mask=inside, other=0.0)
    return tl.dot(n.to(part.dtype), part, onto)


@triton.jit
def scales_of(scales, step, end):
    """Of both groups of a step, where there is such a step."""
    there = tl.zeros_like(scales.to(tl.int64)) + step < end
    return tl.load(scales + 2 * step, mask=there), tl.load(scales + 2 * step + 1, mask=there)


@triton.jit(do_not_specialize=["M", "split"])
def few_rows_int4(x, w, scale, out, parts, tickets, M, N, K, split, GROUP: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """x (M, K), w (N, K / 8) words, scale (N, K / GROUP) → out (M, N); a step is a pair of groups."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = channels_of(tl.program_id(1), N, BN, GATED)
    row = tl.where(n < N, n, 0).to(tl.int64)
    inside = (m < M)[None, :]
    W: tl.constexpr = GROUP // 4
    i = tl.arange(0, W)
    start, end = split_k_range(K // (2 * GROUP), split)
    scales = scale + row * (K // GROUP)
    sums = tl.zeros((BN, BM), tl.float32)
    s0, s1 = scales_of(scales, start, end)
    for step in range(start, end):
        words = tl.load(w + row[:, None] * (K // 8) + (step * W + i)[None, :])
        at = x + m[None, :].to(tl.int64) * K + (step * 2 * GROUP + i)[:, None]
        next0, next1 = scales_of(scales, step + 1, end)  # on their way during the products: nothing waits for them
        n0, n1, n2, n3, n4, n5, n6, n7 = nibbles(words)
        none = tl.zeros((BN, BM), tl.float32)
        first = times(n0, at, inside, none)
        first = times(n1, at + W, inside, first)
        first = times(n2, at + 2 * W, inside, first)
        first = times(n3, at + 3 * W, inside, first)
        sums += first * s0.to(tl.float32)[:, None]
        second = times(n4, at + 4 * W, inside, none)
        second = times(n5, at + 5 * W, inside, second)
        second = times(n6, at + 6 * W, inside, second)
        second = times(n7, at + 7 * W, inside, second)
        sums += second * s1.to(tl.float32)[:, None]
        s0, s1 = next0, next1
    store(sums, out, parts, tickets, m, n, M, N, split, SHARED, GATED)


@triton.jit
def widen(w, scale, out, N, K, GROUP: tl.constexpr, BN: tl.constexpr):
    """out (N, K) = q · scale: BN rows and one pair of groups a program."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    inside = (n < N)[:, None]
    pair = tl.program_id(1)
    W: tl.constexpr = GROUP // 4
    i = tl.arange(0, W)
    n0, n1, n2, n3, n4, n5, n6, n7 = nibbles(
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


# --- what is called -----------------------------------------------------------------------------------


def int4_linear(x: Tensor, words: Tensor, scale: Tensor, gate: bool = False) -> Tensor:
    """x (…, in) · (q · scale)ᵀ in half precision; groups of LEAST_GROUP at least."""
    channels, inputs = words.shape[0], x.shape[-1]
    rows, group = x.numel() // inputs, inputs // scale.shape[1]
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], channels // (1 + gate), dtype=x.dtype, device=x.device)
    tile = int4_tile(rows, channels, inputs, group)
    grid, parts, tickets = split_buffers(out, rows, channels, tile, gate)
    # Not launched early, as the others are: so a step took 2.45 ms with one sequence where it takes 2.24 with no kernel
    # launched early, and 2.66 instead of 2.58 with eight. Why is not known.
    few_rows_int4[grid](
        x, words, scale, out, parts, tickets, rows, channels, inputs, tile.split, group, tile.rows, tile.channels,
        tile.split > 1, gate, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def int4_tile(rows: int, channels: int, inputs: int, group: int) -> Tile:
    """As tuned on an H200 for 1, 16 and 139 rows (benchmarks/results/quant_tune.txt)."""
    most, steps = min(64, max(8, power_of_two(rows))), inputs // (2 * group)
    if most > 16:
        tiles = triton.cdiv(channels, 64) * triton.cdiv(rows, most)
        return Tile(most, 64, group, split_of(tiles, 2 * steps), stages=4 if most < 64 else 3, warps=4)
    if channels <= 2048:
        split = split_of(triton.cdiv(channels, 32), steps, PROGRAMS // 2, least=2)
        return Tile(most, 32, group, split, stages=3, warps=2)
    # Three programs for each multiprocessor.
    return Tile(most, 64, group, split_of(triton.cdiv(channels, 64), steps, 3 * PROGRAMS // 2), stages=3, warps=2)


def int4_widen(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole weight (out, in) in half precision."""
    channels, inputs = words.shape[0], 8 * words.shape[1]
    group = inputs // scale.shape[1]
    out = torch.empty(channels, inputs, dtype=dtype, device=words.device)
    grid = (triton.cdiv(channels, 32), inputs // (2 * group))
    widen[grid](words, scale, out, channels, inputs, group, 32)
    return out
