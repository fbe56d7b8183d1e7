"""Attention over a KV cache that lies in metadata.

The cache of a layer is a pool of blocks of `size` tokens; a sequence's keys are the blocks that its row of `tables`
names, in order, cut at its length. Queries of all sequences lie one after another, (tokens, heads, head_dim), and those
of a sequence are its last positions: one while it answers, many while its prompt is read.

    outᵢ = Σ softmax(cap(qᵢ·kⱼ/√d) − slope·(pᵢ − j)) · vⱼ   over keys j with pᵢ − window < j ≤ pᵢ

with pᵢ = length − queries + i, the position of query i of its sequence, and cap(s) = softcap·tanh(s/softcap) where
scores are soft-capped. A sink is one more score of each head in the denominator.

A quantised cache holds integers or 8-bit floats and one scale for each token and head: k = stored · scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..scores import sink_softmax, soft_cap

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
class AttentionMetadata:
    """Where the keys of each sequence lie, and which queries are its own."""

    block_tables: Tensor  # (seqs, max_blocks) int32: its blocks in order; what lies beyond its length is never read
    seq_lens: (
        Tensor  # (seqs) int32: its keys, those of this batch included; 0: a place that nobody took, its result is 0
    )
    query_start_loc: Tensor  # (seqs + 1) int32: where its queries begin among all queries
    max_query_len: int  # the most queries that a sequence has; 1: all of them are decoding


def paged_attention(
    q: Tensor,  # (tokens, heads, head_dim)
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    window: int = 0,  # keys that a query sees, itself included; 0: all before it
    slopes: Tensor | None = None,  # (heads) fp32: ALiBi's
    softcap: float = 0.0,  # of scores; 0: none
    sinks: Tensor | None = None,  # (heads)
    invariant: bool = False,  # the result of a query depends, bit for bit, on its own sequence alone
) -> Tensor:
    """(tokens, heads, head_dim). Queries of no sequence get 0; where all are decoding, every query is of one."""
    kernel: Callable[..., Tensor] = reference
    if q.device.type == "cuda":
        from .paged_attention_triton import launch

        kernel = launch
    return kernel(q, cache, metadata, window=window, slopes=slopes, softcap=softcap, sinks=sinks, invariant=invariant)


def reference(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    window: int = 0,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """Sequence by sequence, by PyTorch's own attention; `invariant` takes the queries one at a time as well.

    The order in which a matrix product adds up may depend on how many rows it has, so a query that is computed alone
    is the same in every batch and however its prompt was cut.
    """
    out = torch.zeros_like(q)
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if not length or begin == end:
            continue
        table = metadata.block_tables[row : row + 1, : math.ceil(length / cache.size)]
        k = gathered(cache.keys, cache.key_scales, table, q.dtype)[0]
        v = gathered(cache.values, cache.value_scales, table, q.dtype)[0]
        step = 1 if invariant else end - begin
        for first in range(begin, end, step):
            last = first + step
            seen = length - (end - last)  # keys up to the last of these queries
            out[first:last] = attend(q[first:last], k[:, :seen], v[:, :seen], window, slopes, softcap, sinks)
    return out


def gathered(
    pool: Tensor, scales: Tensor | None, tables: Tensor, dtype: torch.dtype, room: Tensor | None = None
) -> Tensor:
    """Keys or values of sequences with as many blocks each, (seqs, blocks), side by side:
    (seqs, kv_heads, keys, head_dim); in `room`, where there is one of as many elements."""
    blocks, kv_heads, size, head_dim = pool.shape
    seqs, each = tables.shape
    # Each head of a block lies in one piece: copied once, to where it is read.
    heads = torch.arange(kv_heads, device=pool.device).unsqueeze(1)
    pieces = (tables.long().unsqueeze(1) * kv_heads + heads).flatten()
    into = None if room is None else room.view(len(pieces), -1)
    x = torch.index_select(pool.view(blocks * kv_heads, -1), 0, pieces, out=into)
    x = x.view(seqs, kv_heads, each * size, head_dim)
    if scales is None:
        return x.to(dtype)
    by = scales.view(blocks * kv_heads, -1).index_select(0, pieces).view(seqs, kv_heads, each * size, 1)
    return (x.float() * by).to(dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    slopes: Tensor | None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q (queries, heads, head_dim) are the last positions of k, v (kv_heads, keys, head_dim); the result is as q."""
    queries, keys = len(q), k.shape[1]
    explicit = softcap > 0 or sinks is not None  # beyond SDPA
    seen: Tensor | None = None
    if window or slopes is not None or 1 < queries < keys or (explicit and queries > 1):
        places = torch.arange(keys, device=q.device)
        distance = places[keys - queries :].unsqueeze(1) - places
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        if slopes is not None:
            seen = (-slopes.view(-1, 1, 1) * distance).masked_fill(~seen, -math.inf)
    whole = seen is None and queries > 1  # a prompt from its first token on
    if explicit:
        return attend_explicitly(q, k, v, seen, softcap, sinks)
    heads_first = q.transpose(0, 1).unsqueeze(0)
    out = F.scaled_dot_product_attention(
        heads_first, k.unsqueeze(0), v.unsqueeze(0), attn_mask=seen, is_causal=whole, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def attend_explicitly(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, softcap: float, sinks: Tensor | None
) -> Tensor:
    """All scores in memory. `seen`: where a query may look, or what is added to the scores."""
    (queries, heads, head_dim), kv_heads = q.shape, k.shape[0]
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, head_dim)  # (kv_heads, group · queries, head_dim)
    scores = (grouped @ k.transpose(1, 2)).float().view(heads, queries, -1) / math.sqrt(head_dim)
    scores = soft_cap(scores, softcap)
    if seen is not None:
        scores = scores + seen if seen.is_floating_point() else scores.masked_fill(~seen, -math.inf)
    p = sink_softmax(scores, None if sinks is None else sinks.view(-1, 1, 1)).type_as(v)
    return (p.reshape(kv_heads, -1, p.shape[-1]) @ v).view(heads, queries, head_dim).transpose(0, 1)
