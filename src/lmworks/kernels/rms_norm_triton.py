"""RMSNorm in one pass over memory, forward and backward; forward optionally after an addition to the residual stream.

A program holds whole rows, so that nothing is read twice. Short rows (the heads of queries and keys) are processed
several at a time.

The gradient of the weight is a sum over all rows. A program of the backward pass processes every P-th tile of rows,
accumulates in registers and writes its partial sum once; the P partial sums are added afterwards. No atomics: the same
gradients on the same GPU give the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .triton_support import (
    PDL_MAX_PROGRAMS,
    multiprocessors,
    pdl_options,
    pdl_wait,
    power_of_two,
    shared_bytes,
    tl,
    triton,
)


@dataclass(frozen=True)
class Tiles:
    """Tile sizes, measured on an H200 (benchmarks/elementwise_gpu.py)."""

    elements: int = 2048  # of a tile of several rows; a longer row is a tile of its own
    thread: int = 8  # elements per thread: 16 bytes of bf16, one load
    most_warps: int = 16
    stages: int = 3  # of the backward pass: rows in flight, in shared memory
    resident: int = 32  # warps of the backward pass on a multiprocessor, limited by registers


TILES = Tiles()
SPARE = 2**13  # bytes of shared memory for reductions


def tile(hidden: int, tiles: Tiles) -> tuple[int, int, int]:
    """Rows of a program, their padded width, and its warps. Independent of the number of rows, so that the result of
    a row does not depend on the others."""
    block = power_of_two(hidden)
    rows = max(1, tiles.elements // block)
    return rows, block, min(tiles.most_warps, max(1, rows * block // (32 * tiles.thread)))


def forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, tiles: Tiles = TILES
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta (x where there is no delta), its norm, and r of every row in fp32."""
    x, hidden = x.contiguous(), x.shape[-1]
    total = x
    if delta is not None:
        delta = delta.contiguous()
        total = torch.empty_like(x, dtype=torch.result_type(x, delta))
    normed = torch.empty_like(total)
    r = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, block, warps = tile(hidden, tiles)
    programs = triton.cdiv(r.numel(), rows)
    forward_kernel[(programs,)](
        x, delta, weight, total, normed, r, r.numel(), hidden, eps, ROWS=rows, BLOCK=block,
        **pdl_options(x.device, programs <= PDL_MAX_PROGRAMS), num_warps=warps,
    )  # fmt: skip
    return total, normed, r


def backward(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor, tiles: Tiles = TILES) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    grad, x, hidden = grad.contiguous(), x.contiguous(), x.shape[-1]
    grad_x = torch.empty_like(x)
    rows, block, warps = tile(hidden, tiles)
    resident = max(1, tiles.resident // warps) * multiprocessors(x.device)
    programs = min(triton.cdiv(r.numel(), rows), resident)
    read = grad.itemsize + x.itemsize  # bytes per element
    sums = torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
    backward_kernel[(programs,)](
        grad,
        x,
        weight,
        r,
        grad_x,
        sums,
        r.numel(),
        hidden,
        ROWS=rows,
        BLOCK=block,
        STAGES=max(1, min(tiles.stages, shared_bytes(x.device) // (rows * block * read + SPARE))),
        num_warps=warps,
    )
    return grad_x, sums.sum(dim=0).to(weight.dtype)


@triton.jit(do_not_specialize=["rows"])  # any number of rows, without recompilation
def forward_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    r_ptr,
    rows,
    hidden,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    at = row[:, None] * hidden + column[None, :]
    total = tl.load(x_ptr + at, mask=inside, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
        # The norm is of the sum as it is stored, rounded to the dtype of the residual stream.
        total = (total.to(tl.float32) + delta.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=inside)
    wide = total.to(tl.float32)
    r = 1 / tl.sqrt_rn(tl.sum(wide * wide, 1) / hidden + eps)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, wide * r[:, None] * weight[None, :], mask=inside)
    tl.store(r_ptr + row, r, mask=row < rows)


@triton.jit
def backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    r_ptr,
    grad_x_ptr,
    sums_ptr,
    rows,
    hidden,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    there = column < hidden
    weight = tl.load(weight_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :]
    added = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & there[None, :]
        at = row[:, None] * hidden + column[None, :]
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row, mask=row < rows, other=0.0)[:, None]
        n = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * r
        added += grad * n
        weighted = grad * weight
        mean = tl.sum(weighted * n, 1)[:, None] / hidden
        grad_x = (weighted - n * mean) * r
        tl.store(grad_x_ptr + at, grad_x, mask=inside)
    tl.store(sums_ptr + tl.program_id(0) * hidden + column, tl.sum(added, 0), mask=there)
