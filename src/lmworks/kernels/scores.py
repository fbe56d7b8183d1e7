"""What changes attention scores and logits before a softmax, in plain torch: the references of the fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap): soft-capped scores or logits (Gemma 2); 0: no cap."""
    return torch.tanh(x / cap) * cap if cap else x
