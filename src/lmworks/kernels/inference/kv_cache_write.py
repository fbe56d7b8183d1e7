"""From the QKV projection of a layer to its KV cache: split, normalise, rotate, quantize, write.

Five small operations on data that is read once; on a GPU one kernel does them all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import rms_norm
from ..rope import rotate
from .paged_attention import CACHE_MAX, LayerCache

MIN_SCALE = 1e-20  # of a vector of zeros


def write_kv_cache(
    qkv: Tensor,  # (tokens, (heads + 2·kv_heads)·head_dim)
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None,  # (head_dim): weight of the RMSNorm of every query head
    k_norm: Tensor | None,
    eps: float,
    cos_sin: tuple[Tensor, Tensor] | None,  # (cos, cos) and (−sin, sin), each (tokens, 1, head_dim)
    cache: LayerCache,
    slot_mapping: Tensor,  # (tokens) int64: block·size + offset of a token's key and value; −1: none
) -> Tensor:
    """Write keys and values to their slots, return normalised, rotated queries: (tokens, heads, head_dim)."""
    if qkv.device.type == "cuda":
        from .kv_cache_write_triton import launch

        return launch(qkv, heads, kv_heads, q_norm, k_norm, eps, cos_sin, cache, slot_mapping)
    return reference(qkv, heads, kv_heads, q_norm, k_norm, eps, cos_sin, cache, slot_mapping)


def reference(
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
    """Step by step, rounded as in the model."""
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm.rms_norm(q, q_norm, eps), rms_norm.rms_norm(k, k_norm, eps)
    if cos_sin is not None:
        q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
    write(cache.keys, cache.key_scales, k, slot_mapping)
    write(cache.values, cache.value_scales, v, slot_mapping)
    return q.contiguous()


def write_vectors(cache: LayerCache, x: Tensor, slot_mapping: Tensor) -> None:
    """Latent vectors (tokens, 1, width), which are keys and values at once."""
    if x.device.type == "cuda":
        from .kv_cache_write_triton import launch_vectors

        launch_vectors(cache, x, slot_mapping)
    else:
        write(cache.keys, cache.key_scales, x, slot_mapping)


def write(pool: Tensor, scales: Tensor | None, x: Tensor, slot_mapping: Tensor) -> None:
    """pool[block, :, offset] = x (tokens, kv_heads, head_dim) for every slot that is not −1."""
    x, slot_mapping = x[slot_mapping >= 0], slot_mapping[slot_mapping >= 0]
    block, offset = slot_mapping // pool.shape[2], slot_mapping % pool.shape[2]
    if scales is None:
        pool[block, :, offset] = x.to(pool.dtype)
        return
    stored, scale = quantize(x, pool.dtype)
    # Bytes: PyTorch cannot index 8-bit floats on every device.
    pool.view(torch.uint8)[block, :, offset] = stored.view(torch.uint8)
    scales[block, :, offset] = scale


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x ≈ stored · scale; the scale maps the largest element of a head to the largest value of the format."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1).div(CACHE_MAX[dtype]).clamp(min=MIN_SCALE)
    scaled = wide / scale.unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale
