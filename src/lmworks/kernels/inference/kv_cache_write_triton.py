"""`kv_cache_write` in one kernel: a program takes one token and a few of its heads.

Heads of queries, keys and values are concatenated, (tokens, heads + 2·kv_heads, head_dim); the number of heads of a
program divides both counts, so that all of its heads are queries, keys or values.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..triton_support import pdl_options, pdl_wait, power_of_two, tl, triton
from .kv_cache_write import MIN_SCALE
from .paged_attention import CACHE_MAX, LayerCache

MOST_HEADS = 8  # of one program


def launch(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: tuple[Tensor, Tensor] | None,
    cache: LayerCache,
    slot_mapping: Tensor,
) -> Tensor:
    """As `kv_cache_write.reference`."""
    tokens, head_dim = qkv.shape[0], cache.keys.shape[3]
    q = qkv.new_empty((tokens, heads, head_dim))
    part = math.gcd(heads, kv_heads, MOST_HEADS)
    width = power_of_two(head_dim)
    cos, sin = cos_sin or (None, None)
    write_kv_cache_kernel[(tokens * ((heads + 2 * kv_heads) // part),)](
        qkv,
        q,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        q_norm,
        k_norm,
        cos,
        sin,
        slot_mapping,
        eps,
        qkv.stride(0),
        cache.keys.stride(0),
        cache.keys.stride(1),
        0 if cache.key_scales is None else cache.key_scales.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        PART=part,
        SIZE=cache.size,
        CACHE_MAX=CACHE_MAX.get(cache.keys.dtype, 0.0),
        MIN_SCALE=MIN_SCALE,
        INTEGER=cache.keys.dtype == torch.int8,
        num_warps=max(1, min(4, part * width // 256)),
        **pdl_options(qkv.device),
    )
    return q


def launch_vectors(cache: LayerCache, x: Tensor, slot_mapping: Tensor) -> None:
    """As `kv_cache_write.write` of x (tokens, 1, width) into `cache.keys`."""
    width = x.shape[-1]
    write_vectors_kernel[(len(x),)](
        x.contiguous(),
        cache.keys,
        cache.key_scales,
        slot_mapping,
        cache.keys.stride(0),
        cache.keys.stride(1),
        0 if cache.key_scales is None else cache.key_scales.stride(0),
        HEAD_DIM=width,
        WIDTH=power_of_two(width),
        SIZE=cache.size,
        CACHE_MAX=CACHE_MAX.get(cache.keys.dtype, 0.0),
        MIN_SCALE=MIN_SCALE,
        INTEGER=cache.keys.dtype == torch.int8,
        num_warps=4,
        **pdl_options(x.device),
    )


@triton.jit
def norm_and_rope(x_ptr, row, d, inside, norm_ptr, cos_ptr, sin_ptr, token, eps, HEAD_DIM: tl.constexpr):
    """Normalised and rotated heads, rounded after each step as in the model."""
    given = tl.load(x_ptr + row + d[None, :], mask=inside, other=0.0)
    x = given.to(tl.float32)
    there = d < HEAD_DIM
    partner = tl.where(d < HEAD_DIM // 2, d + HEAD_DIM // 2, d - HEAD_DIM // 2)  # the other element of its pair
    other = x
    if cos_ptr is not None:
        other = tl.load(x_ptr + row + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        r = 1 / tl.sqrt_rn(tl.sum(x * x, 1) / HEAD_DIM + eps)
        weight = tl.load(norm_ptr + d, mask=there, other=0.0).to(tl.float32)
        x = (x * r[:, None] * weight[None, :]).to(given.dtype).to(tl.float32)
        if cos_ptr is not None:
            weight = tl.load(norm_ptr + partner, mask=there, other=0.0).to(tl.float32)
            other = (other * r[:, None] * weight[None, :]).to(given.dtype).to(tl.float32)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + token * HEAD_DIM + d, mask=there, other=0.0)
        sin = tl.load(sin_ptr + token * HEAD_DIM + d, mask=there, other=0.0)
        x = x * cos[None, :] + other * sin[None, :]
    return x.to(given.dtype)


@triton.jit
def store(
    x,  # (PART, WIDTH)
    pool_ptr,
    scales_ptr,
    head,  # (PART)
    d,
    inside,
    slot,
    block_stride,
    head_stride,
    scale_stride,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    CACHE_MAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Store heads of one token to their slot, with their scales if the cache is quantized."""
    block, offset = slot // SIZE, slot % SIZE
    if scales_ptr is not None:
        x = x.to(tl.float32)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), CACHE_MAX), MIN_SCALE)
        x = tl.div_rn(x, scale[:, None])
        if INTEGER:
            x = (x + 12582912.0) - 12582912.0  # 1.5·2²³: rounds to an integer, half to even
        tl.store(scales_ptr + block * scale_stride + head * SIZE + offset, scale)
    row = block * block_stride + head * head_stride + offset * HEAD_DIM
    tl.store(pool_ptr + row[:, None] + d[None, :], x.to(pool_ptr.dtype.element_ty), mask=inside)


@triton.jit
def write_kv_cache_kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_mapping_ptr,
    eps,
    row_stride,
    block_stride,
    head_stride,
    scale_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    CACHE_MAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    INTEGER: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    parts = (HEADS + 2 * KV_HEADS) // PART
    token, first = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * PART
    part, d = tl.arange(0, PART), tl.arange(0, WIDTH)
    inside = (part >= 0)[:, None] & (d < HEAD_DIM)[None, :]
    row = (token * row_stride + (first + part) * HEAD_DIM)[:, None]
    if first < HEADS:
        q = norm_and_rope(qkv_ptr, row, d, inside, q_norm_ptr, cos_ptr, sin_ptr, token, eps, HEAD_DIM)
        tl.store(q_ptr + (token * HEADS + first + part)[:, None] * HEAD_DIM + d[None, :], q, mask=inside)
        return
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    if first < HEADS + KV_HEADS:
        k = norm_and_rope(qkv_ptr, row, d, inside, k_norm_ptr, cos_ptr, sin_ptr, token, eps, HEAD_DIM)
        store(
            k, k_ptr, k_scale_ptr, first - HEADS + part, d, inside, slot, block_stride, head_stride, scale_stride,
            HEAD_DIM, SIZE, CACHE_MAX, MIN_SCALE, INTEGER,
        )  # fmt: skip
    else:
        v = tl.load(qkv_ptr + row + d[None, :], mask=inside, other=0.0)
        store(
            v, v_ptr, v_scale_ptr, first - HEADS - KV_HEADS + part, d, inside, slot, block_stride, head_stride,
            scale_stride, HEAD_DIM, SIZE, CACHE_MAX, MIN_SCALE, INTEGER,
        )  # fmt: skip


@triton.jit
def write_vectors_kernel(
    x_ptr,
    pool_ptr,
    scales_ptr,
    slot_mapping_ptr,
    block_stride,
    head_stride,
    scale_stride,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    CACHE_MAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    INTEGER: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    head = tl.arange(0, 1)
    inside = (head >= 0)[:, None] & (d < HEAD_DIM)[None, :]
    x = tl.load(x_ptr + token * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    store(
        x, pool_ptr, scales_ptr, head, d, inside, slot, block_stride, head_stride, scale_stride, HEAD_DIM, SIZE,
        CACHE_MAX, MIN_SCALE, INTEGER,
    )  # fmt: skip
