"""Attention over a paged cache of latent vectors (multi-head latent attention, absorbed form).

The cache holds one vector per token: `rank` latent numbers, which are the value of every head, and a rotary key. A
query has the same width: its part without positions was projected into the latent space.

    outᵢ = Σ softmax(qᵢ·cⱼ·scale) · cⱼ[:rank]   over keys j with pᵢ − window < j ≤ pᵢ

On a GPU it is one kernel; `reference` is in PyTorch operations, one sequence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .paged_attention import AttentionMetadata, LayerCache, gather_blocks

MAX_SCORES = 2**25  # in memory at once, in fp32


def paged_latent_attention(
    q: Tensor,  # (tokens, heads, rank + rope)
    cache: LayerCache,  # one head
    metadata: AttentionMetadata,
    *,
    rank: int,
    scale: float,
    window: int = 0,  # sliding window: keys that a query sees, itself included; 0: all
    invariant: bool = False,  # batch-invariant: one query at a time
) -> Tensor:
    """(tokens, heads, rank). Padding queries get 0; if all are decoding, there are none."""
    kernel: Callable[..., Tensor] = reference
    if q.device.type == "cuda":
        from .latent_attention_triton import launch

        kernel = launch
    return kernel(q, cache, metadata, rank=rank, scale=scale, window=window, invariant=invariant)


def reference(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    rank: int,
    scale: float,
    window: int = 0,
    invariant: bool = False,
) -> Tensor:
    out = q.new_zeros(*q.shape[:-1], rank)
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if not length or begin == end:
            continue
        table = metadata.block_tables[row : row + 1, : math.ceil(length / cache.size)]
        latents = gather_blocks(cache.keys, cache.key_scales, table, q.dtype)[0, 0, :length]
        step = 1 if invariant else max(1, MAX_SCORES // (q.shape[1] * length))
        for first in range(begin, end, step):
            last = min(first + step, end)
            seen = length - (end - last)  # keys up to the last of these queries
            out[first:last] = attend(q[first:last], latents[:seen], rank, scale, window)
    return out


def attend(q: Tensor, latents: Tensor, rank: int, scale: float, window: int) -> Tensor:
    """q (queries, heads, width) are the last positions of latents (keys, width)."""
    queries, keys = len(q), len(latents)
    scores = (q.float() @ latents.T.float()) * scale  # (queries, heads, keys)
    places = torch.arange(keys, device=q.device)
    distance = places[keys - queries :].unsqueeze(1) - places
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    p = scores.masked_fill(hidden.unsqueeze(1), -math.inf).softmax(dim=-1)
    return p.type_as(latents) @ latents[:, :rank]
