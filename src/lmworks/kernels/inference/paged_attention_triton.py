"""Attention over pages on a GPU: one kernel for decoding and for prompts.

A program takes some queries of a sequence for *all* the heads that share a key head, as rows of one matrix (query 0
head 0, query 0 head 1, …), so that a key is read once for the whole group. It walks over the keys in tiles, with the
running maximum and sum of FlashAttention (Dao et al. 2022); a tile spans several blocks, whose numbers it gathers.

While decoding there are few queries and many keys: those of a sequence are shared out among several programs, each of
which leaves its part of the result and its log-sum-exp, and the last to finish merges them in order (flash-decoding).
How many keys a program takes is computed on the device from the sequence's length, so a CUDA graph holds for all
lengths: a program that has nothing to do ends at once, and one that has all keys of a short sequence merges nothing.

`invariant`: tiles and the order of the walk are the same for every shape of batch, and nothing is split. What a row
meets beyond its own keys changes nothing (p = 0, and the running values times 1), so its result is the same bit for
bit alone or in a batch, in one piece or in chunks, as a prompt or as a decoded token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..triton_support import multiprocessors, pdl_options, pdl_wait, power_of_two, split_k_counters, tl, triton
from .packed_8bit_triton import evens_and_odds, interleave, widened, words_at
from .paged_attention import LARGEST, SHORT, AttentionMetadata, LayerCache

MOST_SPLITS = 64
AT_ONCE = 3  # programs that a multiprocessor holds: keys of few sequences are split to fill it once, none comes after
PROGRAMS_EACH = 8  # programs that it gets where there are many sequences: enough to even out unequal lengths
LEAST = 4  # tiles of a program whose sequence has more: to walk over them takes less time than to merge parts
LONG = 2048  # keys of it where the walks are more than programs at once: all wait for longer ones alone
TILE_BYTES = 2**14  # of keys in one step of the walk: with three of them under way, the memory is never idle


@dataclass(frozen=True)
class Config:
    """How a launch is cut up."""

    rows: int  # queries × heads of a group in one program
    tile: int  # keys in one step of the walk
    warps: int
    stages: int  # tiles under way at once
    splits: int = 1  # programs among which the keys of a sequence are shared out
    least: int = LEAST  # tiles of one of them


def choose(q: Tensor, cache: LayerCache, metadata: AttentionMetadata, invariant: bool) -> Config:
    """From numbers that the host knows and that do not change when a CUDA graph is replayed."""
    kv_heads, width = cache.keys.shape[1], power_of_two(q.shape[2])
    group = power_of_two(q.shape[1] // kv_heads)
    exact = q.dtype == torch.float32  # no tensor cores: small tiles, or the registers run out
    few, warps, stages = (32, 8, 2) if exact else (64, 4, 3)
    quantised = cache.key_scales is not None
    tile = min(max(TILE_BYTES // (width * cache.keys.element_size()), 16), 32 if exact else 128)
    if invariant:
        return Config(max(few, group), min(tile, 64), warps, stages)
    rows = max(16, power_of_two(metadata.max_query_len * group))
    if rows == few and quantised and not exact:
        tile, stages = min(tile, 64), 2  # of more, registers spill
    if rows <= few:
        walks, keys = metadata.seq_lens.shape[0] * kv_heads, metadata.block_tables.shape[1] * cache.size
        splits, least = num_splits(walks, triton.cdiv(keys, tile), LONG // tile, q.device)
        return Config(rows, tile, warps, stages, splits, least)
    if quantised and not exact:
        return Config(max(few, group), min(tile, 64), warps, 2)
    if exact or width > 128:
        return Config(max(few, group), tile, warps, 2)
    if metadata.max_query_len <= SHORT or width <= 64:  # which lose more by wide tiles that are not full than they gain
        return Config(max(few, group), min(tile, 64), warps, stages)
    return Config(max(128, group), tile, 8, 3)


def num_splits(walks: int, tiles: int, long: int, device: torch.device) -> tuple[int, int]:
    """Among how many programs each of `walks` (sequences × key heads) over up to so many tiles is shared out, and how
    many tiles one of them takes at least."""
    at_once = multiprocessors(device) * AT_ONCE // max(walks, 1)
    splits = at_once if at_once > 1 else math.ceil(multiprocessors(device) * PROGRAMS_EACH / walks)
    least = LEAST if at_once else long
    return max(1, min(splits, triton.cdiv(tiles, least), MOST_SPLITS)), least


def launch(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    window: int = 0,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    invariant: bool = False,
    config: Config | None = None,
) -> Tensor:
    """As `paged_attention.reference`."""
    q = q.contiguous()
    tokens, heads, head_dim = q.shape
    kv_heads, seqs = cache.keys.shape[1], metadata.seq_lens.shape[0]
    config = config or choose(q, cache, metadata, invariant)
    group = heads // kv_heads
    queries = config.rows // group  # of one program
    split = config.splits > 1
    each = 1 if cache.key_scales is None else 2  # numbers that are read as one
    out = torch.empty_like(q) if metadata.max_query_len == 1 else torch.zeros_like(q)  # of queries of no sequence
    parts = q.new_empty((tokens, heads, config.splits, head_dim), dtype=torch.float32) if split else out
    lse = q.new_empty((tokens, heads, config.splits), dtype=torch.float32) if split else out
    attend_kernel[(config.splits if split else triton.cdiv(metadata.max_query_len, queries), kv_heads, seqs)](
        q,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        out,
        parts,
        lse,
        split_k_counters(q.device) if split else out,
        metadata.block_tables,
        metadata.seq_lens,
        metadata.query_start_loc,
        slopes,
        sinks,
        math.log2(math.e) / math.sqrt(head_dim),
        metadata.block_tables.stride(0),
        cache.keys.stride(0) // each,
        cache.keys.stride(1) // each,
        0 if cache.key_scales is None else cache.key_scales.stride(0),
        config.splits,
        config.least,
        LARGEST=1.0 if cache.value_scales is None else LARGEST[cache.values.dtype],
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WIDTH=max(power_of_two(head_dim), 16 * each),
        SIZE=cache.size,
        ROWS=config.rows,
        QUERIES=queries,
        TILE=config.tile,
        WINDOW=window,
        SOFTCAP=softcap,
        SPLIT=split,
        **pdl_options(q.device),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


@triton.jit
def key_tiles(
    length,
    queries,
    first,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Which tiles of keys the queries first … first + QUERIES of a sequence see: from, and up to."""
    begin = length - queries + first  # position of the first query
    low = 0
    if WINDOW > 0:
        low = tl.maximum(begin - WINDOW + 1, 0) // TILE
    high = tl.cdiv(tl.maximum(tl.minimum(begin + QUERIES, length), 0), TILE)
    return low, high


