"""RMSNorm: x · r · weight with r = 1/√(mean(x²) + ε). Only x and r are saved for the backward pass.

CUDA has a fused kernel. On a CPU PyTorch composes it of small operations and saves x·r as well: twice the memory and
twice the time of the formula below, with n = x·r and g = ∂loss/∂y:

    ∂loss/∂weight = Σ over tokens of g·n        ∂loss/∂x = r · (g·weight − n · mean(g·weight·n))

Every implementation computes in fp32 and rounds once, to the dtype of x; the weight may have another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..spec import SpecError
from .dispatch import pick_unless_compiling

IMPLEMENTATIONS = ("torch", "triton")
NATIVE = "native"  # C++ and CUDA, built on first use: never chosen by default


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).type_as(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float, implementation: str | None = None) -> Tensor:
    """As `reference`, over the last dimension of x; the result has the dtype of x."""
    if implementation == NATIVE:
        from . import native

        return native.rms_norm(x, weight, eps)
    shape = {"tokens": x.shape[:-1].numel(), "hidden": x.shape[-1]}
    if pick_unless_compiling("rms_norm", implementation, IMPLEMENTATIONS, x.device, **shape) == "triton":
        return TritonRMSNorm.apply(x, weight, eps)
    if x.device.type == "cpu":
        return RMSNorm.apply(x, weight, eps)
    # Under autocast heads are bf16 and weights fp32; the fused kernel takes one dtype.
    return F.rms_norm(x, weight.shape, weight.type_as(x), eps).type_as(x)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        r = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight).type_as(x)

    @staticmethod
    @once_differentiable  # r is treated as a constant
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        grad = grad.float()
        normed = x.float() * r
        product = grad * normed
        grad_weight = product.sum(dim=tuple(range(x.dim() - 1)))
        mean = product.mul_(weight).mean(dim=-1, keepdim=True)
        grad_x = torch.addcmul(grad * weight, normed, mean, value=-1).mul_(r)
        return grad_x.type_as(x), grad_weight.type_as(weight), None


class TritonRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from .rms_norm_triton import forward

        _, normed, r = forward(x, None, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from .rms_norm_triton import backward

        x, weight, r = ctx.saved_tensors
        return *backward(grad, x, weight, r), None


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, implementation: str = "torch"
) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMSNorm), in the dtype of x + delta. The kernel does both in one pass. Without backward pass."""
    if implementation not in IMPLEMENTATIONS:
        raise SpecError(f"add_rms_norm has no implementation {implementation!r}: {' or '.join(IMPLEMENTATIONS)}")
    if implementation == "triton":
        from .rms_norm_triton import forward

        total, normed, _ = forward(x, delta, weight, eps)
        return total, normed
    total = x + delta
    return total, rms_norm(total, weight, eps)
