"""Decoding over pages on a CPU: one query of every sequence, computed together.

`paged_attention.reference` takes sequences one by one, which at one query each is mostly overhead. Here sequences of
like length are gathered side by side, padded to the longest, and attended in one product.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from .paged_attention import LayerCache, Pages, gathered

TOGETHER = 2**20  # elements of keys that are gathered at once


class Rooms(threading.local):
    """Memory that keys and values are gathered in, layer after layer: new memory comes page by page, each cleared."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, torch.dtype], Tensor] = {}

    def of(self, name: str, count: int, dtype: torch.dtype) -> Tensor | None:
        if count > TOGETHER:  # a lone long sequence, whose memory is not kept
            return None
        if (name, dtype) not in self.made:
            self.made[name, dtype] = torch.empty(TOGETHER, dtype=dtype)
        return self.made[name, dtype][:count]


rooms = Rooms()


def decode(q: Tensor, cache: LayerCache, pages: Pages, window: int = 0, slopes: Tensor | None = None) -> Tensor:
    """As `paged_attention.reference` where every sequence has one query: q (seqs, heads, head_dim)."""
    out = torch.zeros_like(q)
    lengths, order = pages.lengths.sort()
    counts = lengths.tolist()
    per_block = cache.keys[0].numel()
    end = len(counts)
    while end and counts[end - 1]:
        blocks = math.ceil(counts[end - 1] / cache.size)
        most = max(1, TOGETHER // (per_block * blocks))
        begin = max(end - most, 0)
        while not counts[begin]:  # nobody's places stay 0
            begin += 1
        some = order[begin:end]
        out[some] = together(q[some], cache, pages.tables[some, :blocks], lengths[begin:end], window, slopes)
        end = begin
    return out


def together(
    q: Tensor, cache: LayerCache, tables: Tensor, lengths: Tensor, window: int, slopes: Tensor | None
) -> Tensor:
    """A few sequences of like length: q (seqs, heads, head_dim), tables (seqs, blocks)."""
    seqs, heads, head_dim = q.shape
    kv_heads, keys = cache.keys.shape[1], tables.shape[1] * cache.size
    distance = lengths.unsqueeze(1) - 1 - torch.arange(keys)  # (seqs, keys); below 0 lies what is not theirs
    theirs = distance >= 0
    # Blocks beyond a sequence's own, and places in its last, may hold anything, even what is not finite.
    tables = torch.where(theirs[:, :: cache.size], tables, 0)
    count = seqs * kv_heads * keys * head_dim
    k, v = (  # (seqs, kv_heads, keys, head_dim)
        gathered(pool, scales, tables, q.dtype, rooms.of(name, count, pool.dtype))
        for name, pool, scales in (("k", cache.keys, cache.key_scales), ("v", cache.values, cache.value_scales))
    )
    v.transpose(1, 2)[(~theirs).nonzero(as_tuple=True)] = 0  # a mask would have all of v read
    scores = (q.view(seqs, kv_heads, -1, head_dim) @ k.transpose(2, 3)).float().view(seqs, heads, keys)
    scores = scores / math.sqrt(head_dim)
    if slopes is not None:
        scores = scores - slopes.view(-1, 1) * distance.unsqueeze(1)
    seen = theirs & (distance < window) if window else theirs
    p = scores.masked_fill(~seen.unsqueeze(1), -math.inf).softmax(dim=-1).type_as(v)
    return (p.view(seqs, kv_heads, -1, keys) @ v).view(seqs, heads, head_dim)
