"""Triton kernels that stream a weight past a few rows: y = x · Wᵀ in half precision and fp8.

One row in half precision needs no tensor core: `one_row` multiplies and adds as the weights come. For more, and in fp8,
`few_rows` pads them to a tile of at least 8 and multiplies W · xᵀ on tensor cores, W's rows taking the long side; where
the tiles of output channels are too few to fill the GPU, several programs share a tile, each with a stretch of K
("split-K"), and the last one to finish adds the parts in a fixed order: the result does not depend on who was last.

Formats are those of `quantized`. Scales are applied to fp32 sums, never to weights, so q itself is what is multiplied.
int8 and int4 have kernels of their own (`int8_triton`, `int4_triton`), which cut and share tiles as these do.

`gated`: the first half of the channels are gates of the second, and silu(gate) · up is what is written: SwiGLU's way in
without a kernel of its own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..swiglu_triton import gated
from ..triton_support import early, power_of_two, split_counters, tl, triton, wait


@triton.jit
def one_row(x, w, out, N, K, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    """x (K), w (N, K) → out (N); a program does BN channels, BK weights of each at a time."""
    n = channels_of(tl.program_id(0), N, BN, GATED)
    row = tl.where(n < N, n, 0).to(tl.int64)
    wait(EARLY)
    k = tl.arange(0, BK)
    sums = tl.zeros((BN, BK), tl.float32)
    for first in range(0, K, BK):
        there = first + k < K
        tile = tl.load(w + row[:, None] * K + (first + k)[None, :], mask=there[None, :], other=0.0)
        part = tl.load(x + first + k, mask=there, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * part[None, :]
    write(tl.sum(sums, axis=1)[:, None], out, tl.arange(0, 1), n, 1, N, GATED)


@triton.jit(do_not_specialize=["M", "split"])
def few_rows(x, w, scale, row_scale, out, parts, tickets, M, N, K, split, KIND: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr, BK: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    """x (M, K), w (N, K) → out (M, N), in steps of BK weights.

    Tiles of rows come first: those that read the same weights run at the same time, and find them in the L2 cache.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = channels_of(tl.program_id(1), N, BN, GATED)
    row = tl.where(n < N, n, 0).to(tl.int64)
    column = tl.where(m < M, m, 0).to(tl.int64)
    k = tl.arange(0, BK)
    first, end = split_k_range(tl.cdiv(K, BK), split)
    wait(EARLY)
    sums = tl.zeros((BN, BM), tl.float32)
    for step in range(first, end):
        there = step * BK + k < K
        tile = tl.load(w + row[:, None] * K + (step * BK + k)[None, :], mask=there[None, :], other=0.0)
        part = tl.load(x + column[None, :] * K + (step * BK + k)[:, None], mask=there[:, None], other=0.0)
        if KIND == "fp8":
            # Sums of one step only: Hopper's tensor cores keep about 14 bits of them (DeepSeek-AI 2024, 2412.19437).
            sums = tl.dot(tile, part, sums, max_num_imprecise_acc=BK)
        else:
            sums = tl.dot(tile, part, sums)
    if KIND == "fp8":
        sums *= tl.load(scale + row)[:, None] * tl.load(row_scale + column)[None, :]
    store(sums, out, parts, tickets, m, n, M, N, split, SHARED, GATED)


@triton.jit
def channels_of(tile, N, BN: tl.constexpr, GATED: tl.constexpr):
    """Of a program; N and more where there are none. `GATED`: BN / 2 gates, then what each of them is for."""
    i = tl.arange(0, BN)
    if GATED:
        gate = tile * (BN // 2) + i % (BN // 2)
        return tl.where(gate < N // 2, gate + i // (BN // 2) * (N // 2), N)
    else:
        return tile * BN + i


@triton.jit
def split_k_range(steps, split):
    """The steps of this program among `split` that share a tile: the first, and the one behind the last."""
    each = tl.cdiv(steps, split)
    first = tl.program_id(2) * each
    return first, tl.minimum(first + each, steps)


@triton.jit
def write(total, out, m, n, M, N, GATED: tl.constexpr):
    """A tile (BN, BM) to out (M, N), or gated to (M, N / 2)."""
    kind: tl.constexpr = out.dtype.element_ty
    if GATED:
        half: tl.constexpr = total.shape[0] // 2
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, half, total.shape[1])), (1, 2, 0)))
        column = tl.min(tl.reshape(n, (2, half)), 0)
        width = N // 2
        total = gated(gate.to(kind), up.to(kind))
    else:
        column, width = n, N
    inside = (column < width)[:, None] & (m < M)[None, :]
    tl.store(out + m[None, :].to(tl.int64) * width + column[:, None], total.to(kind), mask=inside)


