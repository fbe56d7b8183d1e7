"""The attention backend: keys and values are written to the paged KV cache, and queries attend to it.

It replaces dense attention as `attend(q, k, v, layer)`. Attention with a merged QKV projection (`engine.core.fusion`)
passes the projection itself, `attend.attend_qkv(…)`: one kernel normalises, rotates and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.inference.kv_cache_write import write_kv_cache
from ...kernels.inference.paged_attention import AttentionMetadata, LayerCache, paged_attention
from ...kernels.inference.paged_decode import paged_decode

Rotary = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class PagedAttention:
    """Attention of one step over a flat batch: the tokens of all sequences, concatenated."""

    caches: Sequence[LayerCache]  # by layer
    slot_mapping: Tensor  # (tokens) int64: cache slot of each token's key and value; −1: none
    metadata: Sequence[AttentionMetadata]  # of decoding sequences and of prefills: each has a kernel of its own
    num_decodes: int  # tokens of decoding sequences, where there are both
    options: Mapping[str, Any]  # of the kernels: `model.attention.paged_options`
    invariant: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, **per_head: Tensor) -> Tensor:
        """q (…, tokens, heads, head_dim), k and v (…, tokens, kv_heads, head_dim), normalised and rotated."""
        qkv = torch.cat([x.flatten(-2) for x in (q, k, v)], dim=-1).flatten(0, -2)
        mixed = self.attend_qkv(qkv, q.shape[-2], k.shape[-2], None, None, 0.0, None, layer, **per_head)
        return mixed.view(q.shape)

    def attend_qkv(
        self,
        qkv: Tensor,  # (tokens, (heads + 2·kv_heads)·head_dim)
        heads: int,
        kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        rotary: Rotary,
        layer: int,
        **per_head: Tensor,  # (heads)
    ) -> Tensor:
        """Normalise, rotate, store, attend: (tokens, heads, head_dim)."""
        cache = self.caches[layer]
        q = write_kv_cache(qkv, heads, kv_heads, q_norm, k_norm, eps, rotary, cache, self.slot_mapping)
        if len(self.metadata) == 1:
            return self.attend(q, cache, self.metadata[0], per_head)
        parts = (q[: self.num_decodes], q[self.num_decodes :])
        return torch.cat(
            [self.attend(part, cache, metadata, per_head) for part, metadata in zip(parts, self.metadata, strict=True)]
        )

    def attend(
        self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata, per_head: Mapping[str, Tensor]
    ) -> Tensor:
        options = {**self.options, **per_head}
        if metadata.max_query_len == 1 and q.device.type == "cpu" and not self.invariant:
            return paged_decode(q, cache, metadata, **options)
        return paged_attention(q, cache, metadata, invariant=self.invariant, **options)