@triton.jit
def tanh(x):
    """By its series near 0, where 2σ(2x) − 1 loses digits."""
    y = x * x
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 2 * tl.sigmoid(2 * x) - 1)


# Compiled once for all numbers of splits, widths of tables and places of a batch: none ever waits for a compiler.
@triton.jit(
    do_not_specialize=["splits", "least", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "lengths_ptr", "starts_ptr"],
)
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    parts_ptr,  # split: (tokens, heads, splits, head_dim)
    lse_ptr,  # split: (tokens, heads, splits)
    tickets_ptr,  # split: (seqs, kv_heads)
    tables_ptr,
    lengths_ptr,
    starts_ptr,
    slopes_ptr,
    sinks_ptr,
    scale,  # log₂e / √head_dim: exponentials are powers of two
    table_stride,
    block_stride,
    head_stride,
    scale_stride,
    splits,
    least,
    LARGEST: tl.constexpr,  # number of a quantised cache; 1: it is not
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    QUANTISED: tl.constexpr = k_scale_ptr is not None
    EACH: tl.constexpr = 2 if QUANTISED else 1  # numbers that are read as one
    INTEGER: tl.constexpr = k_ptr.dtype.element_ty == tl.int8
    pdl_wait(PDL)
    kv_head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + seq)
    queries = tl.load(starts_ptr + seq + 1) - start
    length = tl.load(lengths_ptr + seq)
    # The last queries of a prompt see the most keys; their programs begin first, so that none is left over at the end.
    first = 0 if SPLIT else (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    low, high = key_tiles(length, queries, first, QUERIES, TILE, WINDOW)
    if SPLIT:
        each = tl.maximum(tl.cdiv(high - low, splits), least)
        sharing = tl.cdiv(high - low, each)
        low += tl.program_id(0) * each
        if (first >= queries) | ((low >= high) & (tl.program_id(0) > 0)):
            return
        high = tl.minimum(low + each, high)
    elif first >= queries:
        return

    rows, d, word = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH // EACH)
    query, head = first + rows // GROUP, kv_head * GROUP + rows % GROUP
    live = (rows < QUERIES * GROUP) & (query < queries)
    inside = live[:, None] & (d < HEAD_DIM)[None, :]
    place = (start + query).to(tl.int64) * HEADS + head
    q = tl.load(q_ptr + place[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    if QUANTISED:
        if q.dtype == tl.bfloat16:
            q = q.to(tl.float16)  # in which all that an 8-bit cache holds is exact
        q_even, q_odd = evens_and_odds(q)
        k_ptr, v_ptr = words_at(k_ptr), words_at(v_ptr)
    position = length - queries + query
    slope = tl.zeros((ROWS,), tl.float32)
    if slopes_ptr is not None:
        # Scores are multiplied by `scale` later, as those of the products are.
        slope = tl.load(slopes_ptr + head, mask=live, other=0.0) * 1.4426950408889634

    # The mixture of values, not yet divided by
    acc = tl.zeros((ROWS, WIDTH // EACH), tl.float32)
    acc_odd = acc
    total = tl.zeros((ROWS,), tl.float32)  # the sum of their weights
    # Largest score so far, as a power of two; finite, so that a row that has seen nothing yet stays 0 and not NaN.
    top = tl.full((ROWS,), -1e30, tl.float32)
    if sinks_ptr is not None:
        # As a key whose value is 0, seen before all others; of a split sequence by the first program alone.
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        if SPLIT:
            begins = tl.program_id(0) == 0
            top, total = tl.where(begins, sink, top), tl.where(begins, total + 1.0, total)
        else:
            top, total = sink, total + 1.0
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    # Every row sees the whole of the tiles up to the first query, from the last one's window on.
    whole_low, whole_high = low, (length - queries + first + 1) // TILE
    if WINDOW > 0:
        whole_low = tl.cdiv(tl.maximum(length - queries + first + QUERIES - WINDOW, 0), TILE)
    j = low * TILE + tl.arange(0, TILE)
    # Numbers of blocks are read a tile ahead: a load whose address is a load of the same turn takes a stage of its own.
    block = tl.load(table_ptr + j // SIZE, mask=j < length, other=0)
    for tile in range(low, high):
        # Nothing beyond the length is read: those rows of the table, and of the blocks, may hold anything, even NaN.
        there = j < length
        row = block.to(tl.int64) * block_stride + kv_head * head_stride + (j % SIZE) * (HEAD_DIM // EACH)
        offsets = row[:, None] + word[None, :]
        held = there[:, None]
        if HEAD_DIM < WIDTH:
            held &= (word < HEAD_DIM // EACH)[None, :]
        k = tl.load(k_ptr + offsets, mask=held, other=0)
        v = tl.load(v_ptr + offsets, mask=held, other=0)
        if QUANTISED:
            k_even, k_odd = widened(k, INTEGER)
            s = tl.dot(q_even, tl.trans(k_even.to(q.dtype)), input_precision="ieee")
            s = tl.dot(q_odd, tl.trans(k_odd.to(q.dtype)), s, input_precision="ieee")
            scale_offsets = block.to(tl.int64) * scale_stride + kv_head * SIZE + j % SIZE
            s *= tl.load(k_scale_ptr + scale_offsets, mask=there, other=0.0)[None, :]
        else:
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP > 0:
            root = scale * 0.6931471805599453  # 1 / √head_dim
            s = tanh(s * (root / SOFTCAP)) * (SOFTCAP / root)
        distance = position[:, None] - j[None, :]
        if slopes_ptr is not None:
            s -= (slope[:, None] / scale) * distance
        if (tile < whole_low) | (tile >= whole_high):
            seen = (distance >= 0) & there[None, :]
            if WINDOW > 0:
                seen &= distance < WINDOW
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        acc *= fade[:, None]
        if QUANTISED:
            # Times the largest number that is held, or p would fall below what fp16 resolves.
            p *= (tl.load(v_scale_ptr + scale_offsets, mask=there, other=0.0) * LARGEST)[None, :]
            v, v_odd = widened(v, INTEGER)
            acc_odd = tl.dot(p.to(q.dtype), v_odd.to(q.dtype), acc_odd * fade[:, None], input_precision="ieee")
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        top = higher
        j += TILE
        block = tl.load(table_ptr + j // SIZE, mask=j < length, other=0)
    if QUANTISED:
        acc = interleave(acc, acc_odd)
    acc = acc / tl.where(total > 0, total * LARGEST, 1.0)[:, None]
    at = place[:, None].to(tl.int64) * HEAD_DIM + d[None, :]
    if SPLIT:
        if sharing > 1:
            part = place.to(tl.int64) * splits + tl.program_id(0)
            tl.store(lse_ptr + part, top + tl.log2(total), mask=live)
            tl.store(parts_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
            ticket = tickets_ptr + seq * tl.num_programs(1) + kv_head
            tl.debug_barrier()  # all threads have written before one of them says so
            if tl.atomic_add(ticket, 1, sem="acq_rel") == sharing - 1:
                part = place.to(tl.int64) * splits
                tl.store(out_ptr + at, merged(parts_ptr, lse_ptr, part, live, sharing, HEAD_DIM, WIDTH), mask=inside)
                tl.store(ticket, 0)  # as the next launch expects it
        else:
            tl.store(out_ptr + at, acc, mask=inside)
    else:
        tl.store(out_ptr + at, acc, mask=inside)


@triton.jit
def merged(parts_ptr, lse_ptr, first, live, sharing, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows whose parts lie from `first` (rows) on, weighted by e^lse: (rows, WIDTH)."""
    d = tl.arange(0, WIDTH)
    at_once: tl.constexpr = max(1, 64 // live.shape[0])  # parts whose loads are under way together, in registers
    acc = tl.zeros((live.shape[0], WIDTH), tl.float32)
    total = tl.zeros((live.shape[0],), tl.float32)
    top = tl.full((live.shape[0],), -1e30, tl.float32)
    for begin in range(0, sharing, at_once):
        for i in tl.static_range(at_once):
            part = first + begin + i
            there = live & (part < first + sharing)
            lse = tl.load(lse_ptr + part, mask=there, other=float("-inf"))
            inside = there[:, None] & (d < HEAD_DIM)[None, :]
            mixture = tl.load(parts_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
            higher = tl.maximum(top, lse)
            fade, weight = tl.exp2(top - higher), tl.exp2(lse - higher)
            acc = acc * fade[:, None] + mixture * weight[:, None]
            total = total * fade + weight
            top = higher
    return acc / tl.where(total > 0, total, 1.0)[:, None]
