"""Attention over a paged cache of latent vectors on a GPU: one kernel for decoding and prefill.

All heads read the same vectors, as keys and as values, so a program takes some (query, head) pairs of a sequence as
rows of one matrix, and a vector is read once for all of them. Splits of keys, their merging, and what `invariant` means
are as in `paged_attention_triton`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..triton_support import pdl_options, pdl_wait, power_of_two, split_k_counters, tl, triton
from .paged_attention import AttentionMetadata, LayerCache
from .paged_attention_triton import key_tiles, merge_splits, num_splits


@dataclass(frozen=True)
class LaunchConfig:
    """Tile sizes and splits of a launch."""

    rows: int  # queries × heads in one program
    tile: int  # keys of one step
    warps: int
    stages: int
    splits: int = 1  # programs that share the keys of a sequence
    min_tiles: int = 1  # of one of them


def choose_config(q: Tensor, cache: LayerCache, metadata: AttentionMetadata, invariant: bool) -> LaunchConfig:
    """From sizes that the host knows and that are constant in a CUDA graph; tuned by benchmarks/latent_tune.py."""
    heads = q.shape[1]
    if q.dtype == torch.float32:
        rows, tile, warps, stages = 16, 16, 8, 1
    elif invariant or metadata.max_query_len * heads > 16:
        rows, tile, warps, stages = 64, 64, 8, 2
    else:
        rows, tile, warps, stages = 16, 64, 4, 2
    if invariant:
        return LaunchConfig(rows, tile, warps, stages)
    seqs, keys = metadata.seq_lens.shape[0], metadata.block_tables.shape[1] * cache.size
    walks = seqs * triton.cdiv(metadata.max_query_len * heads, rows)
    splits, min_tiles = num_splits(walks, triton.cdiv(keys, tile), 2048 // tile, q.device)
    return LaunchConfig(rows, tile, warps, stages, splits, min_tiles)


def launch(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    rank: int,
    scale: float,
    window: int = 0,
    invariant: bool = False,
    config: LaunchConfig | None = None,
) -> Tensor:
    """As `latent_attention.reference`."""
    q = q.contiguous()
    tokens, heads, width = q.shape
    seqs = metadata.seq_lens.shape[0]
    config = config or choose_config(q, cache, metadata, invariant)
    split = config.splits > 1
    # Padding queries get 0; where all are decoding, there are none.
    out = (q.new_empty if metadata.max_query_len == 1 else q.new_zeros)(tokens, heads, rank)
    partials = q.new_empty((tokens, heads, config.splits, rank), dtype=torch.float32) if split else out
    lse = q.new_empty((tokens, heads, config.splits), dtype=torch.float32) if split else out
    row_tiles = triton.cdiv(metadata.max_query_len * heads, config.rows)
    latent_kernel[(config.splits, row_tiles, seqs)](
        q,
        cache.keys,
        cache.key_scales,
        out,
        partials,
        lse,
        split_k_counters(q.device) if split else out,
        metadata.block_tables,
        metadata.seq_lens,
        metadata.query_start_loc,
        scale * math.log2(math.e),
        metadata.block_tables.stride(0),
        cache.keys.stride(0),
        0 if cache.key_scales is None else cache.key_scales.stride(0),
        config.splits,
        config.min_tiles,
        HEADS=heads,
        RANK=rank,
        ROPE=width - rank,
        RANK_WIDTH=max(16, power_of_two(rank)),
        ROPE_WIDTH=max(16, power_of_two(width - rank)),
        SIZE=cache.size,
        ROWS=config.rows,
        TILE=config.tile,
        WINDOW=window,
        SPLIT=split,
        **pdl_options(q.device),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


# Compiled once for all numbers of splits, table widths and batch offsets: no recompilation while serving.
@triton.jit(
    do_not_specialize=["splits", "min_tiles", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "lengths_ptr", "starts_ptr"],
)
def latent_kernel(
    q_ptr,
    keys_ptr,
    key_scales_ptr,
    out_ptr,
    partials_ptr,  # split: (tokens, heads, splits, rank)
    lse_ptr,  # split: (tokens, heads, splits)
    counters_ptr,  # split: (seqs, row tiles)
    tables_ptr,
    lengths_ptr,
    starts_ptr,
    scale,  # times log₂e: exponentials are powers of two
    table_stride,
    block_stride,
    scale_stride,
    splits,
    min_tiles,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    QUANTIZED: tl.constexpr = key_scales_ptr is not None
    pdl_wait(PDL)
    seq = tl.program_id(2)
    start = tl.load(starts_ptr + seq)
    queries = tl.load(starts_ptr + seq + 1) - start
    length = tl.load(lengths_ptr + seq)
    # The last queries of a prompt see the most keys and are scheduled first, so that no long loop is left at the end.
    row_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    query, head = row // HEADS, row % HEADS
    first, last = row_tile * ROWS // HEADS, tl.minimum((row_tile * ROWS + ROWS - 1) // HEADS + 1, queries)
    if first >= queries:
        return
    low, high = key_tiles(length, queries, first, 1, TILE, WINDOW)
    high = tl.cdiv(tl.maximum(length - queries + last, 0), TILE)
    active_splits = 1
    if SPLIT:
        each = tl.maximum(tl.cdiv(high - low, splits), min_tiles)
        active_splits = tl.cdiv(high - low, each)
        low += tl.program_id(0) * each
        if (low >= high) & (tl.program_id(0) > 0):
            return
        high = tl.minimum(low + each, high)

    live = query < queries
    place = (start + query).to(tl.int64) * HEADS + head
    n, r = tl.arange(0, RANK_WIDTH), tl.arange(0, ROPE_WIDTH)
    q_at = q_ptr + place[:, None] * (RANK + ROPE)
    inside = live[:, None] & (n < RANK)[None, :]
    q_latent = tl.load(q_at + n[None, :], mask=inside, other=0.0)
    q_rope = tl.load(q_at + RANK + r[None, :], mask=live[:, None] & (r < ROPE)[None, :], other=0.0)
    position = length - queries + query
    acc = tl.zeros((ROWS, RANK_WIDTH), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    # In units of log 2; finite, so that a row without visible keys gives 0 and not NaN.
    row_max = tl.full((ROWS,), -1e30, tl.float32)
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    j = low * TILE + tl.arange(0, TILE)
    # Block numbers are loaded a tile ahead, as in `attend_kernel`.
    block = tl.load(table_ptr + j // SIZE, mask=j < length, other=0)
    for _ in range(low, high):
        # Nothing beyond the length is read: table entries and blocks there are uninitialised, and may be NaN.
        there = j < length
        vector = block.to(tl.int64) * block_stride + (j % SIZE) * (RANK + ROPE)
        at = keys_ptr + vector[:, None]
        latent = tl.load(at + n[None, :], mask=there[:, None] & (n < RANK)[None, :], other=0.0)
        rope = tl.load(at + RANK + r[None, :], mask=there[:, None] & (r < ROPE)[None, :], other=0.0)
        if QUANTIZED:
            scale_at = key_scales_ptr + block.to(tl.int64) * scale_stride + j % SIZE
            factor = tl.load(scale_at, mask=there, other=0.0)[:, None]
            latent = (latent.to(tl.float32) * factor).to(q_latent.dtype)
            rope = (rope.to(tl.float32) * factor).to(q_latent.dtype)
        s = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        s = tl.dot(q_latent, tl.trans(latent), s, input_precision="ieee")
        distance = position[:, None] - j[None, :]
        seen = (distance >= 0) & there[None, :]
        if WINDOW > 0:
            seen &= distance < WINDOW
        s = tl.where(seen, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
        j += TILE
        block = tl.load(table_ptr + j // SIZE, mask=j < length, other=0)
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    to = out_ptr + place[:, None] * RANK + n[None, :]
    if SPLIT and active_splits > 1:
        part = place * splits + tl.program_id(0)
        tl.store(lse_ptr + part, row_max + tl.log2(row_sum), mask=live)
        tl.store(partials_ptr + part[:, None] * RANK + n[None, :], acc, mask=inside)
        counter = counters_ptr + seq * tl.num_programs(1) + row_tile
        tl.debug_barrier()  # all threads have written before the counter is incremented
        if tl.atomic_add(counter, 1, sem="acq_rel") == active_splits - 1:
            merged = merge_splits(partials_ptr, lse_ptr, place * splits, live, active_splits, RANK, RANK_WIDTH)
            tl.store(to, merged, mask=inside)
            tl.store(counter, 0)  # for the next launch
    else:
        tl.store(to, acc, mask=inside)
