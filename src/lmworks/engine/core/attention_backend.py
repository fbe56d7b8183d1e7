"""The attention backend of the engine: keys and values go to their pages, and queries look them up there.

It stands in for dense attention as `attend(q, k, v, layer)`. Attention whose projections were merged
(`engine.core.fusion`) hands over the projection as it is, `attend.projected(…)`, and one kernel does all that lies
before the lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.inference.kv_cache_write import place
from ...kernels.inference.paged_attention import LayerCache, Pages, paged_attention
from ...kernels.inference.paged_decode import decode

Turn = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class PagedAttention:
    """One step's batch: tokens of all sequences one after another."""

    caches: Sequence[LayerCache]  # by layer
    slots: Tensor  # (tokens) int64: where each token's key and value go; −1: nowhere
    pages: Sequence[Pages]  # of the sequences that decode, and of those that compute more: each has a kernel of its own
    decoding: int  # tokens of the first, where there are both
    window: int = 0
    slopes: Tensor | None = None  # (heads) fp32: ALiBi's
    invariant: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q (…, tokens, heads, head_dim), k and v (…, tokens, kv_heads, head_dim), all ready to attend."""
        qkv = torch.cat([x.flatten(-2) for x in (q, k, v)], dim=-1).flatten(0, -2)
        return self.projected(qkv, q.shape[-2], k.shape[-2], None, None, 0.0, None, layer).view(q.shape)

    def projected(
        self,
        qkv: Tensor,  # (tokens, (heads + 2·kv_heads)·head_dim)
        heads: int,
        kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        turn: Turn,
        layer: int,
    ) -> Tensor:
        """Normalise, rotate, store, attend: (tokens, heads, head_dim)."""
        cache = self.caches[layer]
        q = place(qkv, heads, kv_heads, q_norm, k_norm, eps, turn, cache, self.slots)
        if len(self.pages) == 1:
            return self.attend(q, cache, self.pages[0])
        parts = (q[: self.decoding], q[self.decoding :])
        return torch.cat([self.attend(part, cache, pages) for part, pages in zip(parts, self.pages, strict=True)])

    def attend(self, q: Tensor, cache: LayerCache, pages: Pages) -> Tensor:
        if pages.longest_query == 1 and q.device.type == "cpu" and not self.invariant:
            return decode(q, cache, pages, self.window, self.slopes)
        return paged_attention(q, cache, pages, window=self.window, slopes=self.slopes, invariant=self.invariant)
