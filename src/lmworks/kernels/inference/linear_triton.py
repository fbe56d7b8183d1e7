"""Triton kernels of `linear`: products with few rows in half precision and fp8, and batch-invariant products.

One row in half precision needs no tensor core: `one_row_kernel` multiplies and adds as the weights arrive. For more
rows, and in fp8, `few_rows_kernel` pads them to a tile of at least 8 and computes W · xᵀ on tensor cores, with W's rows
as the long side. Where the tiles of output channels are too few to fill the GPU, several programs share a tile, each
with a range of K ("split-K"), and the last to finish adds the partial sums in a fixed order: the result is
deterministic. `batch_invariant_kernel` adds in the same order for any number of rows.

Formats are those of `quantized`. Scales are applied to fp32 sums, never to weights. int8 and int4 have kernels of their
own (`quantized_triton`), with the same tiles and the same split-K.

`GATED`: the first half of the channels are gates of the second, and silu(gate) · up is written (SwiGLU).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..swiglu_triton import gated
from ..triton_support import pdl_options, pdl_wait, power_of_two, split_k_counters, tl, triton


@triton.jit
def one_row_kernel(x, w, out, N, K, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """x (K), w (N, K) → out (N); a program computes BN channels, BK weights of each per step."""
    n = channels_of(tl.program_id(0), N, BN, GATED)
    row = tl.where(n < N, n, 0).to(tl.int64)
    pdl_wait(PDL)
    k = tl.arange(0, BK)
    sums = tl.zeros((BN, BK), tl.float32)
    for first in range(0, K, BK):
        there = first + k < K
        tile = tl.load(w + row[:, None] * K + (first + k)[None, :], mask=there[None, :], other=0.0)
        part = tl.load(x + first + k, mask=there, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * part[None, :]
    write(tl.sum(sums, axis=1)[:, None], out, tl.arange(0, 1), n, 1, N, GATED)


@triton.jit(do_not_specialize=["M", "splits"])
def few_rows_kernel(x, w, scale, row_scale, out, partials, counters, M, N, K, splits, KIND: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT_K: tl.constexpr, GATED: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """x (M, K), w (N, K) → out (M, N), in steps of BK weights.

    Row tiles are the first grid dimension: programs that read the same weights run together and hit the L2 cache.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = channels_of(tl.program_id(1), N, BN, GATED)
    row = tl.where(n < N, n, 0).to(tl.int64)
    column = tl.where(m < M, m, 0).to(tl.int64)
    k = tl.arange(0, BK)
    first, end = split_k_range(tl.cdiv(K, BK), splits)
    pdl_wait(PDL)
    sums = tl.zeros((BN, BM), tl.float32)
    for step in range(first, end):
        there = step * BK + k < K
        tile = tl.load(w + row[:, None] * K + (step * BK + k)[None, :], mask=there[None, :], other=0.0)
        part = tl.load(x + column[None, :] * K + (step * BK + k)[:, None], mask=there[:, None], other=0.0)
        if KIND == "fp8":
            # Promoted to fp32 every step: Hopper's tensor cores accumulate in about 14 bits (DeepSeek-AI 2024,
            # 2412.19437).
            sums = tl.dot(tile, part, sums, max_num_imprecise_acc=BK)
        else:
            sums = tl.dot(tile, part, sums)
    if KIND == "fp8":
        sums *= tl.load(scale + row)[:, None] * tl.load(row_scale + column)[None, :]
    store(sums, out, partials, counters, m, n, M, N, splits, SPLIT_K, GATED)


