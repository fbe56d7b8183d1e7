"""RMSNorm: x · r · weight with r = 1/√(mean(x²) + ε), that keeps only x and r for the backward pass.

CUDA has a fused kernel for it. On a CPU PyTorch composes it of small operations and saves x·r as well: twice the
memory and twice the time of the formula below, with n = x·r and g = ∂loss/∂y:

    ∂loss/∂weight = Σ over tokens of g·n        ∂loss/∂x = r · (g·weight − n · mean(g·weight·n))

Every implementation computes in fp32 and rounds once, to the precision of x; the weight may have another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import pick_unless_compiling

IMPLEMENTATIONS = ("torch", "triton")
NATIVE = "native"  # in C++ and CUDA: only for who asks for it, as it has to be built


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).type_as(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float, implementation: str | None = None) -> Tensor:
    """As `reference`, over the last dimension of x; the result has the precision of x."""
    if implementation == NATIVE:
        from . import native

        return native.rms_norm(x, weight, eps)
    shape = {"tokens": x.shape[:-1].numel(), "hidden": x.shape[-1]}
    if pick_unless_compiling("rms_norm", implementation, IMPLEMENTATIONS, x.device, **shape) == "triton":
        return TritonRMSNorm.apply(x, weight, eps)
    if x.device.type == "cpu":
        return RMSNorm.apply(x, weight, eps)
    # Under autocast heads come in bf16 beside fp32 weights; the fused kernel wants one precision.
    return F.rms_norm(x, weight.shape, weight.type_as(x), eps).type_as(x)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        r = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight).type_as(x)

    @staticmethod
    @once_differentiable  # r is a constant to whoever would differentiate it again
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
