"""x · Wᵀ for a few rows of x: what a decoding step does, and what takes its time.

With few rows a product is a read of W: the kernels of `linear_triton` stream it past a handful of rows at the pace of
memory, where cuBLAS, made for square products, often does not. More than FEW rows, other precisions and other devices
go to torch as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..swiglu import swiglu_packed

FEW = 16  # rows up to which streaming is faster than cuBLAS
TRANSPOSED_ROWS = range(8, 33)  # rows for which MKL is faster if the weight stands on the left


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `reference`: x (…, in), weight (out, in), bias (out) → (…, out)."""
    if uses_transposed(x):
        y = (weight @ x.flatten(0, -2).t()).t().contiguous().view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)
    if not uses_streaming_kernel(x, weight):
        return F.linear(x, weight, bias)
    from .decode_linear_triton import linear

    y = linear(x, weight)
    return y if bias is None else y + bias


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) · up, of a product that gives both side by side: (…, out / 2)."""
    if bias is not None or not uses_streaming_kernel(x, weight):
        return swiglu_packed(small_linear(x, weight, bias))
    from .decode_linear_triton import linear

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
    """Whether the streaming kernel takes it: few rows, half precision, whole rows of 16 bytes."""
    return (
        x.device.type == "cuda"
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and x.numel() <= FEW * x.shape[-1]
        and weight.is_contiguous()
        and x.shape[-1] % 128 == 0
    )
