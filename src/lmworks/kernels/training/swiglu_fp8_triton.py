"""silu(gate) · up and its gradients, written in fp8, as they are and transposed.

A tensor-wise scale is known after the last value: each value is computed twice, first to find the largest, then to be
written. For the transpose a program takes the rows of a tile in fours, packs the four values of a column into one word,
and transposes words: bytes would take four times as many accesses to shared memory. The plain output has conversions of
its own, of two columns at a time, where those of the transpose are of two rows. If one conversion served both, ptxas
(12.8) would put two pairs into one register for the store, and then take bytes of the second from a register that never
had them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..triton_support import tl, triton
from . import float8
from .float8_triton import AMAX_PROGRAMS
from .swiglu_fp8 import Gradients


@dataclass(frozen=True)
class Tiles:
    """Tile sizes. Not tuned yet: benchmarks/elementwise_gpu.py tries others."""

    span: int = 2048  # elements of one step of a pass without transpose
    high: int = 64  # rows and columns of a program that transposes
    wide: int = 128
    warps: int = 8


TILES = Tiles()
WORD = tl.constexpr(4)  # rows that are transposed together: see `transposed_bytes`


def forward(gate: Tensor, up: Tensor, tiles: Tiles = TILES) -> tuple[Tensor, Tensor]:
    """As `swiglu_fp8.forward_reference`."""
    gate, up = gate.contiguous(), up.contiguous()
    out, count = torch.empty_like(gate, dtype=float8.E4M3), gate.numel()
    programs = min(AMAX_PROGRAMS, triton.cdiv(count, tiles.span))
    parts = torch.empty(programs, device=gate.device)
    amax_kernel[(programs,)](gate, up, parts, count, programs, SPAN=tiles.span, num_warps=8)
    scale = float8.scale_of(parts.amax(), out.dtype)
    forward_kernel[(triton.cdiv(count, tiles.span),)](gate, up, out, scale, count, SPAN=tiles.span, num_warps=8)
    return out, scale


def backward(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor, tiles: Tiles = TILES) -> Gradients:
    """As `swiglu_fp8.backward_reference`; the number of rows must be a multiple of four."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    (rows, columns), count = gate.shape, gate.numel()
    assert rows % WORD.value == 0, f"{rows} rows: others would be written behind the last"
    programs = min(AMAX_PROGRAMS, triton.cdiv(count, tiles.span))
    of_gate, of_up = torch.empty(programs, device=gate.device), torch.empty(programs, device=gate.device)
    gradient_amax_kernel[(programs,)](grad, gate, up, of_gate, of_up, count, programs, SPAN=tiles.span, num_warps=8)
    scales = [float8.scale_of(parts.amax(), float8.E5M2) for parts in (of_gate, of_up)]
    as_is = [torch.empty_like(gate, dtype=float8.E5M2) for _ in range(2)]
    transposed_bytes = [gate.new_empty(columns, rows, dtype=dtype) for dtype in (float8.E5M2, float8.E5M2, float8.E4M3)]
    backward_kernel[(triton.cdiv(rows, tiles.high), triton.cdiv(columns, tiles.wide))](
        grad, gate, up, scale, *scales, *as_is, *transposed_bytes, rows, columns, HIGH=tiles.high, WIDE=tiles.wide,
        num_warps=tiles.warps,
    )  # fmt: skip
    return as_is[0], transposed_bytes[0], as_is[1], transposed_bytes[1], transposed_bytes[2], scales[0], scales[1]


@triton.jit
def silu_of(gate):
    """silu(gate), and its derivative."""
    s = 1 / (1 + tl.exp(-gate))
    silu = gate * s
    return silu, s + silu * (1 - s)


