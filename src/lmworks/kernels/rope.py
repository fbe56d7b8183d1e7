"""Rotary position embedding: queries and keys rotated by the angles that `model.rope` computes for positions.

A rotation is linear, and its transpose is the inverse rotation: the backward pass needs the tables and nothing else. In
PyTorch a rotation in bf16 writes several tensors in fp32; the kernel reads each head once and writes it once. It does
not work in place: that moves the same bytes, and the input is freed right after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import pick_unless_compiling

IMPLEMENTATIONS = ("torch", "triton")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+d/2}) of x (…, seq, heads, head_dim): (a, b) → (a·cos − b·sin, b·cos + a·sin), in
    fp32.

    cos and sin, (…, seq, 1, head_dim), hold (cos, cos) and (−sin, sin).
    """
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((second, first), dim=-1) * sin).type_as(x)


def rotate_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """`rotate` of queries (…, seq, heads, head_dim) and of keys (…, seq, kv_heads, head_dim)."""
    shape = {"tokens": q.shape[:-2].numel(), "heads": q.shape[-2], "kv_heads": k.shape[-2], "head_dim": q.shape[-1]}
    if pick_unless_compiling("rope", implementation, IMPLEMENTATIONS, q.device, **shape) == "triton":
        return RotaryFunction.apply(q, k, cos, sin)
    return rotate(q, cos, sin), rotate(k, cos, sin)


class RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from .rope_triton import launch

        ctx.save_for_backward(cos, sin)
        return launch(q, k, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from .rope_triton import launch

        cos, sin = ctx.saved_tensors
        return *launch(grad_q, grad_k, cos, sin, inverse=True), None, None
