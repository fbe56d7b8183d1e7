"""Tokens in the order of their experts, and back: the two permutations of a mixture of experts.

    permute      rows[i] = x[order[i] // top_k]
    unpermute    out[t]  = Σ over choices k of weights[t, k] · rows[back[t · top_k + k]]

`order` permutes the (token, choice) pairs and `back` is its inverse, so both are gathers, forward and backward: nothing
is added up in memory, and a GPU repeats them bitwise.

PyTorch unpermutes in five passes over the largest tensor of the layer: rows in their new order, their weighted copies,
the sum. One kernel reads rows once; its backward pass reads them once and writes their gradient, and
∂loss/∂weights[t, k] is the product of the gradient of a token with that row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch import pick_unless_compiling

OP, IMPLEMENTATIONS = "unpermute", ("torch", "triton")


def permute(x: Tensor, order: Tensor, back: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """x (tokens, hidden) → (tokens · top_k, hidden) in `dtype`."""
    return Permute.apply(x, order, back, top_k, dtype)


def unpermute(
    rows: Tensor, weights: Tensor | None, order: Tensor, back: Tensor, top_k: int, implementation: str | None = None
) -> Tensor:
    """rows (tokens · top_k, hidden), weights (tokens, top_k) or ones → (tokens, hidden) in the common dtype of both."""
    shape = {"tokens": len(back) // top_k, "top_k": top_k, "hidden": rows.shape[1]}
    if pick_unless_compiling(OP, implementation, IMPLEMENTATIONS, rows.device, **shape) == "triton":
        return TritonUnpermute.apply(rows, weights, back, top_k)
    choices = Permute.apply(rows, back, order, 1, rows.dtype).unflatten(0, (-1, top_k))
    return (choices if weights is None else choices * weights.unsqueeze(-1)).sum(dim=1)


class Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.top_k, ctx.dtype = top_k, x.dtype
        return x.to(dtype)[order // top_k if top_k > 1 else order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, back = ctx.saved_tensors
        if ctx.top_k > 1:
            return unpermute(grad, None, order, back, ctx.top_k).to(ctx.dtype), None, None, None, None
        return grad[back].to(ctx.dtype), None, None, None, None


class TritonUnpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, back: Tensor, top_k: int) -> Tensor:
        from .permute_triton import forward

        ctx.save_for_backward(back, *(() if weights is None else (rows, weights)))
        ctx.top_k, ctx.shape, ctx.dtype = top_k, rows.shape, rows.dtype
        return forward(rows, weights, back, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from .permute_triton import backward

        back, *others = ctx.saved_tensors
        rows, weights = others or (None, None)
        grad_rows = torch.empty(ctx.shape, dtype=ctx.dtype, device=grad.device)
        grad_weights = None if weights is None else torch.empty_like(weights)
        backward(grad.contiguous(), rows, weights, back, ctx.top_k, grad_rows, grad_weights)
        return grad_rows, grad_weights, None, None