@triton.jit
def transposed_bytes(first, second, third, fourth, out, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Four interleaved sets of rows of a tile, in the dtype of `out`, transposed to (columns, rows)."""
    fours = tl.join(tl.join(first, third), tl.join(second, fourth)).to(out.dtype.element_ty)  # (…, 2, 2): in order
    return tl.reshape(tl.permute(fours, (1, 0, 2, 3)), (WIDE, HIGH))


@triton.jit
def amax_kernel(gate_ptr, up_ptr, parts, count, programs, SPAN: tl.constexpr):
    """The largest absolute value of every `programs`-th block: (programs)."""
    place = tl.program_id(0)
    largest = tl.zeros((SPAN,), tl.float32)
    for first in range(place * SPAN, count, programs * SPAN):
        index = first + tl.arange(0, SPAN).to(tl.int64)
        gate = tl.load(gate_ptr + index, mask=index < count, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + index, mask=index < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(silu_of(gate)[0] * up))
    tl.store(parts + place, tl.max(largest, 0))


@triton.jit
def gradient_amax_kernel(
    grad_ptr, gate_ptr, up_ptr, gate_parts, up_parts, count, programs, SPAN: tl.constexpr
):  # fmt: skip
    """As `amax_kernel`, for the gradients of gate and up."""
    place = tl.program_id(0)
    of_gate, of_up = tl.zeros((SPAN,), tl.float32), tl.zeros((SPAN,), tl.float32)
    for first in range(place * SPAN, count, programs * SPAN):
        index = first + tl.arange(0, SPAN).to(tl.int64)
        grad = tl.load(grad_ptr + index, mask=index < count, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + index, mask=index < count, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + index, mask=index < count, other=0.0).to(tl.float32)
        silu, slope = silu_of(gate)
        of_gate, of_up = tl.maximum(of_gate, tl.abs(grad * up * slope)), tl.maximum(of_up, tl.abs(grad * silu))
    tl.store(gate_parts + place, tl.max(of_gate, 0))
    tl.store(up_parts + place, tl.max(of_up, 0))


@triton.jit
def forward_kernel(gate_ptr, up_ptr, out, scale, count, SPAN: tl.constexpr):
    """The largest value becomes the largest of the format: nothing is clamped, here and below."""
    index = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    gate = tl.load(gate_ptr + index, mask=index < count, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=index < count, other=0.0).to(tl.float32)
    small = (silu_of(gate)[0] * up * (1 / tl.load(scale))).to(out.dtype.element_ty)
    tl.store(out + index, small, mask=index < count)


@triton.jit
def fp8_gradients(
    grad_ptr, gate_ptr, up_ptr, gate_out, up_out, here, inside, to_product, to_gate, to_up
):  # fmt: skip
    """Store gradients without transpose; returns them, and silu(gate) · up, for the transpose."""
    grad = tl.load(grad_ptr + here, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + here, mask=inside, other=0.0).to(tl.float32)
    silu, slope = silu_of(gate)
    of_gate, of_up = grad * up * slope * to_gate, grad * silu * to_up
    tl.store(gate_out + here, of_gate.to(gate_out.dtype.element_ty), mask=inside)
    tl.store(up_out + here, of_up.to(up_out.dtype.element_ty), mask=inside)
    return of_gate, of_up, silu * up * to_product


@triton.jit
def backward_kernel(
    grad, gate, up, scale, gate_scale, up_scale, gate_out, up_out, gate_transposed, up_transposed, product_transposed,
    rows, columns, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    to_product, to_gate, to_up = 1 / tl.load(scale), 1 / tl.load(gate_scale), 1 / tl.load(up_scale)
    top, left = tl.program_id(0) * HIGH, tl.program_id(1) * WIDE
    row, column = tl.arange(0, HIGH // WORD)[:, None] * WORD, left + tl.arange(0, WIDE)[None, :]
    inside = (top + row < rows) & (column < columns)
    here = top.to(tl.int64) * columns + (row * columns + column)
    gate_0, up_0, product_0 = fp8_gradients(
        grad, gate, up, gate_out, up_out, here, inside, to_product, to_gate, to_up
    )  # fmt: skip
    gate_1, up_1, product_1 = fp8_gradients(
        grad, gate, up, gate_out, up_out, here + columns, inside, to_product, to_gate, to_up
    )  # fmt: skip
    gate_2, up_2, product_2 = fp8_gradients(
        grad, gate, up, gate_out, up_out, here + 2 * columns, inside, to_product, to_gate, to_up
    )  # fmt: skip
    gate_3, up_3, product_3 = fp8_gradients(
        grad, gate, up, gate_out, up_out, here + 3 * columns, inside, to_product, to_gate, to_up
    )  # fmt: skip
    line, place = left + tl.arange(0, WIDE)[:, None], top + tl.arange(0, HIGH)[None, :]
    there, within = line.to(tl.int64) * rows + place, (place < rows) & (line < columns)
    products = transposed_bytes(product_0, product_1, product_2, product_3, product_transposed, HIGH, WIDE)
    tl.store(product_transposed + there, products, mask=within)
    tl.store(
        gate_transposed + there,
        transposed_bytes(gate_0, gate_1, gate_2, gate_3, gate_transposed, HIGH, WIDE),
        mask=within,
    )
    tl.store(up_transposed + there, transposed_bytes(up_0, up_1, up_2, up_3, up_transposed, HIGH, WIDE), mask=within)
