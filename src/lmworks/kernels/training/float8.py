"""8-bit floats: x ≈ values · scale, with one scale for a tensor (tensor-wise) or for each row (row-wise).

    e4m3   3 bits of mantissa, up to 448: weights and activations
    e5m2   2 bits, up to 57,344: gradients, which have a wider range

The largest value of a tensor (or row) becomes the largest of the format; nothing overflows to infinity: what a rounded
scale leaves outside is clamped. A scale that is a power of two costs up to one binary exponent of range and makes
quantization exact but for the mantissa: representable numbers keep their value.

A product on tensor cores needs both operands contiguous in the summed dimension: x (m, k) and (n, k), which is the
layout of a weight. Gradients need the transposed layout, hence `transposed`.
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
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
TINY = 1e-12  # smallest scale: that of a tensor of zeros
IMPLEMENTATIONS = ("torch", "triton")
MANTISSA, EXPONENT = 2**23 - 1, 0xFF << 23  # bits of an fp32 number


class Float8(NamedTuple):
    values: Tensor  # (rows, columns), or (columns, rows) if transposed
    scale: Tensor  # fp32: (), or (rows) if row-wise


def quantize(
    x: Tensor,
    dtype: torch.dtype = E4M3,
    *,
    by_row: bool = False,
    power_of_two: bool = False,
    transposed: bool = False,
    implementation: str | None = None,
) -> Float8:
    """x (rows, columns) in 8 bits. `transposed` needs one scale for the tensor."""
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
    return Float8((values.t() if transposed else values).contiguous(), scale)  # contiguous rows, as products need them


def scale_of(amax: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    # By the inverse: GPUs divide by a constant so, CPUs do not, and their scales would differ by a bit.
    scale = (amax.float() * (1 / FP8_MAX[dtype])).clamp(min=TINY)
    return round_up_to_power_of_two(scale) if power_of_two else scale


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """To the next power of two: any mantissa carries into the exponent."""
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

    Sums of the forward pass are short enough for Hopper's fast accumulation (use_fast_accum); those of gradients are
    over all tokens, or through all layers.
    """
    if not has_fp8_matmul(x.values.device):
        return F.linear(dequantize(x, dtype), dequantize(weight, dtype))
    return torch._scaled_mm(
        x.values, weight.values.t(), x.scale, weight.scale, out_dtype=dtype, use_fast_accum=not gradient
    )


def has_fp8_matmul(device: torch.device) -> bool:
    """Whether tensor cores multiply 8-bit floats: from Ada on. Elsewhere operands are dequantized first."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


has_fp8_matmul._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `dispatch.fastest`


def fp8_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x ↦ x · weightᵀ in the dtype of x, as a product of e4m3 operands; the weight (n, k) is quantized once.

    n and k must be multiples of 16 for `_scaled_mm`.
    """
    if has_fp8_matmul(weight.device) and any(size % FP8_ALIGNED for size in weight.shape):
        raise SpecError(
            f"an fp8 matmul needs dimensions divisible by {FP8_ALIGNED}, and this weight has {weight.shape[0]} × "
            f"{weight.shape[1]}; leave it in bf16 (for the head: precision.fp8_head = false)"
        )
    small = quantize(weight)
    return lambda x: linear(quantize(x), small, x.dtype)
