"""Triton kernels that stream a weight past a few rows: y = x · Wᵀ for half precision, int8, int4 and fp8.

One row needs no tensor core: `one_row` multiplies and adds as the weights come. From two rows on `few_rows` pads them
to a tile of at least 16 and multiplies W · xᵀ on tensor cores, W's rows taking the long side; where the tiles of
output channels are too few to fill the GPU, several programs share a tile, each with a stretch of K ("split-K"), and
the last one to finish adds the parts in a fixed order: the result does not depend on who was last.

Formats are those of `quantized`. Scales are applied to fp32 sums, never to weights, so q itself is what is multiplied.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .triton_support import power_of_two, tl, triton

KINDS = {torch.bfloat16: "wide", torch.float16: "wide", torch.int8: "int8", torch.uint8: "int4"}


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Four bytes at once: spread to 16-bit lanes, a nibble each; 0x4300 | n are the bits of 128 + n in bf16; less 136.
SPREAD = tl.constexpr("""{
.reg .b32 a, b, c, d, one, less;
mov.b32 one, 0x3f803f80;
mov.b32 less, 0xc308c308;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.b32 c, a, 4;
shr.b32 d, b, 4;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, a, one, less;
fma.rn.bf16x2 $1, b, one, less;
fma.rn.bf16x2 $2, c, one, less;
fma.rn.bf16x2 $3, d, one, less;
}""")


@triton.jit
def nibbles(packed, DTYPE: tl.constexpr):
    """Both halves n of each byte, as q = n − 8 in DTYPE."""
    if INTERPRETED:
        low = (packed & 15).to(tl.float32) - 8
        high = (packed >> 4).to(tl.float32) - 8
    else:  # the same in a third of the instructions: q is exact in bf16
        low, high = tl.inline_asm_elementwise(
            SPREAD, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def one_row(x, w, scale, row_scale, out, N, K, KIND: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr):  # fmt: skip
    """x (K), w (N, K or K/2 bytes) → out (N); a program does BN channels, BK bytes or weights at a time."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    row = tl.where(inside, n, 0).to(tl.int64)
    if KIND == "int4":
        PAIRS: tl.constexpr = BK // GROUP
        pair = tl.arange(0, PAIRS)
        j = tl.arange(0, GROUP)
        sums = tl.zeros((BN, PAIRS), tl.float32)
        pairs = K // (2 * GROUP)
        for first in range(0, pairs, PAIRS):
            here = first + pair
            there = here < pairs
            byte = here[:, None] * GROUP + j[None, :]
            packed = tl.load(w + row[:, None, None] * (K // 2) + byte[None], mask=there[None, :, None], other=0)
            at = x + here[:, None] * (2 * GROUP) + j[None, :]
            x_low = tl.load(at, mask=there[:, None], other=0.0).to(tl.float32)
            x_high = tl.load(at + GROUP, mask=there[:, None], other=0.0).to(tl.float32)
            s = scale + row[:, None] * (K // GROUP) + 2 * here[None, :]
            s_low = tl.load(s, mask=there[None, :], other=0.0).to(tl.float32)
            s_high = tl.load(s + 1, mask=there[None, :], other=0.0).to(tl.float32)
            low, high = nibbles(packed, tl.float32)
            sums += tl.sum(low * x_low[None], axis=2) * s_low + tl.sum(high * x_high[None], axis=2) * s_high
        total = tl.sum(sums, axis=1)
    else:
        k = tl.arange(0, BK)
        sums = tl.zeros((BN, BK), tl.float32)
        for first in range(0, K, BK):
            there = first + k < K
            tile = tl.load(w + row[:, None] * K + (first + k)[None, :], mask=there[None, :], other=0.0)
            part = tl.load(x + first + k, mask=there, other=0.0).to(tl.float32)
            sums += tile.to(tl.float32) * part[None, :]
        total = tl.sum(sums, axis=1)
        if KIND != "wide":
            total *= tl.load(scale + row)
        if KIND == "fp8":
            total *= tl.load(row_scale)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "split"])
def few_rows(x, w, scale, row_scale, out, parts, tickets, M, N, K, split, KIND: tl.constexpr, GROUP: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """x (M, K) → out (M, N). Steps of K are of BK weights; in int4 of BK = GROUP bytes, which are two groups."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    share = tl.program_id(2)
    row = tl.where(n < N, n, 0).to(tl.int64)
    column = tl.where(m < M, m, 0).to(tl.int64)
    k = tl.arange(0, BK)
    STEP: tl.constexpr = 2 * BK if KIND == "int4" else BK
    steps = tl.cdiv(K, STEP)
    each = tl.cdiv(steps, split)
    sums = tl.zeros((BN, BM), tl.float32)
    for step in range(share * each, tl.minimum(share * each + each, steps)):
        if KIND == "int4":
            packed = tl.load(w + row[:, None] * (K // 2) + (step * BK + k)[None, :])
            at = x + column[None, :] * K + (step * STEP + k)[:, None]
            x_low = tl.load(at)  # (BK, BM)
            x_high = tl.load(at + BK)
            low, high = nibbles(packed, x.dtype.element_ty)
            s = scale + row * (K // GROUP) + 2 * step
            sums += tl.dot(low, x_low) * tl.load(s).to(tl.float32)[:, None]
            sums += tl.dot(high, x_high) * tl.load(s + 1).to(tl.float32)[:, None]
        else:
            there = step * BK + k < K
            tile = tl.load(w + row[:, None] * K + (step * BK + k)[None, :], mask=there[None, :], other=0.0)
            part = tl.load(x + column[None, :] * K + (step * BK + k)[:, None], mask=there[:, None], other=0.0)
            sums = tl.dot(tile.to(x.dtype.element_ty), part, sums)
    if KIND == "int8" or KIND == "fp8":
        sums *= tl.load(scale + row)[:, None]
    if KIND == "fp8":
        sums *= tl.load(row_scale + column)[None, :]
    place = m[None, :].to(tl.int64) * N + n[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    if not SHARED:
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)
    else:
        size = M.to(tl.int64) * N
        tl.store(parts + share * size + place, sums, mask=inside)
        ticket = tickets + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(ticket, 1, sem="acq_rel") == split - 1:
            total = tl.zeros((BN, BM), tl.float32)
            for other in range(split):
                total += tl.load(parts + other * size + place, mask=inside, other=0.0)
            tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
            tl.store(ticket, 0)  # as the next call expects it


@triton.jit
def widen_int4(packed, scale, out, N, K, GROUP: tl.constexpr, BN: tl.constexpr):
    """out (N, K) = q · scale, BN rows and one pair of groups a program."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    inside = (n < N)[:, None]
    pair = tl.program_id(1)
    j = tl.arange(0, GROUP)
    low, high = nibbles(tl.load(packed + n[:, None] * (K // 2) + pair * GROUP + j[None, :], mask=inside), tl.float32)
    s = scale + n[:, None] * (K // GROUP) + 2 * pair
    at = out + n[:, None] * K + pair * (2 * GROUP) + j[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(at, (low * tl.load(s, mask=inside).to(tl.float32)).to(kind), mask=inside)
    tl.store(at + GROUP, (high * tl.load(s + 1, mask=inside).to(tl.float32)).to(kind), mask=inside)


@triton.jit
def quantize_rows(x, out, scale, K, FLOOR: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """A row of x (M, K) in e4m3 with its scale, one program a row."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    row = tl.load(x + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(row)) / LARGEST, FLOOR)
    tl.store(out + m * K + k, tl.clamp(row / s, -LARGEST, LARGEST).to(out.dtype.element_ty), mask=k < K)
    tl.store(scale + m, s)


# --- what is called -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How `few_rows` cuts a product."""

    rows: int
    channels: int
    inputs: int
    split: int
    stages: int
    warps: int = 4


PROGRAMS = 264  # two for each of the 132 multiprocessors of a Hopper GPU: what split-K aims at


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (…, in) · weight (out, in)ᵀ in half precision."""
    return launch(x, weight, None, None, x.dtype)


def quantized_linear(
    x: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x (…, in) · (weight · scale)ᵀ; with `row_scale` x is e4m3, and the result has `dtype`."""
    return launch(x, weight, scale, row_scale, dtype or x.dtype)


def launch(x: Tensor, weight: Tensor, scale: Tensor | None, row_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    kind = "fp8" if row_scale is not None else KINDS[weight.dtype]
    inputs, channels = x.shape[-1], weight.shape[0]
    rows = x.numel() // inputs
    x = x.contiguous()
    group = 2 * weight.shape[1] // scale.shape[1] if kind == "int4" and scale is not None else 0
    out = torch.empty(*x.shape[:-1], channels, dtype=dtype, device=x.device)
    scales = (out if scale is None else scale, out if row_scale is None else row_scale)  # unused ones are never read
    if rows == 1:
        lines, width = one_row_tile(kind, channels, inputs, group)
        one_row[(triton.cdiv(channels, lines),)](
            x, weight, *scales, out, channels, inputs, kind, group, lines, width, num_warps=4
        )
        return out
    tile = few_rows_tile(kind, rows, channels, inputs, group)
    grid = (triton.cdiv(channels, tile.channels), triton.cdiv(rows, tile.rows), tile.split)
    parts = out if tile.split == 1 else torch.empty(tile.split, rows, channels, device=x.device)
    tickets = out if tile.split == 1 else tickets_of(x.device)
    few_rows[grid](
        x, weight, *scales, out, parts, tickets, rows, channels, inputs, tile.split, kind,
        group, tile.rows, tile.channels, tile.inputs, tile.split > 1, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def one_row_tile(kind: str, channels: int, inputs: int, group: int) -> tuple[int, int]:
    """Channels of a program, and weights (int4: bytes) that it reads of each at a time."""
    width = {"wide": 1024, "int8": 1024, "fp8": 1024, "int4": 1024}[kind]
    limit = max(group, power_of_two(inputs // 2 if kind == "int4" else inputs))
    return (4 if channels >= 4 * PROGRAMS else 2), min(width, limit)


def few_rows_tile(kind: str, rows: int, channels: int, inputs: int, group: int) -> Tile:
    most = 16 if rows <= 16 else 32 if rows <= 32 else 64
    lines = 64
    width = group if kind == "int4" else 128
    steps = triton.cdiv(inputs, 2 * width if kind == "int4" else width)
    programs = triton.cdiv(channels, lines) * triton.cdiv(rows, most)
    split = 1
    while programs * split < PROGRAMS and steps // (2 * split) >= 4:
        split *= 2
    return Tile(most, lines, width, split, stages=5)


@functools.cache
def tickets_of(device: torch.device) -> Tensor:
    """Zeros that programs of a tile count themselves with; each call leaves zeros. One stream at a time."""
    return torch.zeros(2**16, dtype=torch.int32, device=device)


def int4_widen(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole weight (out, in) in half precision."""
    channels, group = packed.shape[0], 2 * packed.shape[1] // scale.shape[1]
    out = torch.empty(channels, 2 * packed.shape[1], dtype=dtype, device=packed.device)
    grid = (triton.cdiv(channels, 32), packed.shape[1] // group)
    widen_int4[grid](packed, scale, out, channels, out.shape[1], group, 32)
    return out


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantized.fp8_quantize`, in one pass: x (rows, in)."""
    from .quantized import FP8, FP8_MAX, TINY

    x = x.contiguous()
    out = torch.empty_like(x, dtype=FP8)
    scale = torch.empty(x.shape[0], device=x.device)
    block = power_of_two(x.shape[1])
    warps = min(16, max(4, block // 1024))
    quantize_rows[(x.shape[0],)](x, out, scale, x.shape[1], TINY, FP8_MAX, block, num_warps=warps)
    return out, scale
