"""silu(gate) · up and its gradients, each in one pass over memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .triton_support import PDL_MAX_PROGRAMS, pdl_options, pdl_wait, power_of_two, tl, triton


@dataclass(frozen=True)
class Tiles:
    """Tile sizes. On an H200 others gained at most 4 % (benchmarks/elementwise_gpu.py)."""

    block: int = 1024  # columns of a program, at most
    thread: int = 8  # columns per thread: 16 bytes of bf16, one load of each tensor


TILES = Tiles()


def forward(gate: Tensor, up: Tensor, tiles: Tiles = TILES) -> Tensor:
    """As `swiglu.reference`. Rows may be strided: gate and up may be two halves of one tensor."""
    out = torch.empty(gate.shape, dtype=torch.result_type(gate, up), device=gate.device)
    gate, up = as_rows(gate), as_rows(up)
    grid, block, warps = launch_grid(gate, tiles)
    forward_kernel[grid](
        gate, up, out, gate.stride(0), up.stride(0), gate.shape[1], BLOCK=block,
        **pdl_options(gate.device, grid[0] * grid[1] <= PDL_MAX_PROGRAMS), num_warps=warps,
    )  # fmt: skip
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor, tiles: Tiles = TILES) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad_gate, grad_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    grad, gate, up = as_rows(grad), as_rows(gate), as_rows(up)
    grid, block, warps = launch_grid(gate, tiles)
    backward_kernel[grid](
        grad,
        gate,
        up,
        grad_gate,
        grad_up,
        grad.stride(0),
        gate.stride(0),
        up.stride(0),
        gate.shape[1],
        BLOCK=block,
        num_warps=warps,
    )
    return grad_gate, grad_up


def as_rows(x: Tensor) -> Tensor:
    """(rows, columns) with contiguous columns."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def launch_grid(x: Tensor, tiles: Tiles) -> tuple[tuple[int, int], int, int]:
    """The grid, the columns of a program and its warps."""
    block = min(tiles.block, power_of_two(x.shape[1]))
    return (x.shape[0], triton.cdiv(x.shape[1], block)), block, max(1, block // (32 * tiles.thread))


@triton.jit
def gated(gate, up):
    """silu(gate) · up in fp32; silu is rounded before, as where the two are separate operations."""
    wide = gate.to(tl.float32)
    silu = wide / (1 + tl.exp(-wide))
    return silu.to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit
def forward_kernel(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, columns, BLOCK: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * columns + column, gated(gate, up), mask=inside)


@triton.jit
def backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    grad_stride,
    gate_stride,
    up_stride,
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    s = 1 / (1 + tl.exp(-wide))
    silu = (wide * s).to(gate.dtype).to(tl.float32)  # what the forward pass multiplied by
    tl.store(grad_up_ptr + row * columns + column, grad * silu, mask=inside)
    tl.store(grad_gate_ptr + row * columns + column, grad * up * s * (1 + wide * (1 - s)), mask=inside)
