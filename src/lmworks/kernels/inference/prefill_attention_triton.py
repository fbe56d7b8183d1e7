"""Attention of long prompts on a GPU with a tensor memory accelerator (TMA: Hopper and later).

Keys and values of a paged cache lie in small blocks, and computing the address of every row takes a quarter of the time
of attention over a long prompt. Here they are gathered first: a copy, which takes 3 % of that time, puts those of a
sequence side by side, 8-bit ones widened. Tiles are then loaded by descriptors, as in `training.flash_forward_triton`.

As in `paged_attention_triton` a program takes queries of all heads that share a key head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..triton_support import pdl_options, pdl_wait, tl, triton
from .paged_attention import GATHER_UNIT, AttentionMetadata, LayerCache
from .paged_attention_triton import LaunchConfig, key_tiles

# Tiles by head_dim; for 128 the fastest on an H200 (benchmarks/results/prefill_attention.txt), 64 was not timed.
CONFIGS = {64: LaunchConfig(128, 64, 4, 3), 128: LaunchConfig(64, 64, 4, 3)}


def launch(
    q: Tensor, cache: LayerCache, metadata: AttentionMetadata, out: Tensor, config: LaunchConfig | None = None
) -> None:
    """As `paged_attention.reference` without options, into `out`; `metadata` has `key_starts`."""
    heads, head_dim = q.shape[1:]
    kv_heads, seqs = cache.keys.shape[1], metadata.seq_lens.shape[0]
    config = config or CONFIGS[head_dim]
    queries = config.rows // (heads // kv_heads)  # of one program
    keys, values = gather(cache, metadata, q.dtype)
    attend_kernel[(triton.cdiv(metadata.max_query_len, queries), kv_heads, seqs)](
        q,
        descriptor(keys, config.tile),
        descriptor(values, config.tile),
        out,
        metadata.key_starts,
        metadata.seq_lens,
        metadata.query_start_loc,
        math.log2(math.e) / math.sqrt(head_dim),
        metadata.keys,
        HEADS=heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        ROWS=config.rows,
        QUERIES=queries,
        TILE=config.tile,
        **pdl_options(q.device),
        num_warps=config.warps,
        num_stages=config.stages,
    )


def descriptor(x: Tensor, rows: int) -> Any:
    """For tiles of `rows` rows of x (rows, head_dim)."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

    return TensorDescriptor.from_tensor(x, [rows, x.shape[1]])


def gather(cache: LayerCache, metadata: AttentionMetadata, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of all sequences: (kv_heads · keys, head_dim), zeros where a sequence ends within a unit."""
    kv_heads, size, head_dim = cache.keys.shape[1:]
    shape = (kv_heads * metadata.keys, head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=cache.keys.device) for _ in range(2))
    longest = min(metadata.keys, metadata.block_tables.shape[1] * size)
    gather_kernel[(triton.cdiv(longest, GATHER_UNIT), kv_heads, metadata.seq_lens.shape[0])](
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        keys,
        values,
        metadata.block_tables,
        metadata.key_starts,
        metadata.seq_lens,
        metadata.block_tables.stride(0),
        cache.keys.stride(0),
        cache.keys.stride(1),
        0 if cache.key_scales is None else cache.key_scales.stride(0),
        metadata.keys,
        HEAD_DIM=head_dim,
        SIZE=size,
        UNIT=GATHER_UNIT,
        **pdl_options(cache.keys.device),
        num_warps=8,
    )
    return keys, values


@triton.jit
def copy_rows(source_ptr, scale_ptr, target_ptr, rows, scale_rows, target, there, d, HEAD_DIM: tl.constexpr):
    x = tl.load(source_ptr + rows[:, None] + d[None, :], mask=there[:, None], other=0.0)
    if scale_ptr is not None:
        x = x.to(tl.float32) * tl.load(scale_ptr + scale_rows, mask=there, other=0.0)[:, None]
    tl.store(target_ptr + target[:, None] * HEAD_DIM + d[None, :], x.to(target_ptr.dtype.element_ty))


@triton.jit(
    do_not_specialize=["table_stride", "total"],
    do_not_specialize_on_alignment=["tables_ptr", "key_starts_ptr", "lengths_ptr"],
)
def gather_kernel(
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    key_starts_ptr,
    lengths_ptr,
    table_stride,
    block_stride,
    head_stride,
    scale_stride,
    total,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    first, head, seq = tl.program_id(0) * UNIT, tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + seq)
    if first >= length:
        return
    j, d = first + tl.arange(0, UNIT), tl.arange(0, HEAD_DIM)
    there = j < length
    block = tl.load(tables_ptr + seq.to(tl.int64) * table_stride + j // SIZE, mask=there, other=0).to(tl.int64)
    rows = block * block_stride + head * head_stride + (j % SIZE) * HEAD_DIM
    scale_rows = block * scale_stride + head * SIZE + j % SIZE
    target = head.to(tl.int64) * total + tl.load(key_starts_ptr + seq) + j
    copy_rows(k_ptr, k_scale_ptr, keys_ptr, rows, scale_rows, target, there, d, HEAD_DIM)
    copy_rows(v_ptr, v_scale_ptr, values_ptr, rows, scale_rows, target, there, d, HEAD_DIM)


@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=["key_starts_ptr", "lengths_ptr", "starts_ptr"])
def attend_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    key_starts_ptr,
    lengths_ptr,
    starts_ptr,
    scale,  # log₂e / √head_dim: exponentials are powers of two
    total,  # keys of a head
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    kv_head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + seq)
    queries = tl.load(starts_ptr + seq + 1) - start
    # The last queries of a prompt see the most keys and are scheduled first, so that no long loop is left at the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if first >= queries:
        return
    length = tl.load(lengths_ptr + seq)
    _, high = key_tiles(length, queries, first, QUERIES, TILE, 0)
    rows, d = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    query, head = first + rows // GROUP, kv_head * GROUP + rows % GROUP
    live = (rows < QUERIES * GROUP) & (query < queries)
    place = (start + query).to(tl.int64) * HEADS + head
    q = tl.load(q_ptr + place[:, None] * HEAD_DIM + d[None, :], mask=live[:, None], other=0.0)
    position = length - queries + query
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_max = tl.full((ROWS,), -1e30, tl.float32)
    base = kv_head * total + tl.load(key_starts_ptr + seq)
    whole = (length - queries + first + 1) // TILE  # tiles that every row sees in full
    acc, row_sum, row_max = attend_tiles(
        acc, row_sum, row_max, q, k_desc, v_desc, base, position, scale, 0, whole, False, TILE
    )
    acc, row_sum, row_max = attend_tiles(
        acc, row_sum, row_max, q, k_desc, v_desc, base, position, scale, whole, high, True, TILE
    )
    acc = acc / row_sum[:, None]
    tl.store(out_ptr + place[:, None] * HEAD_DIM + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def attend_tiles(
    acc, row_sum, row_max, q, k_desc, v_desc, base, position, scale, low, high, MASKED: tl.constexpr, TILE: tl.constexpr
):
    """Online softmax over key tiles low … high."""
    for tile in tl.range(low, high):
        k = k_desc.load([base + tile * TILE, 0])
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            s = tl.where(position[:, None] >= (tile * TILE + tl.arange(0, TILE))[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc *= rescale[:, None]
        v = v_desc.load([base + tile * TILE, 0])
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max
