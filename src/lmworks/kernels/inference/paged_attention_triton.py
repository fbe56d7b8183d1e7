"""Paged attention on a GPU: one kernel for decoding and prefill.

A program takes some queries of a sequence for *all* heads that share a key head, as rows of one matrix (query 0 head 0,
query 0 head 1, …), so that a key is read once for the whole group. It loops over tiles of keys with FlashAttention's
online softmax (Dao et al. 2022); a tile spans several blocks, whose numbers it gathers.

Decoding has few queries and many keys: the keys of a sequence are split over several programs, each of which writes its
partial result and log-sum-exp, and the last to finish merges them in order (flash-decoding). The number of keys of a
program is computed on the device from the sequence's length, so that a CUDA graph is valid for all lengths: a program
without keys returns at once, and one that has all keys of a short sequence merges nothing.

A prefix that many decoding sequences share is read by `shared_prefix_kernel`, which takes queries of several sequences
as rows. Its partial results are merged with those of each sequence's own keys as if they were splits.

`invariant`: tiles and their order are the same for every batch, and keys are not split. Masked keys change nothing
(p = 0, and the running values times 1), so a result has the same bits alone or in a batch, in one prefill or in chunks,
as a prompt token or a decoded one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..triton_support import multiprocessors, pdl_options, pdl_wait, power_of_two, split_k_counters, tl, triton
from .packed_8bit_triton import as_int16_pointer, deinterleave, interleave, unpack_8bit
from .paged_attention import (
    CACHE_MAX,
    SHARED_ROWS,
    SHARED_UNIT,
    SHORT_PROMPT,
    AttentionMetadata,
    LayerCache,
    SharedPrefixes,
)

MAX_SPLITS = 64
MAX_SPLITS_WHEN_FULL = 8  # where sequences fill the GPU by themselves
RESIDENT_PROGRAMS = 3  # of a multiprocessor: keys of few sequences are split to fill the GPU once
PROGRAMS_PER_MULTIPROCESSOR = 8  # with many sequences: enough to balance unequal lengths
MIN_TILES = 4  # of a program: fewer take less time than merging
MIN_SHARED_UNITS = 2  # of a split of a shared prefix
MIN_KEYS = 2048  # of a program, where sequences fill the GPU by themselves: only long ones are split
TILE_BYTES = 2**14  # of keys in one step: three of them in flight keep the memory busy


@dataclass(frozen=True)
class LaunchConfig:
    """Tile sizes and splits of a launch."""

    rows: int  # queries × heads of a group in one program
    tile: int  # keys of one step
    warps: int
    stages: int  # of the software pipeline of loads
    splits: int = 1  # programs that share the keys of a sequence
    min_tiles: int = MIN_TILES  # of one of them


def choose_config(q: Tensor, cache: LayerCache, metadata: AttentionMetadata, invariant: bool) -> LaunchConfig:
    """From sizes that the host knows and that are constant in a CUDA graph."""
    kv_heads, width = cache.keys.shape[1], power_of_two(q.shape[2])
    group = power_of_two(q.shape[1] // kv_heads)
    exact = q.dtype == torch.float32  # no tensor cores: small tiles, or registers spill
    few, warps, stages = (32, 8, 2) if exact else (64, 4, 3)
    quantized = cache.key_scales is not None
    tile = min(max(TILE_BYTES // (width * cache.keys.element_size()), 16), 32 if exact else 128)
    if invariant:
        return LaunchConfig(max(few, group), min(tile, 64), warps, stages)
    rows = max(16, power_of_two(metadata.max_query_len * group))
    if rows == few and quantized and not exact:
        tile, stages = min(tile, 64), 2  # with more, registers spill
    if rows <= few:
        walks, keys = metadata.seq_lens.shape[0] * kv_heads, metadata.block_tables.shape[1] * cache.size
        if not quantized and walks >= multiprocessors(q.device) * PROGRAMS_PER_MULTIPROCESSOR:
            tile = min(tile, 64)  # more programs are resident, and hide each other's latency
        splits, min_tiles = num_splits(walks, triton.cdiv(keys, tile), MIN_KEYS // tile, q.device)
        return LaunchConfig(rows, tile, warps, stages, splits, min_tiles)
    if quantized and not exact:
        return LaunchConfig(max(few, group), min(tile, 64), warps, 2)
    if exact or width > 128:
        return LaunchConfig(max(few, group), tile, warps, 2)
    if metadata.max_query_len <= SHORT_PROMPT or width <= 64:  # larger tiles would be partly empty
        return LaunchConfig(max(few, group), min(tile, 64), warps, stages)
    return LaunchConfig(max(128, group), tile, 8, 3)


def num_splits(walks: int, tiles: int, min_tiles_when_full: int, device: torch.device) -> tuple[int, int]:
    """Splits of each of `walks` (sequences × key heads) over up to `tiles` tiles of keys, and the fewest tiles of a
    split."""
    at_once = multiprocessors(device) * RESIDENT_PROGRAMS // max(walks, 1)
    splits = at_once if at_once > 1 else math.ceil(multiprocessors(device) * PROGRAMS_PER_MULTIPROCESSOR / walks)
    if at_once:
        return max(1, min(splits, triton.cdiv(tiles, MIN_TILES), MAX_SPLITS)), MIN_TILES
    # Many of the sequences may be padding: then a few long ones are all there is.
    parts = triton.cdiv(tiles, min_tiles_when_full)
    return max(1, min(max(splits, MAX_SPLITS_WHEN_FULL), parts)), min_tiles_when_full


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
    config: LaunchConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `paged_attention.reference`."""
    q = q.contiguous()
    if out is None:
        out = torch.empty_like(q) if metadata.max_query_len == 1 else torch.zeros_like(q)  # padding queries get 0
    if metadata.key_starts is not None:
        from . import prefill_attention_triton

        prefill_attention_triton.launch(q, cache, metadata, out)
        return out
    tokens, heads, head_dim = q.shape
    kv_heads, seqs = cache.keys.shape[1], metadata.seq_lens.shape[0]
    config = config or choose_config(q, cache, metadata, invariant)
    group = heads // kv_heads
    queries = config.rows // group  # of one program
    shared = None if invariant or window or slopes is not None else metadata.shared
    split = config.splits > 1 or shared is not None
    shared_splits = 0 if shared is None else num_shared_splits(shared, kv_heads, metadata, cache.size)
    slots = config.splits + shared_splits  # of partial results
    each = 1 if cache.key_scales is None else 2  # elements that are loaded as one word
    partials = q.new_empty((tokens, heads, slots, head_dim), dtype=torch.float32) if split else out
    lse = q.new_empty((tokens, heads, slots), dtype=torch.float32) if split else out
    traits = {
        "CACHE_MAX": 1.0 if cache.value_scales is None else CACHE_MAX[cache.values.dtype],
        "HEADS": heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "WIDTH": max(power_of_two(head_dim), 16 * each),
        "SIZE": cache.size,
        "SOFTCAP": softcap,
        **pdl_options(q.device),
    }
    strides = (
        metadata.block_tables.stride(0),
        cache.keys.stride(0) // each,
        cache.keys.stride(1) // each,
        0 if cache.key_scales is None else cache.key_scales.stride(0),
    )
    scale = math.log2(math.e) / math.sqrt(head_dim)
    if shared is not None:
        tile = min(config.tile, SHARED_ROWS)
        rows = max(16, SHARED_ROWS, power_of_two(group))
        shared_prefix_kernel[(shared_splits, kv_heads, shared.tile_starts.shape[0] - 1)](
            q,
            cache.keys,
            cache.values,
            cache.key_scales,
            cache.value_scales,
            partials,
            lse,
            metadata.block_tables,
            shared.lengths,
            shared.members,
            shared.tile_starts,
            scale,
            *strides,
            shared_splits,
            slots,
            ROWS=rows,
            TILE=tile,
            UNIT=SHARED_UNIT,
            MIN_UNITS=MIN_SHARED_UNITS,
            **traits,
            num_warps=4 if rows <= SHARED_ROWS else 8,
            num_stages=min(config.stages, 2 if each == 2 else 3),
        )
    attend_kernel[(config.splits if split else triton.cdiv(metadata.max_query_len, queries), kv_heads, seqs)](
        q,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        out,
        partials,
        lse,
        split_k_counters(q.device) if split else out,
        metadata.block_tables,
        metadata.seq_lens,
        metadata.query_start_loc,
        None if shared is None else shared.lengths,
        slopes,
        sinks,
        scale,
        *strides,
        config.splits,
        config.min_tiles,
        shared_splits,
        ROWS=config.rows,
        QUERIES=queries,
        TILE=config.tile,
        WINDOW=window,
        SPLIT=split,
        UNIT=SHARED_UNIT,
        MIN_UNITS=MIN_SHARED_UNITS,
        **traits,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def num_shared_splits(shared: SharedPrefixes, kv_heads: int, metadata: AttentionMetadata, size: int) -> int:
    """Splits of each shared prefix."""
    walks, keys = (shared.tile_starts.shape[0] - 1) * kv_heads, metadata.block_tables.shape[1] * size
    units = triton.cdiv(keys, SHARED_UNIT * MIN_SHARED_UNITS)
    return max(1, min(multiprocessors(metadata.seq_lens.device) * RESIDENT_PROGRAMS // walks, units, MAX_SPLITS))


@triton.jit
def key_tiles(
    length,
    queries,
    first,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Range of key tiles that queries first … first + QUERIES of a sequence see."""
    begin = length - queries + first  # position of the first query
    low = 0
    if WINDOW > 0:
        low = tl.maximum(begin - WINDOW + 1, 0) // TILE
    high = tl.cdiv(tl.maximum(tl.minimum(begin + QUERIES, length), 0), TILE)
    return low, high


@triton.jit
def tanh(x):
    """By a series near 0, where 2σ(2x) − 1 loses digits."""
    y = x * x
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def attend_tiles(
    acc,
    acc_odd,
    row_sum,
    row_max,
    q,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    length,
    position,
    slope,
    kv_head,
    scale,
    low,
    high,
    whole_low,
    whole_high,
    block_stride,
    head_stride,
    scale_stride,
    ALIBI: tl.constexpr,
    CACHE_MAX: tl.constexpr,
    INTEGER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Online softmax over key tiles low … high of a sequence; those of whole_low … whole_high need no mask."""
    QUANTIZED: tl.constexpr = k_scale_ptr is not None
    EACH: tl.constexpr = 2 if QUANTIZED else 1  # elements that are loaded as one word
    word = tl.arange(0, WIDTH // EACH)
    if QUANTIZED:
        q_even, q_odd = deinterleave(q)
    j = low * TILE + tl.arange(0, TILE)
    # Block numbers are loaded a tile ahead: a dependent load in the same iteration would take a pipeline stage of its
    # own.
    block = tl.load(table_ptr + j // SIZE, mask=j < length, other=0)
    for tile in range(low, high):
        # Nothing beyond the length is read: table entries and blocks there are uninitialised, and may be NaN.
        there = j < length
        row = block.to(tl.int64) * block_stride + kv_head * head_stride + (j % SIZE) * (HEAD_DIM // EACH)
        offsets = row[:, None] + word[None, :]
        held = there[:, None]
        if HEAD_DIM < WIDTH:
            held &= (word < HEAD_DIM // EACH)[None, :]
        k = tl.load(k_ptr + offsets, mask=held, other=0)
        v = tl.load(v_ptr + offsets, mask=held, other=0)
        if QUANTIZED:
            k_even, k_odd = unpack_8bit(k, INTEGER)
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
        if ALIBI:
            s -= (slope[:, None] / scale) * distance
        if (tile < whole_low) | (tile >= whole_high):
            seen = (distance >= 0) & there[None, :]
            if WINDOW > 0:
                seen &= distance < WINDOW
            s = tl.where(seen, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc *= rescale[:, None]
        if QUANTIZED:
            # Times the largest value of the format, as p would underflow in fp16.
            p *= (tl.load(v_scale_ptr + scale_offsets, mask=there, other=0.0) * CACHE_MAX)[None, :]
            v, v_odd = unpack_8bit(v, INTEGER)
            acc_odd = tl.dot(p.to(q.dtype), v_odd.to(q.dtype), acc_odd * rescale[:, None], input_precision="ieee")
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        row_max = new_max
        j += TILE
        block = tl.load(table_ptr + j // SIZE, mask=j < length, other=0)
    return acc, acc_odd, row_sum, row_max


# Compiled once for all numbers of splits, table widths and batch offsets: no recompilation while serving.
@triton.jit(
    do_not_specialize=["splits", "min_tiles", "shared_splits", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "lengths_ptr", "starts_ptr", "shared_ptr"],
)
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    partials_ptr,  # split: (tokens, heads, shared_splits + splits, head_dim)
    lse_ptr,  # split: (tokens, heads, shared_splits + splits)
    counters_ptr,  # split: (seqs, kv_heads)
    tables_ptr,
    lengths_ptr,
    starts_ptr,
    shared_ptr,  # (seqs): keys whose partial results are there already; None where no prefix is shared
    slopes_ptr,
    sinks_ptr,
    scale,  # log₂e / √head_dim: exponentials are powers of two
    table_stride,
    block_stride,
    head_stride,
    scale_stride,
    splits,
    min_tiles,
    shared_splits,
    CACHE_MAX: tl.constexpr,  # largest value of a quantized cache; 1: not quantized
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
    UNIT: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    PDL: tl.constexpr,
):
    QUANTIZED: tl.constexpr = k_scale_ptr is not None
    EACH: tl.constexpr = 2 if QUANTIZED else 1  # elements that are loaded as one word
    INTEGER: tl.constexpr = k_ptr.dtype.element_ty == tl.int8
    ALIBI: tl.constexpr = slopes_ptr is not None
    pdl_wait(PDL)
    kv_head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + seq)
    queries = tl.load(starts_ptr + seq + 1) - start
    length = tl.load(lengths_ptr + seq)
    # The last queries of a prompt see the most keys and are scheduled first, so that no long loop is left at the end.
    first = 0 if SPLIT else (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    low, high = key_tiles(length, queries, first, QUERIES, TILE, WINDOW)
    shared_parts = 0
    if shared_ptr is not None:
        prefix = tl.load(shared_ptr + seq)
        low = prefix // TILE
        _, shared_parts = prefix_parts(prefix, shared_splits, UNIT, MIN_UNITS)
    if SPLIT:
        each = tl.maximum(tl.cdiv(high - low, splits), min_tiles)
        active_splits = tl.cdiv(high - low, each)
        low += tl.program_id(0) * each
        if (first >= queries) | ((low >= high) & (tl.program_id(0) > 0)):
            return
        high = tl.minimum(low + each, high)
    elif first >= queries:
        return

    rows, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query, head = first + rows // GROUP, kv_head * GROUP + rows % GROUP
    live = (rows < QUERIES * GROUP) & (query < queries)
    inside = live[:, None] & (d < HEAD_DIM)[None, :]
    place = (start + query).to(tl.int64) * HEADS + head
    q = tl.load(q_ptr + place[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    if QUANTIZED:
        if q.dtype == tl.bfloat16:
            q = q.to(tl.float16)  # exact for all values of an 8-bit cache
        k_ptr, v_ptr = as_int16_pointer(k_ptr), as_int16_pointer(v_ptr)
    position = length - queries + query
    slope = tl.zeros((ROWS,), tl.float32)
    if ALIBI:
        # Divided by `scale` below, as scores are multiplied by it.
        slope = tl.load(slopes_ptr + head, mask=live, other=0.0) * 1.4426950408889634

    acc = tl.zeros((ROWS, WIDTH // EACH), tl.float32)
    acc_odd = acc
    row_sum = tl.zeros((ROWS,), tl.float32)
    # In units of log 2; finite, so that a row without visible keys gives 0 and not NaN.
    row_max = tl.full((ROWS,), -1e30, tl.float32)
    if sinks_ptr is not None:
        # A key whose value is 0, before all others; with splits in the first program only.
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        if SPLIT:
            begins = tl.program_id(0) == 0
            row_max, row_sum = tl.where(begins, sink, row_max), tl.where(begins, row_sum + 1.0, row_sum)
        else:
            row_max, row_sum = sink, row_sum + 1.0
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    # Tiles that every row sees in full: up to the first query, and from the last one's window on.
    whole_low, whole_high = low, (length - queries + first + 1) // TILE
    if WINDOW > 0:
        whole_low = tl.cdiv(tl.maximum(length - queries + first + QUERIES - WINDOW, 0), TILE)
    acc, acc_odd, row_sum, row_max = attend_tiles(
        acc, acc_odd, row_sum, row_max, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, length, position, slope,
        kv_head, scale, low, high, whole_low, whole_high, block_stride, head_stride, scale_stride, ALIBI,
        CACHE_MAX, INTEGER, HEAD_DIM, WIDTH, SIZE, TILE, WINDOW, SOFTCAP,
    )  # fmt: skip
    if QUANTIZED:
        acc = interleave(acc, acc_odd)
    acc = acc / tl.where(row_sum > 0, row_sum * CACHE_MAX, 1.0)[:, None]
    at = place[:, None].to(tl.int64) * HEAD_DIM + d[None, :]
    if SPLIT:
        parts = shared_parts + active_splits
        if parts > 1:
            slot = place.to(tl.int64) * (shared_splits + splits)
            own = slot + shared_parts + tl.program_id(0)
            tl.store(lse_ptr + own, row_max + tl.log2(row_sum), mask=live)
            tl.store(partials_ptr + own[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
            counter = counters_ptr + seq * tl.num_programs(1) + kv_head
            tl.debug_barrier()  # all threads have written before the counter is incremented
            if tl.atomic_add(counter, 1, sem="acq_rel") == active_splits - 1:
                merged = merge_splits(partials_ptr, lse_ptr, slot, live, parts, HEAD_DIM, WIDTH)
                tl.store(out_ptr + at, merged, mask=inside)
                tl.store(counter, 0)  # for the next launch
        else:
            tl.store(out_ptr + at, acc, mask=inside)
    else:
        tl.store(out_ptr + at, acc, mask=inside)


@triton.jit
def prefix_parts(prefix, splits, UNIT: tl.constexpr, MIN_UNITS: tl.constexpr):
    """Units of keys in a part of a shared prefix, and its number of parts."""
    units = prefix // UNIT
    each = tl.maximum(tl.cdiv(units, splits), MIN_UNITS)
    return each, tl.cdiv(units, each)


@triton.jit(
    do_not_specialize=["splits", "slots", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "prefixes_ptr", "members_ptr", "tile_starts_ptr"],
)
def shared_prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    partials_ptr,
    lse_ptr,
    tables_ptr,
    prefixes_ptr,
    members_ptr,
    tile_starts_ptr,
    scale,
    table_stride,
    block_stride,
    head_stride,
    scale_stride,
    splits,
    slots,
    CACHE_MAX: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial results of decoding sequences over a prefix that they share; a program takes a tile of sequences."""
    QUANTIZED: tl.constexpr = k_scale_ptr is not None
    EACH: tl.constexpr = 2 if QUANTIZED else 1
    INTEGER: tl.constexpr = k_ptr.dtype.element_ty == tl.int8
    pdl_wait(PDL)
    part, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(tile_starts_ptr + tile)
    count = tl.load(tile_starts_ptr + tile + 1) - begin
    if count <= 0:
        return
    first = tl.load(members_ptr + begin)
    prefix = tl.load(prefixes_ptr + first)
    each, parts = prefix_parts(prefix, splits, UNIT, MIN_UNITS)
    if part >= parts:
        return
    low, high = part * each * (UNIT // TILE), tl.minimum((part + 1) * each * UNIT, prefix) // TILE
    rows, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    live = rows // GROUP < count
    sequence = tl.load(members_ptr + begin + rows // GROUP, mask=live, other=0)
    inside = live[:, None] & (d < HEAD_DIM)[None, :]
    place = sequence.to(tl.int64) * HEADS + kv_head * GROUP + rows % GROUP
    q = tl.load(q_ptr + place[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    if QUANTIZED:
        if q.dtype == tl.bfloat16:
            q = q.to(tl.float16)
        k_ptr, v_ptr = as_int16_pointer(k_ptr), as_int16_pointer(v_ptr)
    acc = tl.zeros((ROWS, WIDTH // EACH), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_max = tl.full((ROWS,), -1e30, tl.float32)
    position = tl.zeros((ROWS,), tl.int32) + prefix  # all keys are seen
    table_ptr = tables_ptr + first.to(tl.int64) * table_stride
    acc, acc_odd, row_sum, row_max = attend_tiles(
        acc, acc, row_sum, row_max, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, prefix, position, row_sum,
        kv_head, scale, low, high, low, high, block_stride, head_stride, scale_stride, False,
        CACHE_MAX, INTEGER, HEAD_DIM, WIDTH, SIZE, TILE, 0, SOFTCAP,
    )  # fmt: skip
    if QUANTIZED:
        acc = interleave(acc, acc_odd)
    acc = acc / (row_sum * CACHE_MAX)[:, None]
    slot = place * slots + part
    tl.store(lse_ptr + slot, row_max + tl.log2(row_sum), mask=live)
    tl.store(partials_ptr + slot[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)


@triton.jit
def merge_splits(partials_ptr, lse_ptr, first, live, active_splits, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Partial results of rows, from index `first` (rows) on, weighted by e^lse: (rows, WIDTH)."""
    d = tl.arange(0, WIDTH)
    at_once: tl.constexpr = max(1, 64 // live.shape[0])  # partial results that are loaded together
    acc = tl.zeros((live.shape[0], WIDTH), tl.float32)
    row_sum = tl.zeros((live.shape[0],), tl.float32)
    row_max = tl.full((live.shape[0],), -1e30, tl.float32)
    for begin in range(0, active_splits, at_once):
        for i in tl.static_range(at_once):
            part = first + begin + i
            there = live & (part < first + active_splits)
            lse = tl.load(lse_ptr + part, mask=there, other=float("-inf"))
            inside = there[:, None] & (d < HEAD_DIM)[None, :]
            mixture = tl.load(partials_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
            new_max = tl.maximum(row_max, lse)
            rescale, weight = tl.exp2(row_max - new_max), tl.exp2(lse - new_max)
            acc = acc * rescale[:, None] + mixture * weight[:, None]
            row_sum = row_sum * rescale + weight
            row_max = new_max
    return acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
