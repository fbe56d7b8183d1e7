"""GPT-2's MLP and the residual add, x + down(gelu(up(y))), with everything but the GEMMs fused into their epilogues.

A compiler makes GELU a separate kernel: it reads one and writes one of the widest tensors of a block, and reads two and
writes one in the backward pass; the add is another kernel. Here the GEMM of `up` writes its result and the GELU of it,
the GEMM of `down` accumulates onto x, and the backward GEMM through `down` multiplies by GELU's derivative (`cublas`).
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
    x: Tensor,  # (…, hidden), the residual stream
    y: Tensor,  # (…, hidden), its norm
    up: Tensor,  # (ffn, hidden)
    up_bias: Tensor | None,
    down: Tensor,  # (hidden, ffn)
    down_bias: Tensor | None,
    implementation: str | None = None,
) -> Tensor:
    y, up, up_bias, down, down_bias = cublas.as_autocast(y, up, up_bias, down, down_bias)
    shape = {"hidden": up.shape[1], "ffn": up.shape[0]}
    forward_algorithm, backward_algorithm, add_algorithm = (
        cublas.pick_algorithm(op, implementation, y.device, **shape) for op in OPS
    )
    if (
        forward_algorithm is None
        or backward_algorithm is None
        or not cublas.supports((x, y), (up, down), (up_bias, down_bias))
    ):
        return x + F.linear(gelu(F.linear(y, up, up_bias)), down, down_bias)
    # The result is not a view: a pipeline frees what it has sent by detaching it in place.
    return AddGeluMLP.apply(
        x, y.flatten(0, -2), up, up_bias, down, down_bias, forward_algorithm, backward_algorithm, add_algorithm
    )


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
        forward_algorithm: int,
        backward_algorithm: int,
        add_algorithm: int | None,
    ) -> Tensor:
        inner, pre = cublas.linear_gelu(y, up, up_bias, forward_algorithm)
        ctx.save_for_backward(y, up, down, pre, inner)
        ctx.backward_algorithm = backward_algorithm
        if add_algorithm is None:
            return x + F.linear(inner, down, down_bias).view_as(x)
        return cublas.linear_add(inner, down, down_bias, x, add_algorithm)

    @staticmethod
    @once_differentiable  # pre and inner are treated as constants
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, up, down, pre, inner = ctx.saved_tensors
        _, wants_y, wants_up, wants_up_bias, wants_down, wants_down_bias, *_ = ctx.needs_input_grad
        flat = grad.flatten(0, -2)
        grad_pre = cublas.linear_dgelu(flat, down, pre, ctx.backward_algorithm)
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
