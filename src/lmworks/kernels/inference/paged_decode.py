"""Decoding over pages on a CPU: one query of every sequence, computed together.

`paged_attention.reference` takes sequences one by one, which at one query each is mostly overhead. Here sequences of
like length are gathered side by side, padded to the longest, and attended in one product.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from ..scores import sink_softmax, soft_cap
from .paged_attention import AttentionMetadata, LayerCache, gathered

GROUP_ELEMENTS = 2**20  # elements of keys that are gathered at once


class GatherBuffers(threading.local):
    """Memory that keys and values are gathered in, layer after layer: new memory comes page by page, each cleared."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, count: int, dtype: torch.dtype) -> Tensor | None:
        if count > GROUP_ELEMENTS:  # a lone long sequence, whose memory is not kept
            return None
        if (name, dtype) not in self.buffers:
            self.buffers[name, dtype] = torch.empty(GROUP_ELEMENTS, dtype=dtype)
        return self.buffers[name, dtype][:count]


gather_buffers = GatherBuffers()


def paged_decode(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    window: int = 0,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `paged_attention.reference` where every sequence has one query: q (seqs, heads, head_dim)."""
    out = torch.zeros_like(q)
    lengths, order = metadata.seq_lens.sort()
    counts = lengths.tolist()
    per_block = cache.keys[0].numel()
    end = len(counts)
    while end and counts[end - 1]:
        blocks = math.ceil(counts[end - 1] / cache.size)
        most = max(1, GROUP_ELEMENTS // (per_block * blocks))
        begin = max(end - most, 0)
        while not counts[begin]:  # nobody's places stay 0
            begin += 1
        group = order[begin:end]
        out[group] = attend_group(
            q[group], cache, metadata.block_tables[group, :blocks], lengths[begin:end], window, slopes, softcap, sinks
        )
        end = begin
    return out


def attend_group(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    lengths: Tensor,
    window: int,
    slopes: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """A few sequences of like length: q (seqs, heads, head_dim), tables (seqs, blocks)."""
    seqs, heads, head_dim = q.shape
    kv_heads, keys = cache.keys.shape[1], tables.shape[1] * cache.size
    distance = lengths.unsqueeze(1) - 1 - torch.arange(keys)  # (seqs, keys); below 0 lies what is not valid
    valid = distance >= 0
    # Blocks beyond a sequence's own, and places in its last, may hold anything, even what is not finite.
    tables = torch.where(valid[:, :: cache.size], tables, 0)
    count = seqs * kv_heads * keys * head_dim
    k, v = (  # (seqs, kv_heads, keys, head_dim)
        gathered(pool, scales, tables, q.dtype, gather_buffers.get(name, count, pool.dtype))
        for name, pool, scales in (("k", cache.keys, cache.key_scales), ("v", cache.values, cache.value_scales))
    )
    v.transpose(1, 2)[(~valid).nonzero(as_tuple=True)] = 0  # a mask would have all of v read
    scores = (q.view(seqs, kv_heads, -1, head_dim) @ k.transpose(2, 3)).float().view(seqs, heads, keys)
    scores = soft_cap(scores / math.sqrt(head_dim), softcap)
    if slopes is not None:
        scores = scores - slopes.view(-1, 1) * distance.unsqueeze(1)
    seen = valid & (distance < window) if window else valid
    scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf)
    p = sink_softmax(scores, None if sinks is None else sinks.view(1, -1, 1)).type_as(v)
    return (p.reshape(seqs, kv_heads, -1, keys) @ v).view(seqs, heads, head_dim)
