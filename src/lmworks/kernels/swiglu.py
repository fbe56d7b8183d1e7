"""SwiGLU's product, silu(gate) · up, of a projection that gives both side by side."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """(tokens, 2·ffn) → (tokens, ffn): silu(first half) · second half."""
    if gate_up.device.type == "cuda":
        from .swiglu_triton import launch

        return launch(gate_up)
    return reference(gate_up)


def reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
