"""Numbers of 8 bits: x ≈ values · scale, with one scale for a tensor or one for each of its rows.

    e4m3   3 bits of mantissa, up to 448: weights and activations
    e5m2   2 bits, up to 57,344: gradients, which spread over more powers of two

The largest value of a tensor (or row) becomes the largest of the format, and nothing above it becomes an infinity:
what a rounded scale leaves outside is cut off. A scale that is a power of two costs up to one of the format's powers
of two and makes quantisation exact but for the mantissa: numbers that fit keep their value through it.

A product on tensor cores wants both operands with the summed dimension side by side: x (m, k) and the second as
(n, k), which is what a weight is. For gradients the other way round is needed, hence `transposed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...spec import SpecError
from ...spec.precision import FP8_ALIGNED
from ..dispatch import pick

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
TINY = 1e-12  # a tensor of zeros has this scale, not 0: its values are 0 · TINY
IMPLEMENTATIONS = ("torch", "triton")
MANTISSA, EXPONENT = 2**23 - 1, 0xFF << 23  # bits of an fp32 number


class Float8(NamedTuple):
    values: Tensor  # (rows, columns), or (columns, rows) where they were asked for transposed
    scale: Tensor  # fp32: () for a tensor, (rows) where each row has its own


def quantize(
    x: Tensor,
    dtype: torch.dtype = E4M3,
    *,
    by_row: bool = False,
    power_of_two: bool = False,
    transposed: bool = False,
    implementation: str | None = None,
) -> Float8:
    """x (rows, columns) in 8 bits. `transposed` goes with one scale for all: a row's would have to follow a column."""
    if by_row and transposed:
        raise SpecError("quantize: by_row and transposed exclude each other; quantize x.t() by row instead")
    op = "quantize_rows" if by_row else "quantize"
    chosen = pick(op, implementation, IMPLEMENTATIONS, x.device, rows=x.shape[0], columns=x.shape[1])
    if chosen == "triton":
        from . import float8_triton

        if by_row:
            return Float8(*float8_triton.quantize_rows(x, dtype, power_of_two))
        return Float8(*float8_triton.quantize(x, dtype, power_of_two, transposed))
    return reference(x, dtype, by_row=by_row, power_of_two=power_of_two, transposed=transposed)


def reference(
    x: Tensor, dtype: torch.dtype, *, by_row: bool = False, power_of_two: bool = False, transposed: bool = False
) -> Float8:
    scale = scale_of(x.abs().amax(dim=1) if by_row else x.abs().amax(), dtype, power_of_two)
    values = cast(x, scale.unsqueeze(1) if by_row else scale, dtype)
    return Float8((values.t() if transposed else values).contiguous(), scale)  # rows lie whole, as products want them


def scale_of(amax: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    # By the inverse: a GPU divides by a number so, a CPU does not, and their scales would differ by a bit.
    scale = (amax.float() * (1 / LARGEST[dtype])).clamp(min=TINY)
    return round_up(scale) if power_of_two else scale


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def round_up(scale: Tensor) -> Tensor:
    """To the next power of two, by the bits: any mantissa carries into the exponent."""
    return ((scale.view(torch.int32) + MANTISSA) & EXPONENT).view(torch.float32)


def dequantize(x: Float8, dtype: torch.dtype = torch.float32, *, implementation: str | None = None) -> Tensor:
    """values · scale."""
    rows, columns = x.values.shape
    chosen = pick("dequantize", implementation, IMPLEMENTATIONS, x.values.device, rows=rows, columns=columns)
    if chosen == "triton":
        from .float8_triton import dequantize as launch

        return launch(x.values, x.scale, dtype)
    return (x.values.float() * (x.scale.unsqueeze(1) if x.scale.dim() else x.scale)).to(dtype)


# --- products -------------------------------------------------------------------------------------------


def linear(x: Float8, weight: Float8, dtype: torch.dtype, *, gradient: bool = False) -> Tensor:
    """x (m, k) · weight (n, k)ᵀ, with one scale each.

    Sums of a logit or a state are short enough for what Hopper keeps of them (use_fast_accum); those of gradients go
    over all tokens, or through all layers.
    """
    if not has_products(x.values.device):
        return F.linear(dequantize(x, dtype), dequantize(weight, dtype))
    return torch._scaled_mm(
        x.values, weight.values.t(), x.scale, weight.scale, out_dtype=dtype, use_fast_accum=not gradient
    )


def has_products(device: torch.device) -> bool:
    """Whether its tensor cores multiply numbers of 8 bits: from Ada on. Elsewhere they are widened first."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


has_products._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `choose.fastest`


def linear_of(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x ↦ x · weightᵀ in x's precision, as a product of e4m3 numbers; the weight (n, k) is quantized once.

    n and k divide by 16 where tensor cores do it: `_scaled_mm` takes no others.
    """
    if has_products(weight.device) and any(size % FP8_ALIGNED for size in weight.shape):
        raise SpecError(
            f"an fp8 matmul needs dimensions divisible by {FP8_ALIGNED}, and this weight has {weight.shape[0]} × "
            f"{weight.shape[1]}; leave it in bf16 (for the head: precision.fp8_head = false)"
        )
    small = quantize(weight)
    return lambda x: linear(quantize(x), small, x.dtype)
