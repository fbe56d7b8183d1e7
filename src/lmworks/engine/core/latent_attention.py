"""Multi-head latent attention for inference: the KV cache keeps the latent vectors themselves.

The projection from latent vectors to keys and values is absorbed: queries are multiplied with its key part before
attention, mixed latent vectors with its value part after it. Per token and layer the cache holds
kv_lora_rank + rope_head_dim numbers, whatever the number of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from ...kernels.inference.kv_cache_write import write_vectors
from ...kernels.inference.latent_attention import paged_latent_attention
from ...model.gpt import LatentAttention, Rotary
from ..quantization.quantized_model import QuantLinear
from .kv_cache import PagedAttention


class AbsorbedLatentAttention(nn.Module):
    """model.gpt.LatentAttention over the paged cache of latent vectors."""

    w_uk: Tensor  # (heads, nope, rank): the key part of the absorbed projection
    w_uv: Tensor  # (heads, v, rank): its value part

    def __init__(self, module: LatentAttention, apply: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.apply_linear = module, apply
        self.rank = module.kv_norm.normalized_shape[0]
        self.scale = (module.nope_dim + module.rope_dim) ** -0.5 * module.score_scale
        heads = dense_weight(module.kv_b).unflatten(0, (-1, module.nope_dim + module.v_dim))  # (heads, nope + v, rank)
        dtype = module.kv_norm.weight.dtype
        for name, part in zip(("w_uk", "w_uv"), heads.split((module.nope_dim, module.v_dim), dim=1), strict=True):
            self.register_buffer(name, part.to(dtype).contiguous())
        del module.kv_b  # its numbers are in `w_uk` and `w_uv`

    def forward(self, x: Tensor, rotary: Rotary, backend: PagedAttention) -> Tensor:
        """x (tokens, hidden)."""
        assert rotary is not None
        q, latents = by_rows(self.project, backend.invariant, x, *rotary)
        mixed = self.attend(q, latents, backend)
        return by_rows(self.output, backend.invariant, mixed)[0]

    def project(self, x: Tensor, *rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Queries in the latent space (tokens, heads, width), and what the cache keeps (tokens, 1, width)."""
        cos, sin = rotary
        q_nope, q_rope, latent, k_rope = self.module.latents(x, (cos, sin), self.apply_linear)
        q_latent = torch.einsum("thn,hnr->thr", q_nope, self.w_uk)
        return torch.cat((q_latent, q_rope), dim=-1), torch.cat((latent.unsqueeze(-2), k_rope), dim=-1)

    def output(self, mixed: Tensor) -> tuple[Tensor]:
        values = torch.einsum("thr,hvr->thv", mixed, self.w_uv).flatten(-2)
        return (self.apply_linear(self.module.out, values),)

    def attend(self, q: Tensor, latents: Tensor, backend: PagedAttention) -> Tensor:
        """Store latent vectors, attend with queries as wide: (tokens, heads, rank)."""
        layer = self.module.layer
        cache = backend.caches[layer]
        write_vectors(cache, latents, backend.slot_mapping)
        parts = (q,) if len(backend.metadata) == 1 else (q[: backend.num_decodes], q[backend.num_decodes :])
        options = {"rank": self.rank, "scale": self.scale, "window": backend.options[layer]["window"]}
        return torch.cat(
            [
                paged_latent_attention(part, cache, metadata, invariant=backend.invariant, **options)
                for part, metadata in zip(parts, backend.metadata, strict=True)
            ]
        )


def by_rows(function: Callable[..., tuple[Tensor, ...]], invariant: bool, *x: Tensor) -> tuple[Tensor, ...]:
    """`function` of all tokens; where batch invariance is asked for, one token at a time."""
    if not invariant:
        return function(*x)
    rows = [function(*row) for row in zip(*(each.split(1) for each in x), strict=True)]
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))


def dense_weight(layer: nn.Module) -> Tensor:
    """Of a linear layer, quantized or not."""
    if isinstance(layer, QuantLinear):
        return layer.scheme.dequantize(layer.weight, layer.scale)
    return cast(Tensor, layer.weight).detach()
