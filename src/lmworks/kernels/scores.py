"""Soft-capping and attention sinks in plain torch: the references of the fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap): soft-capped scores or logits (Gemma 2); 0: no cap."""
    return torch.tanh(x / cap) * cap if cap else x


def sink_softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys and one more score that is dropped afterwards (attention sinks of gpt-oss).

    `sinks` broadcasts to scores, with a last dimension of size 1.
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
