"""What stands between two parts of a block: add to the residual stream, then normalise it for the next part.

In one pass the sum is written and normalised while it is in registers. The backward pass gets two gradients, that of
the stream and that of its norm, and adds them where it has both: another pass over the stream saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import rms_norm
from ..dispatch import pick_alone

IMPLEMENTATIONS = ("torch", "triton")


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMSNorm), both in the precision that x + delta has in PyTorch."""
    if chosen(x, implementation) == "triton":
        return AddRMSNorm.apply(x, delta, weight, eps)
    return reference(x, delta, weight, eps)


def chosen(x: Tensor, implementation: str | None = None) -> str:
    """The implementation that a stream of this shape goes to."""
    shape = {"tokens": x.shape[:-1].numel(), "hidden": x.shape[-1]}
    return pick_alone("add_rms_norm", implementation, IMPLEMENTATIONS, x.device, **shape)


def reference(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, rms_norm.rms_norm(total, weight, eps)


class AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from ..rms_norm_triton import forward

        total, normed, r = forward(x, delta, weight, eps)
        ctx.save_for_backward(total, weight, r)
        ctx.dtypes = x.dtype, delta.dtype
        ctx.set_materialize_grads(False)  # a stream that goes no further has no gradient to add
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        from ..rms_norm_triton import backward

        total, weight, r = ctx.saved_tensors
        if grad is not None:
            return *backward(grad, grad_total, total, weight, r, ctx.dtypes), None
        if grad_total is None:
            return None, None, None, None
        return grad_total.to(ctx.dtypes[0]), grad_total.to(ctx.dtypes[1]), None, None
