"""Linear layers of the engine, x · Wᵀ + b: x (…, in), W (out, in), b (out) → (…, out).

`decode_linear` is for the few rows of a decoding step. Such a product is a read of W: the kernels of `linear_triton`
stream W at memory bandwidth, where cuBLAS, made for square products, often does not.

`batch_invariant_linear` computes row i with the same bits alone and among any others. A library selects another kernel
for another number of rows, and with it another order of summation. Here the order is a function of the weight's shape
alone: K is split into parts of whole steps; each part is summed from zero, and the partial sums are added in order.
With few rows each part has a program, so that the GPU is full, and the last to finish adds the partial sums; with many
rows one program computes the parts of its tile one after the other. On a CPU every row is a product of its own. fp32 is
true fp32 (no TF32).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..swiglu import swiglu_packed

DECODE_MAX_ROWS = 16  # rows up to which streaming is faster than cuBLAS
TRANSPOSED_ROWS = range(8, 33)  # rows for which MKL is faster with the weight as the left operand


def decode_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if uses_transposed(x):
        y = (weight @ x.flatten(0, -2).t()).t().contiguous().view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)
    if not uses_streaming_kernel(x, weight):
        return F.linear(x, weight, bias)
    from .linear_triton import linear

    y = linear(x, weight)
    return y if bias is None else y + bias


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) · up of a product whose channels are gate and up: (…, out / 2)."""
    if bias is not None or not uses_streaming_kernel(x, weight):
        return swiglu_packed(decode_linear(x, weight, bias))
    from .linear_triton import linear

    return linear(x, weight, gate=True)


def uses_transposed(x: Tensor) -> bool:
    """Whether Wx is computed instead of xWᵀ."""
    rows = x.numel() // x.shape[-1]
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and rows in TRANSPOSED_ROWS
        and torch.backends.mkl.is_available()
    )


def uses_streaming_kernel(x: Tensor, weight: Tensor) -> bool:
    """Few rows, half precision, rows aligned to 16 bytes."""
    return (
        x.device.type == "cuda"
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and x.numel() <= DECODE_MAX_ROWS * x.shape[-1]
        and weight.is_contiguous()
        and x.shape[-1] % 128 == 0
    )


def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fp32_out: bool = False) -> Tensor:
    """All of one dtype; `fp32_out`: the result is not rounded from fp32."""
    rows = x.flatten(0, -2)
    if x.device.type == "cuda":
        from .linear_triton import launch_batch_invariant

        y = launch_batch_invariant(rows, weight, bias, fp32_out)
    elif not len(rows):
        y = rows.new_empty(0, weight.shape[0], dtype=torch.float32 if fp32_out else None)
    else:
        if fp32_out:
            rows, weight = rows.float(), weight.float()
        y = torch.cat([F.linear(row, weight, bias) for row in rows.split(1)])
    return y.view(*x.shape[:-1], weight.shape[0])
