"""int8 weights past a few rows: x · (q · scale)ᵀ (format: `quantized`).

Turning bytes into numbers is what takes the time, so it is done in the words that four bytes of a row lie in. A tile of
words (channels, words) gives four tiles of weights, one for each byte, and tile t meets inputs t, t + 4, t + 8 … of x.
Two words are taken at once, with 2 instructions a weight; a compiler that is asked to widen bytes takes many more.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_support import early, power_of_two, tl, triton, wait
from .decode_linear_triton import PROGRAMS, Tile, channels_of, split_buffers, split_k_range, split_of, store

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
WORD = 4  # bytes, of as many inputs


def spread() -> str:
    """PTX: words a, b → four pairs (byte t of a, byte t of b) as two bf16 in a register.

    A byte is l − 128 s, with l its low seven bits and s the highest. 0x4300 | l are the bits of 128 + l, and
    0xc300 | 128 s those of −128 − 128 s.
    """
    lines = [".reg .b32 pair, less, one;", "mov.b32 one, 0x3f803f80;"]
    for t in range(WORD):
        lines += [
            f"prmt.b32 pair, $4, $5, {0x4400 + 0x1111 * t:#x};",
            "lop3.b32 less, pair, 0x00800080, 0xc300c300, 0xea;",
            "lop3.b32 pair, pair, 0x007f007f, 0x43004300, 0xea;",
            f"fma.rn.bf16x2 ${t}, pair, one, less;",
        ]
    return "\n".join(("{", *lines, "}"))


SPREAD = tl.constexpr(spread())
REGISTERS = tl.constexpr(",".join(["=&r"] * WORD + ["r", "r"]))


@triton.jit
def bytes_of(words):
    """The four bytes of each word, the lowest first, as numbers."""
    if INTERPRETED:
        b0 = ((words << 24) >> 24).to(tl.float32)
        b1 = ((words << 16) >> 24).to(tl.float32)
        b2 = ((words << 8) >> 24).to(tl.float32)
        b3 = (words >> 24).to(tl.float32)
    else:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            SPREAD,
            REGISTERS,
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return b0, b1, b2, b3


@triton.jit
def every_fourth(x):
    """(rows, inputs) → four of (inputs / 4, rows): those of input t, t + 4, …"""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return tl.trans(x0), tl.trans(x1), tl.trans(x2), tl.trans(x3)


@triton.jit(do_not_specialize=["M", "split"])
def few_rows_int8(x, w, scale, out, parts, tickets, M, N, K, split, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """x (M, K), w (N, K / 4) words, scale (N) → out (M, N), in steps of BK weights; see `linear_triton.few_rows`."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = channels_of(tl.program_id(1), N, BN, GATED)
    row = tl.where(n < N, n, 0).to(tl.int64)
    column = tl.where(m < M, m, 0).to(tl.int64)
    word, k = tl.arange(0, BK // 4), tl.arange(0, BK)
    first, end = split_k_range(tl.cdiv(K, BK), split)
    wait(EARLY)
    sums = tl.zeros((BN, BM), tl.float32)
    for step in range(first, end):
        here, there = step * (BK // 4) + word, step * BK + k
        words = tl.load(w + row[:, None] * (K // 4) + here[None, :], mask=(here < K // 4)[None, :], other=0)
        part = tl.load(x + column[:, None] * K + there[None, :], mask=(there < K)[None, :], other=0.0)
        b0, b1, b2, b3 = bytes_of(words)
        x0, x1, x2, x3 = every_fourth(part)
        sums = tl.dot(b0.to(part.dtype), x0, sums)
        sums = tl.dot(b1.to(part.dtype), x1, sums)
        sums = tl.dot(b2.to(part.dtype), x2, sums)
        sums = tl.dot(b3.to(part.dtype), x3, sums)
    sums *= tl.load(scale + row)[:, None]
    store(sums, out, parts, tickets, m, n, M, N, split, SHARED, GATED)


@triton.jit
def widen(q, scale, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out (N, K) = q · scale."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    place = n[:, None] * K + k[None, :]
    wide = tl.load(q + place, mask=inside, other=0).to(tl.float32) * tl.load(scale + n, mask=n < N, other=0.0)[:, None]
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=inside)


# --- what is called -----------------------------------------------------------------------------------


def int8_linear(x: Tensor, q: Tensor, scale: Tensor, gate: bool = False) -> Tensor:
    """x (…, in) · (q · scale)ᵀ in half precision; inputs come in fours."""
    channels, inputs = q.shape
    rows = x.numel() // inputs
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], channels // (1 + gate), dtype=x.dtype, device=x.device)
    tile = int8_tile(rows, channels, inputs, gate)
    grid, parts, tickets = split_buffers(out, rows, channels, tile, gate)
    few_rows_int8[grid](
        x, q.view(torch.int32), scale, out, parts, tickets, rows, channels, inputs, tile.split, tile.rows,
        tile.channels, tile.inputs, tile.split > 1, gate, **early(x.device), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return out


def int8_tile(rows: int, channels: int, inputs: int, gate: bool) -> Tile:
    """As tuned on an H200 for 1, 8, 16, 64 and 139 rows (benchmarks/results/quant_tune.txt)."""
    most, steps = min(64, max(8, power_of_two(rows))), triton.cdiv(inputs, 128)
    if channels >= 64 * PROGRAMS:
        if most == 16 or (most == 8 and channels >= 256 * PROGRAMS):
            return Tile(most, 64, 256, 1, stages=3, warps=2)
        return Tile(most, 128, 128, 1, stages=4, warps=4)
    if most == 64 and channels > 2048:
        split = split_of(triton.cdiv(channels, 128), steps, PROGRAMS // 2)
        return Tile(most, 128, 128, split, stages=4, warps=8 if gate and split > 1 else 4)  # of four, registers spill
    lines = 32 if channels <= 2048 and most < 32 else 64
    split = split_of(triton.cdiv(channels, lines) * triton.cdiv(rows, most), steps)
    return Tile(most, lines, 128, split, stages=4, warps=2 if lines == 32 or most == 16 else 4)


def int8_widen(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole weight (out, in) in half precision."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    widen[(triton.cdiv(q.shape[0], 8), triton.cdiv(q.shape[1], 1024))](q, scale, out, *q.shape, 8, 1024)
    return out
