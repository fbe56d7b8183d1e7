"""What changes attention scores and logits before a softmax, in plain torch: the references of the fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap): soft-capped scores or logits (Gemma 2); 0: no cap."""
    return torch.tanh(x / cap) * cap if cap else x


def sink_softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys and one more score, which takes its share and is dropped (attention sinks of gpt-oss).

    `sinks` has one dimension for each of scores, the last of size 1.
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