@triton.jit
def channels_of(tile, N, BN: tl.constexpr, GATED: tl.constexpr):
    """Output channels of a tile; N or more where there are none. `GATED`: BN / 2 gates, then their up channels."""
    i = tl.arange(0, BN)
    if GATED:
        gate = tile * (BN // 2) + i % (BN // 2)
        return tl.where(gate < N // 2, gate + i // (BN // 2) * (N // 2), N)
    else:
        return tile * BN + i


@triton.jit
def split_k_range(steps, splits):
    """This program's steps: the first, and one past the last."""
    each = tl.cdiv(steps, splits)
    first = tl.program_id(2) * each
    return first, tl.minimum(first + each, steps)


@triton.jit
def write(total, out, m, n, M, N, GATED: tl.constexpr):
    """Store a tile (BN, BM) to out (M, N), or gated to (M, N / 2)."""
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
def store(sums, out, partials, counters, m, n, M, N, splits, SPLIT_K: tl.constexpr, GATED: tl.constexpr):
    """Store a tile (BN, BM) of the result. `SPLIT_K`: the last of `splits` programs adds the partial sums of all."""
    if SPLIT_K:
        place = m[None, :].to(tl.int64) * N + n[:, None]
        inside = (n < N)[:, None] & (m < M)[None, :]
        size = M.to(tl.int64) * N
        tl.store(partials + tl.program_id(2) * size + place, sums, mask=inside)
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all threads have written before the counter is incremented
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros_like(sums)
            for other in range(splits):
                total += tl.load(partials + other * size + place, mask=inside, other=0.0)
            write(total, out, m, n, M, N, GATED)
            tl.store(counter, 0)  # for the next launch
    else:
        write(sums, out, m, n, M, N, GATED)


@triton.jit
def partial_sum(x, w, row, column, K, first, end, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Σ over steps first … end − 1 of x · wᵀ: (BM, BN) fp32."""
    k = tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    for step in range(first, end):
        in_k = step * BK + k < K
        a = tl.load(x + row[:, None] * K + (step * BK + k)[None, :], mask=in_k[None, :], other=0.0)
        b = tl.load(w + column[None, :] * K + (step * BK + k)[:, None], mask=in_k[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit
def write_with_bias(total, bias, out, at, n, inside, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "splits"])
def batch_invariant_kernel(x, w, bias, out, partials, counters, M, N, K, splits, BM: tl.constexpr, BN: tl.constexpr,
                           BK: tl.constexpr, SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr,
                           PDL: tl.constexpr):  # fmt: skip
    """x (M, K), w (N, K) → out (M, N); the partial sums are the same with and without `SPLIT_K`."""
    pdl_wait(PDL)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.where(m < M, m, 0).to(tl.int64)
    column = tl.where(n < N, n, 0).to(tl.int64)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    steps = tl.cdiv(K, BK)
    each = tl.cdiv(steps, splits)
    total = tl.zeros((BM, BN), tl.float32)
    if SPLIT_K:
        split = tl.program_id(2)
        size = M.to(tl.int64) * N
        end = tl.minimum(split * each + each, steps)
        part = partial_sum(x, w, row, column, K, split * each, end, BM, BN, BK)
        tl.store(partials + split * size + at, part, mask=inside)
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all threads have written before the counter is incremented
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            for other in range(splits):
                total += tl.load(partials + other * size + at, mask=inside, other=0.0)
            write_with_bias(total, bias, out, at, n, inside, N, HAS_BIAS)
            tl.store(counter, 0)  # for the next launch
    else:
        for split in range(splits):
            end = tl.minimum(split * each + each, steps)
            total += partial_sum(x, w, row, column, K, split * each, end, BM, BN, BK)
        write_with_bias(total, bias, out, at, n, inside, N, HAS_BIAS)


# --- launches -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """The part of a product that a program computes."""

    rows: int
    channels: int
    inputs: int  # of one step
    split: int  # programs that share a tile, each with a part of K
    stages: int
    warps: int


PROGRAMS = 256  # target of split-K: about two for each of the 132 multiprocessors of a Hopper GPU
BATCH_INVARIANT_PROGRAMS = 128
SPLIT_K_MAX_ROWS = 64  # of batch-invariant products: the result is the same without split-K


def linear(x: Tensor, weight: Tensor, gate: bool = False) -> Tensor:
    """x (…, in) · weight (out, in)ᵀ in half precision."""
    return launch("wide", x, weight, None, None, x.dtype, gate)


def fp8_linear(p: Tensor, s: Tensor, q: Tensor, scale: Tensor, dtype: torch.dtype, gate: bool = False) -> Tensor:
    """p (…, in) and q in e4m3; s: one scale per row of p."""
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
        one_row_kernel[(tiles_of(channels, lines, gate),)](
            x, weight, out, channels, inputs, lines, width, gate, **pdl_options(x.device), num_warps=4
        )
        return out
    scales = (out if scale is None else scale, out if row_scale is None else row_scale)  # unused ones are never read
    tile = few_rows_tile(kind, rows, channels, inputs)
    grid, partials, counters = split_buffers(out, rows, channels, tile, gate)
    few_rows_kernel[grid](
        x, weight, *scales, out, partials, counters, rows, channels, inputs, tile.split, kind, tile.rows, tile.channels,
        tile.inputs, tile.split > 1, gate, **pdl_options(x.device), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return out


def one_row_tile(channels: int, inputs: int) -> tuple[int, int]:
    """Channels of a program, and inputs of one step."""
    return (4 if channels >= 4 * PROGRAMS else 2), min(1024, power_of_two(inputs))


def few_rows_tile(kind: str, rows: int, channels: int, inputs: int) -> Tile:
    """Wide outputs fill the GPU with large tiles; narrow ones need small tiles and split-K.

    Tuned on an H200 for 8 rows of bf16, and 1 and 139 of fp8 (benchmarks/results/quant_tune.txt).
    """
    small, most = kind == "fp8", min(64, max(8, power_of_two(rows)))
    if channels >= (64 if small else 256) * PROGRAMS:
        return Tile(max(16, most), 128, 128, 1, stages=4 if small else 3, warps=8)
    lines = 32 if channels <= 2048 or (most == 8 and not small) else 64
    split = num_splits(triton.cdiv(channels, lines) * triton.cdiv(rows, most), triton.cdiv(inputs, 128))
    if small:
        return Tile(most, lines, 128, split, stages=6 if lines == 32 else 4, warps=4)
    return Tile(most, lines, 128, split, stages=4, warps=lines // 16)


def num_splits(tiles: int, steps: int, programs: int = PROGRAMS, min_steps: int = 4) -> int:
    """Programs that share a tile: a power of two that fills the GPU, with `min_steps` steps or more for each."""
    split = 1
    while tiles * split < programs and steps >= 2 * min_steps * split:
        split *= 2
    return split


def tiles_of(channels: int, lines: int, gate: bool) -> int:
    return triton.cdiv(channels // (1 + gate), lines // (1 + gate))


def split_buffers(
    out: Tensor, rows: int, channels: int, tile: Tile, gate: bool
) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    """The grid, and the buffers of split-K: partial sums and counters."""
    grid = (triton.cdiv(rows, tile.rows), tiles_of(channels, tile.channels, gate), tile.split)
    if tile.split == 1:
        return grid, out, out
    return grid, torch.empty(tile.split, rows, channels, device=out.device), split_k_counters(out.device)


def launch_batch_invariant(x: Tensor, weight: Tensor, bias: Tensor | None, fp32_out: bool = False) -> Tensor:
    """x (rows, in) → (rows, out), in the dtype of x or in fp32."""
    rows, inputs, channels = x.shape[0], x.shape[1], weight.shape[0]
    out = x.new_empty(rows, channels, dtype=torch.float32 if fp32_out else None)
    if not rows:
        return out
    tile = batch_invariant_tile(channels, inputs, weight.itemsize)
    split_k = tile.split > 1 and rows <= SPLIT_K_MAX_ROWS
    grid, partials, counters = split_buffers(
        out, rows, channels, tile if split_k else replace(tile, split=1), gate=False
    )
    batch_invariant_kernel[grid](
        x.contiguous(), weight, out if bias is None else bias, out, partials, counters, rows, channels, inputs,
        tile.split, tile.rows, tile.channels, tile.inputs, split_k, bias is not None, num_warps=tile.warps,
        num_stages=tile.stages, **pdl_options(x.device),
    )  # fmt: skip
    return out


def batch_invariant_tile(channels: int, inputs: int, itemsize: int) -> Tile:
    """A function of the weight alone, at least eight steps in each split."""
    tile = {2: Tile(64, 128, 64, 1, stages=4, warps=4), 4: Tile(32, 64, 32, 1, stages=2, warps=4)}[itemsize]
    tiles = triton.cdiv(channels, tile.channels)
    return replace(tile, split=num_splits(tiles, inputs // tile.inputs, BATCH_INVARIANT_PROGRAMS, min_steps=8))
