"""x + linear(y), where the product begins with x: attention's last layer and the sum after it.

A compiler leaves the sum to the kernel that follows, a norm, which then reads both terms and writes their sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cublas

OP = "linear_sum"


def add_linear(
    x: Tensor,  # (…, out), what is added to
    y: Tensor,  # (…, in)
    weight: Tensor,  # (out, in)
    bias: Tensor | None,
    implementation: str | None = None,
) -> Tensor:
    y, weight, bias = cublas.as_autocast(y, weight, bias)
    shape = {"hidden": weight.shape[0], "inner": weight.shape[1]}
    way = cublas.way_of(OP, implementation, y.device, **shape)
    if way is None or not cublas.takes((x, y), (weight,), (bias,)):
        return x + F.linear(y, weight, bias)
    return AddLinear.apply(x, y.flatten(0, -2), weight, bias, way)


class AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, way: int) -> Tensor:
        ctx.save_for_backward(y, weight)
        return cublas.linear_add(y, weight, bias, x, way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        _, wants_y, wants_weight, wants_bias, _ = ctx.needs_input_grad
        flat = grad.flatten(0, -2)
        return (
            grad,
            flat @ weight if wants_y else None,
            flat.t() @ y if wants_weight else None,
            flat.sum(0) if wants_bias else None,
            None,
        )
