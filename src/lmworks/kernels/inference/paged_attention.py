"""Attention over a paged KV cache.

The cache of a layer is a pool of blocks of `size` tokens; a sequence's keys are the blocks in its row of the block
table, in order, up to its length. Queries of all sequences are packed, (tokens, heads, head_dim), and those of a
sequence are its last positions: one in decoding, many in prefill.

    outᵢ = Σ softmax(cap(qᵢ·kⱼ/√d) − slope·(pᵢ − j)) · vⱼ   over keys j with pᵢ − window < j ≤ pᵢ

with pᵢ = length − queries + i, the position of query i of its sequence, and cap(s) = softcap·tanh(s/softcap) where
scores are soft-capped. A sink is one more score of each head in the denominator.

A quantized cache holds int8 or fp8 and one scale for each token and head: k = stored · scale.

`paged_decode` is for a CPU, where a loop over sequences with one query each is mostly overhead: sequences of similar
length are gathered, padded to the longest, and computed in one product.
"""

from __future__ import annotations

import math
import threading
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
        k = gather_blocks(cache.keys, cache.key_scales, table, q.dtype)[0]
        v = gather_blocks(cache.values, cache.value_scales, table, q.dtype)[0]
        step = 1 if invariant else end - begin
        for first in range(begin, end, step):
            last = first + step
            seen = length - (end - last)  # keys up to the last of these queries
            out[first:last] = attend(q[first:last], k[:, :seen], v[:, :seen], window, slopes, softcap, sinks)
    return out


def gather_blocks(
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


# --- decoding on a CPU ----------------------------------------------------------------------------------


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
        gather_blocks(pool, scales, tables, q.dtype, gather_buffers.get(name, count, pool.dtype))
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
