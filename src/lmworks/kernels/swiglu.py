"""SwiGLU's product, silu(gate) · up.

Autograd would save gate, silu(gate) and up. Here silu(gate) is recomputed in the backward pass, with
s = 1/(1 + exp(−gate)) and g the gradient of the product:

    ∂loss/∂up = g · gate·s        ∂loss/∂gate = g · up · s · (1 + gate·(1 − s))
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import pick_unless_compiling

IMPLEMENTATIONS = ("torch", "triton")


def swiglu(gate: Tensor, up: Tensor, implementation: str | None = None) -> Tensor:
    """silu(gate) · up of two tensors (…, ffn)."""
    shape = {"tokens": gate.shape[:-1].numel(), "ffn": gate.shape[-1]}
    if pick_unless_compiling("swiglu", implementation, IMPLEMENTATIONS, gate.device, **shape) == "triton":
        return SwiGLU.apply(gate, up)
    return reference(gate, up)


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """As `swiglu`, of a projection that has both concatenated, as in the engine: (…, 2·ffn) → (…, ffn)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return swiglu(gate, up, "triton" if gate_up.device.type == "cuda" else "torch")


def reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from .swiglu_triton import forward

        ctx.save_for_backward(gate, up)
        return forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from .swiglu_triton import backward

        return backward(grad, *ctx.saved_tensors)
