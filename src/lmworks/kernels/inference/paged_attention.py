"""Attention over a paged KV cache.

The cache of a layer is a pool of blocks of `size` tokens; a sequence's keys are the blocks in its row of the block
table, in order, up to its length. Queries of all sequences are packed, (tokens, heads, head_dim), and those of a
sequence are its last positions: one in decoding, many in prefill.

    outᵢ = Σ softmax(cap(qᵢ·kⱼ/√d) − slope·(pᵢ − j)) · vⱼ   over keys j with pᵢ − window < j ≤ pᵢ

with pᵢ = length − queries + i, the position of query i of its sequence, and cap(s) = softcap·tanh(s/softcap) where
scores are soft-capped. A sink is one more score of each head in the denominator.

A quantized cache holds int8 or fp8 and one scale for each token and head: k = stored · scale.

Decoding sequences that begin with the same blocks can be told as `SharedPrefixes`: a GPU then reads the keys of a
prefix once for many sequences, and merges the result with that of each sequence's own keys. The result is the same but
for the order of summation.

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

SHORT_PROMPT = 256  # queries; longer prompts have larger tiles
CACHE_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # largest value of a quantized cache


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, in blocks."""

    keys: Tensor  # (blocks, kv_heads, size, head_dim), in the model's dtype, int8 or float8_e4m3fn
    values: Tensor  # the same
    key_scales: Tensor | None = None  # (blocks, kv_heads, size) fp32, if quantized
    value_scales: Tensor | None = None  # the same

    @property
    def size(self) -> int:
        """Tokens in a block."""
        return self.keys.shape[2]


GATHER_UNIT = 128  # keys; those of a sequence begin at a multiple of it where they are gathered
SHARED_UNIT = 128  # keys; a shared prefix is a multiple of it
SHARED_ROWS = 64  # sequences of a prefix × heads of a group that read it together


