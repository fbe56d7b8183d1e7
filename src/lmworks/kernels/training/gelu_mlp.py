"""GPT-2's MLP and the sum after it, x + down(gelu(up(y))), with all that is no product at the end of one.

A compiler gives GELU a kernel of its own: of the widest tensors of a block it reads one and writes one, and in the
backward pass reads two and writes one; the sum is another. Here up's product writes both what it is and its GELU,
down's begins with x, and the product that carries the gradient back through down multiplies it with GELU's slope
before it is written (`cublas`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import cublas
from .gelu import gelu

OPS = ("linear_gelu", "linear_dgelu", "linear_add")


def add_gelu_mlp(
    x: Tensor,  # (…, hidden), what is added to
    y: Tensor,  # (…, hidden), its norm
    up: Tensor,  # (ffn, hidden)
    up_bias: Tensor | None,
    down: Tensor,  # (hidden, ffn)
    down_bias: Tensor | None,
    implementation: str | None = None,
) -> Tensor:
    y, up, up_bias, down, down_bias = cublas.as_autocast(y, up, up_bias, down, down_bias)
    shape = {"hidden": up.shape[1], "ffn": up.shape[0]}
    there, back, adding = (cublas.way_of(op, implementation, y.device, **shape) for op in OPS)
    if there is None or back is None or not cublas.takes((x, y), (up, down), (up_bias, down_bias)):
        return x + F.linear(gelu(F.linear(y, up, up_bias)), down, down_bias)
    # The result is no view: a pipeline lets go of what it has sent by detaching it in place.
    return AddGeluMLP.apply(x, y.flatten(0, -2), up, up_bias, down, down_bias, there, back, adding)


class AddGeluMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        there: int,
        back: int,
        adding: int | None,
    ) -> Tensor:
        inner, pre = cublas.linear_gelu(y, up, up_bias, there)
        ctx.save_for_backward(y, up, down, pre, inner)
        ctx.back = back
        if adding is None:
            return x + F.linear(inner, down, down_bias).view_as(x)
        return cublas.linear_add(inner, down, down_bias, x, adding)

    @staticmethod
    @once_differentiable  # pre and inner are constants to whoever would differentiate it again
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, up, down, pre, inner = ctx.saved_tensors
        _, wants_y, wants_up, wants_up_bias, wants_down, wants_down_bias, *_ = ctx.needs_input_grad
        flat = grad.flatten(0, -2)
        grad_pre = cublas.linear_dgelu(flat, down, pre, ctx.back)
        return (
            grad,
            grad_pre @ up if wants_y else None,
            grad_pre.t() @ y if wants_up else None,
            grad_pre.sum(0) if wants_up_bias else None,
            flat.t() @ inner if wants_down else None,
            flat.sum(0) if wants_down_bias else None,
            None,
            None,
            None,
        )
