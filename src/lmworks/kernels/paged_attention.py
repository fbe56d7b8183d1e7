"""Attention over a KV cache that lies in pages.

The cache of a layer is a pool of blocks of `size` tokens; a sequence's keys are the blocks that its row of `tables`
names, in order, cut at its length. Queries of all sequences lie one after another, (tokens, heads, head_dim), and those
of a sequence are its last positions: one while it answers, many while its prompt is read.

    outᵢ = Σ softmax(qᵢ·kⱼ/√d − slope·(pᵢ − j)) · vⱼ   over keys j with pᵢ − window < j ≤ pᵢ

with pᵢ = length − queries + i, the position of query i of its sequence.

A quantised cache holds integers or 8-bit floats and one scale for each token and head: k = stored · scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SHORT = 256  # queries; a launch for prompts that may be longer is cut up otherwise
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # number that a quantised cache holds


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, in blocks."""

    keys: Tensor  # (blocks, kv_heads, size, head_dim), in the model's precision, int8 or float8_e4m3fn
    values: Tensor  # the same
    key_scales: Tensor | None = None  # (blocks, kv_heads, size) fp32, where the cache is quantised
    value_scales: Tensor | None = None  # the same

    @property
    def size(self) -> int:
        """Tokens in a block."""
        return self.keys.shape[2]


@dataclass(frozen=True)
class Pages:
    """Where the keys of each sequence lie, and which queries are its own."""

    tables: Tensor  # (seqs, max_blocks) int32: its blocks in order; what lies beyond its length is never read
    lengths: (
        Tensor  # (seqs) int32: its keys, those of this batch included; 0: a place that nobody took, its result is 0
    )
    starts: Tensor  # (seqs + 1) int32: where its queries begin among all queries
    longest_query: int  # the most queries that a sequence has; 1: all of them are decoding


def paged_attention(
    q: Tensor,  # (tokens, heads, head_dim)
    cache: LayerCache,
    pages: Pages,
    *,
    window: int = 0,  # keys that a query sees, itself included; 0: all before it
    slopes: Tensor | None = None,  # (heads) fp32: ALiBi's
    invariant: bool = False,  # the result of a query depends, bit for bit, on its own sequence alone
) -> Tensor:
    """(tokens, heads, head_dim). Queries of no sequence get 0; where all are decoding, every query is of one."""
    if q.device.type == "cuda":
        from .paged_attention_triton import launch

        return launch(q, cache, pages, window=window, slopes=slopes, invariant=invariant)
    return reference(q, cache, pages, window=window, slopes=slopes, invariant=invariant)


def reference(
    q: Tensor,
    cache: LayerCache,
    pages: Pages,
    *,
    window: int = 0,
    slopes: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """Sequence by sequence, every score in memory; `invariant` takes the queries one at a time as well.

    The order in which a matrix product adds up may depend on how many rows it has, so a query that is computed alone
    is the same in every batch and however its prompt was cut.
    """
    out = torch.zeros_like(q)
    starts, lengths = pages.starts.tolist(), pages.lengths.tolist()
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if not length or begin == end:
            continue
        k = gather(cache.keys, cache.key_scales, pages.tables[row], length, q.dtype)
        v = gather(cache.values, cache.value_scales, pages.tables[row], length, q.dtype)
        step = 1 if invariant else end - begin
        for first in range(begin, end, step):
            last = first + step
            seen = length - (end - last)  # keys up to the last of these queries
            out[first:last] = attend(q[first:last], k[:, :seen], v[:, :seen], window, slopes)
    return out


def gather(pool: Tensor, scales: Tensor | None, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The keys or values of one sequence, side by side: (kv_heads, length, head_dim)."""
    blocks = table[: math.ceil(length / pool.shape[2])].long()
    x = pool[blocks].to(dtype) if scales is None else (pool[blocks].float() * scales[blocks].unsqueeze(-1)).to(dtype)
    return x.transpose(0, 1).flatten(1, 2)[:, :length]


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, slopes: Tensor | None) -> Tensor:
    """q (queries, heads, head_dim) are the last positions of k, v (kv_heads, keys, head_dim); the result is as q."""
    queries, heads, head_dim = q.shape
    kv_heads, keys, _ = k.shape
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, head_dim)  # the heads that share a key lie together
    scores = (grouped @ k.transpose(1, 2)).float().view(heads, queries, keys) / math.sqrt(head_dim)
    distance = torch.arange(keys - queries, keys, device=q.device).unsqueeze(1) - torch.arange(keys, device=q.device)
    if slopes is not None:
        scores = scores - slopes.view(-1, 1, 1) * distance
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    p = scores.masked_fill(hidden, -math.inf).softmax(dim=-1).type_as(v)
    return (p.view(kv_heads, -1, keys) @ v).view(heads, queries, head_dim).transpose(0, 1)