def sequences_of_tile(group: int) -> int:
    """Sequences that read a shared prefix together, where `group` heads share a key head."""
    return max(1, SHARED_ROWS // (1 << (group - 1).bit_length()))


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefixes that several of the decoding sequences have in common, cut into tiles of sequences."""

    lengths: Tensor  # (seqs) int32: keys of each sequence that it shares, a multiple of SHARED_UNIT; 0: none
    members: Tensor  # (seqs) int32: sequences in the order of their tiles
    tile_starts: Tensor  # (tiles + 1) int32: offset of a tile in `members`; all sequences of a tile share one prefix


@dataclass(frozen=True)
class AttentionMetadata:
    """Blocks, lengths and queries of each sequence."""

    block_tables: Tensor  # (seqs, max_blocks) int32: its blocks in order; entries beyond its length are never read
    seq_lens: Tensor  # (seqs) int32: its keys, those of this batch included; 0: padding, whose result is 0
    query_start_loc: Tensor  # (seqs + 1) int32: offset of its first query
    max_query_len: int  # most queries of a sequence; 1: all are decoding
    shared: SharedPrefixes | None = None  # where all are decoding
    # For long prompts, whose keys a GPU gathers before it attends (`prefill_attention_triton`):
    key_starts: Tensor | None = None  # (seqs + 1) int32: offset of a sequence's keys, a multiple of GATHER_UNIT
    keys: int = 0  # room for all of them


def paged_attention(
    q: Tensor,  # (tokens, heads, head_dim)
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    window: int = 0,  # sliding window: keys that a query sees, itself included; 0: all
    slopes: Tensor | None = None,  # (heads) fp32: of ALiBi
    softcap: float = 0.0,  # of scores; 0: none
    sinks: Tensor | None = None,  # (heads)
    invariant: bool = False,  # batch-invariant
    out: Tensor | None = None,  # zeros, for the result
) -> Tensor:
    """(tokens, heads, head_dim). Padding queries get 0; if all are decoding, there are none."""
    kernel: Callable[..., Tensor] = reference
    if q.device.type == "cuda":
        from .paged_attention_triton import launch

        kernel = launch
    return kernel(
        q, cache, metadata, window=window, slopes=slopes, softcap=softcap, sinks=sinks, invariant=invariant, out=out
    )


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
    out: Tensor | None = None,
) -> Tensor:
    """One sequence at a time, with PyTorch's attention; `invariant`: one query at a time.

    The summation order of a matrix product may depend on the number of rows.
    """
    out = torch.zeros_like(q) if out is None else out
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
    pool: Tensor, scales: Tensor | None, tables: Tensor, dtype: torch.dtype, buffer: Tensor | None = None
) -> Tensor:
    """Keys or values of sequences with equally many blocks, tables (seqs, blocks): (seqs, kv_heads, keys, head_dim),
    in `buffer` if given."""
    blocks, kv_heads, size, head_dim = pool.shape
    seqs, each = tables.shape
    # Each head of a block is contiguous, and copied once.
    heads = torch.arange(kv_heads, device=pool.device).unsqueeze(1)
    pieces = (tables.long().unsqueeze(1) * kv_heads + heads).flatten()
    into = None if buffer is None else buffer.view(len(pieces), -1)
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
    whole = seen is None and queries > 1  # a whole prompt
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
    """With all scores in memory. `seen`: a boolean mask, or a bias."""
    (queries, heads, head_dim), kv_heads = q.shape, k.shape[0]
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, head_dim)  # (kv_heads, group · queries, head_dim)
    scores = (grouped @ k.transpose(1, 2)).float().view(heads, queries, -1) / math.sqrt(head_dim)
    scores = soft_cap(scores, softcap)
    if seen is not None:
        scores = scores + seen if seen.is_floating_point() else scores.masked_fill(~seen, -math.inf)
    p = sink_softmax(scores, None if sinks is None else sinks.view(-1, 1, 1)).type_as(v)
    return (p.reshape(kv_heads, -1, p.shape[-1]) @ v).view(heads, queries, head_dim).transpose(0, 1)


# --- decoding on a CPU ----------------------------------------------------------------------------------


GROUP_ELEMENTS = 2**20  # of keys that are gathered at once


class GatherBuffers(threading.local):
    """Buffers for gathered keys and values that all layers reuse: new memory costs page faults."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, count: int, dtype: torch.dtype) -> Tensor | None:
        if count > GROUP_ELEMENTS:  # a single long sequence: not reused
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
    out: Tensor | None = None,
) -> Tensor:
    """As `reference` where every sequence has one query: q (seqs, heads, head_dim)."""
    out = torch.zeros_like(q) if out is None else out
    lengths, order = metadata.seq_lens.sort()
    counts = lengths.tolist()
    per_block = cache.keys[0].numel()
    end = len(counts)
    while end and counts[end - 1]:
        blocks = math.ceil(counts[end - 1] / cache.size)
        most = max(1, GROUP_ELEMENTS // (per_block * blocks))
        begin = max(end - most, 0)
        while not counts[begin]:  # padding stays 0
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
    """Sequences of similar length: q (seqs, heads, head_dim), tables (seqs, blocks)."""
    seqs, heads, head_dim = q.shape
    kv_heads, keys = cache.keys.shape[1], tables.shape[1] * cache.size
    distance = lengths.unsqueeze(1) - 1 - torch.arange(keys)  # (seqs, keys); negative: not valid
    valid = distance >= 0
    # Blocks beyond a sequence's own, and the rest of its last, are uninitialised, and may be NaN.
    tables = torch.where(valid[:, :: cache.size], tables, 0)
    count = seqs * kv_heads * keys * head_dim
    k, v = (  # (seqs, kv_heads, keys, head_dim)
        gather_blocks(pool, scales, tables, q.dtype, gather_buffers.get(name, count, pool.dtype))
        for name, pool, scales in (("k", cache.keys, cache.key_scales), ("v", cache.values, cache.value_scales))
    )
    v.transpose(1, 2)[(~valid).nonzero(as_tuple=True)] = 0  # a mask would read all of v
    scores = (q.view(seqs, kv_heads, -1, head_dim) @ k.transpose(2, 3)).float().view(seqs, heads, keys)
    scores = soft_cap(scores / math.sqrt(head_dim), softcap)
    if slopes is not None:
        scores = scores - slopes.view(-1, 1) * distance.unsqueeze(1)
    seen = valid & (distance < window) if window else valid
    scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf)
    p = sink_softmax(scores, None if sinks is None else sinks.view(1, -1, 1)).type_as(v)
    return (p.reshape(seqs, kv_heads, -1, keys) @ v).view(seqs, heads, head_dim)