@triton.jit
def store(sums, out, parts, tickets, m, n, M, N, split, SHARED: tl.constexpr, GATED: tl.constexpr):
    """A tile (BN, BM) of the result. `SHARED`: of `split` programs with a part of it each, the last adds them up."""
    if SHARED:
        place = m[None, :].to(tl.int64) * N + n[:, None]
        inside = (n < N)[:, None] & (m < M)[None, :]
        size = M.to(tl.int64) * N
        tl.store(parts + tl.program_id(2) * size + place, sums, mask=inside)
        ticket = tickets + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(ticket, 1, sem="acq_rel") == split - 1:
            total = tl.zeros_like(sums)
            for other in range(split):
                total += tl.load(parts + other * size + place, mask=inside, other=0.0)
            write(total, out, m, n, M, N, GATED)
            tl.store(ticket, 0)  # as the next call expects it
    else:
        write(sums, out, m, n, M, N, GATED)


# --- what is called -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How `few_rows` cuts a product."""

    rows: int
    channels: int
    inputs: int
    split: int
    stages: int
    warps: int


PROGRAMS = 256  # about two for each of the 132 multiprocessors of a Hopper GPU: what split-K aims at


def linear(x: Tensor, weight: Tensor, gate: bool = False) -> Tensor:
    """x (…, in) · weight (out, in)ᵀ in half precision."""
    return launch("wide", x, weight, None, None, x.dtype, gate)


def fp8_linear(p: Tensor, s: Tensor, q: Tensor, scale: Tensor, dtype: torch.dtype, gate: bool = False) -> Tensor:
    """p (…, in) and q in e4m3, s one scale a row of p."""
    return launch("fp8", p, q, scale, s, dtype, gate)


def launch(
    kind: str, x: Tensor, weight: Tensor, scale: Tensor | None, row_scale: Tensor | None, dtype: torch.dtype, gate: bool
) -> Tensor:
    inputs, channels = x.shape[-1], weight.shape[0]
    rows = x.numel() // inputs
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], channels // (1 + gate), dtype=dtype, device=x.device)
    if rows == 1 and kind == "wide":
        lines, width = one_row_tile(channels, inputs)
        one_row[(tiles_of(channels, lines, gate),)](
            x, weight, out, channels, inputs, lines, width, gate, **early(x.device), num_warps=4
        )
        return out
    scales = (out if scale is None else scale, out if row_scale is None else row_scale)  # unused ones are never read
    tile = few_rows_tile(kind, rows, channels, inputs)
    grid, parts, tickets = split_buffers(out, rows, channels, tile, gate)
    few_rows[grid](
        x, weight, *scales, out, parts, tickets, rows, channels, inputs, tile.split, kind, tile.rows, tile.channels,
        tile.inputs, tile.split > 1, gate, **early(x.device), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return out


def one_row_tile(channels: int, inputs: int) -> tuple[int, int]:
    """Channels of a program, and weights that it reads of each at a time."""
    return (4 if channels >= 4 * PROGRAMS else 2), min(1024, power_of_two(inputs))


def few_rows_tile(kind: str, rows: int, channels: int, inputs: int) -> Tile:
    """Wide outputs fill the GPU with large tiles; narrow ones need small tiles and split-K.

    As tuned on an H200 for 8 rows of bf16, and 1 and 139 of fp8 (benchmarks/results/quant_tune.txt).
    """
    small, most = kind == "fp8", min(64, max(8, power_of_two(rows)))
    if channels >= (64 if small else 256) * PROGRAMS:
        return Tile(max(16, most), 128, 128, 1, stages=4 if small else 3, warps=8)
    lines = 32 if channels <= 2048 or (most == 8 and not small) else 64
    split = split_of(triton.cdiv(channels, lines) * triton.cdiv(rows, most), triton.cdiv(inputs, 128))
    if small:
        return Tile(most, lines, 128, split, stages=6 if lines == 32 else 4, warps=4)
    return Tile(most, lines, 128, split, stages=4, warps=lines // 16)


def split_of(tiles: int, steps: int, programs: int = PROGRAMS, least: int = 4) -> int:
    """Programs that share a tile: enough to fill the GPU, each with so many steps at least."""
    split = 1
    while tiles * split < programs and steps >= 2 * least * split:
        split *= 2
    return split


def tiles_of(channels: int, lines: int, gate: bool) -> int:
    return triton.cdiv(channels // (1 + gate), lines // (1 + gate))


def split_buffers(
    out: Tensor, rows: int, channels: int, tile: Tile, gate: bool
) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    """The grid, and room for the parts and tickets of tiles that several programs share."""
    grid = (triton.cdiv(rows, tile.rows), tiles_of(channels, tile.channels, gate), tile.split)
    if tile.split == 1:
        return grid, out, out
    return grid, torch.empty(tile.split, rows, channels, device=out.device), split_counters(out.device)
