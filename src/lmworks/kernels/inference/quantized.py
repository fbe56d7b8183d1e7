"""Linear layers with quantized weights: int8 and int4 (weight-only), fp8 (weights and activations).

    int8  w ≈ q · scale[n]            q in −127…127, one fp32 scale per output channel
    int4  w ≈ q · scale[n, k // group]  q in −8…7, one bf16 scale for `group` inputs of a channel
    fp8   w ≈ q · scale[n],  x ≈ p · s[m]   q and p in e4m3; p and its scale are computed from each row of x

Every format is symmetric (no zero point). All scales belong to output channels, so that layers with the same input
merge by concatenation.

int4 packs eight weights into a 32-bit word: a pair of groups is split into eighths of group / 4 weights, and word i of
the pair holds weight i of every eighth, the first in the lowest bits. A program then reads `group` bytes of a row at
once and unpacks them to eight plain tiles; nothing is interleaved. K is a multiple of 2·group.

On a CPU the formulas are computed in fp32. On a GPU a few rows go to the kernels of `linear_triton` and
`quantized_triton`; with many rows (prefill) the weight is dequantized once per call and multiplied by cuBLAS, in fp8 by
torch._scaled_mm.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ...spec.precision import FP8_ALIGNED
from ..swiglu import swiglu_packed
from ..training import float8
from .linear import batch_invariant_linear

FP8, FP8_MAX = float8.E4M3, float8.FP8_MAX[float8.E4M3]
GROUPS = (128, 64, 32, 16)  # int4 group sizes (inputs that share a scale), largest first
TINY = float8.TINY
# Rows from which cuBLAS on a dequantized weight, and torch._scaled_mm on fp8, are as fast as the kernels, on an H200
# (benchmarks/results/quant_gpu.json).
DEQUANTIZE_MIN_ROWS, SCALED_MM_MIN_ROWS = 256, 128

# --- formats ------------------------------------------------------------------------------------------


def int8_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (out, in) → q (out, in) int8, scale (out) fp32, rounded to nearest."""
    wide = weight.float()
    scale = (wide.abs().amax(dim=1) / 127).clamp(min=TINY)
    return (wide / scale.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scale


def int4_group(inputs: int, wanted: int = GROUPS[0]) -> int | None:
    """The largest group size up to `wanted` that divides the inputs; None if there is none."""
    return next((group for group in GROUPS if group <= wanted and inputs % (2 * group) == 0), None)


def int4_scale(weight: Tensor, group: int) -> Tensor:
    """(out, in) → scales (out, in / group) in bf16 with which no weight is clipped."""
    amax = weight.float().unflatten(1, (-1, group)).abs().amax(dim=2)
    return (amax / 7).clamp(min=TINY).bfloat16()


def int4_round(weight: Tensor, scale: Tensor) -> Tensor:
    """The nearest q in −8…7: (out, in) int8."""
    group = weight.shape[1] // scale.shape[1]
    return (weight.float() / expand_scale(scale, group)).round().clamp(-8, 7).to(torch.int8)


def expand_scale(scale: Tensor, group: int) -> Tensor:
    """One fp32 scale for every weight: (out, in / group) → (out, in)."""
    return scale.float().repeat_interleave(group, dim=1)


def int4_pack(q: Tensor, group: int) -> Tensor:
    """q (out, in) in −8…7 → words (out, in / 8) int32."""
    eighths = (q + 8).to(torch.int32).unflatten(1, (-1, 8, group // 4)).unbind(dim=2)
    return functools.reduce(torch.bitwise_or, (n << 4 * t for t, n in enumerate(eighths))).flatten(1)


def int4_unpack(words: Tensor, group: int) -> Tensor:
    """words (out, in / 8) → q (out, in) int8."""
    pairs = words.unflatten(1, (-1, group // 4))
    return torch.stack([pairs >> 4 * t & 15 for t in range(8)], dim=2).flatten(1).to(torch.int8) - 8


def int4_group_of(words: Tensor, scale: Tensor) -> int:
    return 8 * words.shape[1] // scale.shape[1]


def fp8_quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(n, k) → e4m3 (n, k) and one fp32 scale per row, which maps its largest value to the largest of e4m3."""
    return float8.reference(rows, FP8, by_row=True)


def int8_dequantize(q: Tensor, scale: Tensor) -> Tensor:
    return q.float() * scale.unsqueeze(1)


def int4_dequantize(words: Tensor, scale: Tensor) -> Tensor:
    group = int4_group_of(words, scale)
    return int4_unpack(words, group).float() * expand_scale(scale, group)


def fp8_dequantize(q: Tensor, scale: Tensor) -> Tensor:
    return q.float() * scale.unsqueeze(1)


# --- products: x (…, in) → (…, out) in x's precision ----------------------------------------------------


def int8_reference(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x.float(), int8_dequantize(q, scale)).type_as(x)


def int4_reference(x: Tensor, words: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x.float(), int4_dequantize(words, scale)).type_as(x)


def fp8_reference(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    p, s = fp8_quantize(x.flatten(0, -2))
    return F.linear(fp8_dequantize(p, s), fp8_dequantize(q, scale)).type_as(x).view(*x.shape[:-1], -1)


def int8_linear(x: Tensor, q: Tensor, scale: Tensor, batch_invariant: bool = False, gate: bool = False) -> Tensor:
    """x · (q · scale)ᵀ: q (out, in) int8, scale (out).

    `batch_invariant`: no row depends on the number of rows. `gate`: silu(first half) · second half of the result.
    """
    if batch_invariant:  # int8 is exact in bf16; an unscaled sum may overflow fp16
        y = (batch_invariant_linear(x, q.to(x.dtype), fp32_out=True) * scale).type_as(x)
    elif plain(x):
        y = int8_reference(x, q, scale)
    else:
        from . import quantized_triton

        if rows_of(x) < DEQUANTIZE_MIN_ROWS and q.shape[1] % quantized_triton.INT8_PER_WORD == 0:
            return quantized_triton.int8_linear(x, q, scale, gate)
        y = F.linear(x, quantized_triton.int8_dequantize(q, scale, x.dtype))
    return swiglu_packed(y) if gate else y


def int4_linear(x: Tensor, words: Tensor, scale: Tensor, batch_invariant: bool = False, gate: bool = False) -> Tensor:
    """x · (q · scale)ᵀ: words (out, in / 8) int32, scale (out, in / group) bf16."""
    if batch_invariant:
        y = batch_invariant_linear(x, int4_dequantize(words, scale).to(x.dtype))
    elif plain(x):
        y = int4_reference(x, words, scale)
    else:
        from . import quantized_triton

        if rows_of(x) < DEQUANTIZE_MIN_ROWS and int4_group_of(words, scale) >= quantized_triton.INT4_MIN_GROUP:
            return quantized_triton.int4_linear(x, words, scale, gate)
        y = F.linear(x, quantized_triton.int4_dequantize(words, scale, x.dtype))
    return swiglu_packed(y) if gate else y


def fp8_linear(x: Tensor, q: Tensor, scale: Tensor, batch_invariant: bool = False, gate: bool = False) -> Tensor:
    """(p · s) · (q · scale)ᵀ with p, s the quantized rows of x: q (out, in) e4m3, scale (out)."""
    if batch_invariant:
        p, s = fp8_quantize(x.flatten(0, -2))
        y = batch_invariant_linear(p.to(x.dtype), q.to(x.dtype), fp32_out=True) * s.unsqueeze(1) * scale
        y = y.type_as(x).view(*x.shape[:-1], -1)
    elif plain(x):
        y = fp8_reference(x, q, scale)
    else:
        from ..training import float8_triton
        from . import linear_triton

        p, s = float8_triton.quantize_rows(x.flatten(0, -2), FP8)
        if rows_of(x) < SCALED_MM_MIN_ROWS or not scaled_mm_supports(x, q):
            return linear_triton.fp8_linear(p.view(x.shape), s, q, scale, x.dtype, gate)
        y = torch._scaled_mm(p, q.t(), s.unsqueeze(1), scale.unsqueeze(0), out_dtype=x.dtype)
        y = y.view(*x.shape[:-1], -1)
    return swiglu_packed(y) if gate else y


def scaled_mm_supports(x: Tensor, q: Tensor) -> bool:
    """Row-wise scales need results in bf16, and dimensions of whole 16 bytes."""
    return x.dtype == torch.bfloat16 and not any(size % FP8_ALIGNED for size in q.shape)


def plain(x: Tensor) -> bool:
    """Whether the reference is computed: on a CPU, and in fp32, which the kernels do not support."""
    return x.device.type == "cpu" or x.dtype == torch.float32


def rows_of(x: Tensor) -> int:
    return x.numel() // x.shape[-1]
