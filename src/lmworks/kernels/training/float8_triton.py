"""Quantization to 8-bit floats on a GPU.

Row-wise scales take one pass: a program holds a row. One scale for a tensor takes two, as it is known only at the end:
`amax_kernel` writes the largest value of each program, torch reduces those, and `quantize_kernel` reads everything
again.

Values are divided as torch divides tensors: `/` may be off by a bit here, and round to another value.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_support import PDL_MAX_PROGRAMS, pdl_options, pdl_wait, tl, triton
from ..triton_support import power_of_two as next_power
from . import float8

# Measured on an H200 (benchmarks/loss_tune.py): at 16,384 × 4096 80 % of a copy's bandwidth, transposed 78 %.
AMAX_PROGRAMS = 1056  # of the first pass: eight for each of the 132 multiprocessors of a Hopper GPU
AMAX_BLOCK = 4096  # elements of one step of it
TILE, TRANSPOSED_TILE = (8, 512), (64, 64)  # rows and columns of a program of the second pass

MANTISSA, EXPONENT = tl.constexpr(float8.MANTISSA), tl.constexpr(float8.EXPONENT)


def quantize_rows(x: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """As `float8.reference(by_row=True)`, in one pass: x (rows, columns)."""
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty_like(x, dtype=dtype)
    scale = torch.empty(rows, device=x.device)
    block = next_power(columns)
    rows_kernel[(rows,)](
        x, out, scale, columns, FLOOR=float8.TINY, FP8_MAX=float8.FP8_MAX[dtype], POWER=power_of_two, BLOCK=block,
        **pdl_options(x.device, rows < PDL_MAX_PROGRAMS), num_warps=min(16, max(4, block // 1024)),
    )  # fmt: skip
    return out, scale


def quantize(
    x: Tensor, dtype: torch.dtype, power_of_two: bool = False, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """As `float8.reference`, in two passes."""
    x = x.contiguous()
    programs = min(AMAX_PROGRAMS, triton.cdiv(x.numel(), AMAX_BLOCK))
    parts = torch.empty(programs, device=x.device)
    amax_kernel[(programs,)](x, parts, x.numel(), programs, AMAX_BLOCK=AMAX_BLOCK, num_warps=8)
    scale = float8.scale_of(parts.amax(), dtype, power_of_two)
    return cast(x, scale, dtype, transposed), scale


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool = False) -> Tensor:
    """x / scale: the second pass."""
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty((columns, rows) if transposed else (rows, columns), dtype=dtype, device=x.device)
    high, wide = TRANSPOSED_TILE if transposed else TILE
    quantize_kernel[(triton.cdiv(rows, high), triton.cdiv(columns, wide))](
        x, out, scale, rows, columns, FP8_MAX=float8.FP8_MAX[dtype], TRANSPOSED=transposed, HIGH=high, WIDE=wide,
        num_warps=4,
    )  # fmt: skip
    return out


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(values, dtype=dtype)
    rows, columns = values.shape
    block = min(2048, next_power(columns))
    dequantize_kernel[(rows, triton.cdiv(columns, block))](
        values, scale, out, columns, BY_ROW=scale.dim() > 0, BLOCK=block, num_warps=max(1, block // 512)
    )
    return out


@triton.jit
def scale_of(amax, FLOOR: tl.constexpr, FP8_MAX: tl.constexpr, POWER: tl.constexpr):
    scale = tl.maximum(amax * (1.0 / FP8_MAX), FLOOR)
    if POWER:  # the next power of two: any mantissa carries into the exponent
        scale = ((scale.to(tl.int32, bitcast=True) + MANTISSA) & EXPONENT).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def divide_and_clamp(x, scale, FP8_MAX: tl.constexpr):
    """x / scale, clamped; NaN stays NaN."""
    return tl.clamp(tl.div_rn(x, scale), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rows_kernel(
    x, out, scales, columns, FLOOR: tl.constexpr, FP8_MAX: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    place = tl.program_id(0)
    start = place.to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    row = tl.load(x + start + column, mask=column < columns, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(row), 0), FLOOR, FP8_MAX, POWER)
    tl.store(
        out + start + column, divide_and_clamp(row, scale, FP8_MAX).to(out.dtype.element_ty), mask=column < columns
    )
    tl.store(scales + place, scale)


@triton.jit
def amax_kernel(x, parts, count, programs, AMAX_BLOCK: tl.constexpr):
    """The largest absolute value of every `programs`-th block: (programs)."""
    place = tl.program_id(0)
    largest = tl.zeros((AMAX_BLOCK,), tl.float32)
    for first in range(place * AMAX_BLOCK, count, programs * AMAX_BLOCK):
        index = first + tl.arange(0, AMAX_BLOCK).to(tl.int64)
        here = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(here))
    tl.store(parts + place, tl.max(largest, 0))


@triton.jit
def quantize_kernel(x, out, scale_ptr, rows, columns, FP8_MAX: tl.constexpr, TRANSPOSED: tl.constexpr,
                    HIGH: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    scale = tl.load(scale_ptr)
    row = (tl.program_id(0) * HIGH + tl.arange(0, HIGH)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * WIDE + tl.arange(0, WIDE)).to(tl.int64)[None, :]
    inside = (row < rows) & (column < columns)
    tile = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    quantized = divide_and_clamp(tile, scale, FP8_MAX).to(out.dtype.element_ty)
    if TRANSPOSED:
        tl.store(out + tl.trans(column) * rows + tl.trans(row), tl.trans(quantized), mask=tl.trans(inside))
    else:
        tl.store(out + row * columns + column, quantized, mask=inside)


@triton.jit
def dequantize_kernel(values, scales, out, columns, BY_ROW: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scales + place) if BY_ROW else tl.load(scales)
    wide = tl.load(values + place * columns + column, mask=column < columns, other=0.0).to(tl.float32) * scale
    tl.store(out + place * columns + column, wide.to(out.dtype.element_ty), mask=column < columns)
