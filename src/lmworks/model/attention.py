"""Attention backends: the only part of the network that changes between training, generation and serving.

A backend is called as `attend(q, k, v, layer, **per_head)` with q (batch, seq, heads, head_dim) and k, v
(batch, seq, kv_heads, head_dim), and returns the mixture of values for each query head. `per_head`: learned parameters
of the softmax with one entry for each query head (`gpt.Attention.per_head`). `Dense` covers training and the KV cache;
the engine's `PagedAttention` attends over pages. All of them take a `Pattern`: the keys that each query attends to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.dispatch import fastest
from ..kernels.scores import sink_softmax, soft_cap
from ..kernels.training.flash_attention import DocumentBounds, flash_attention
from ..spec import ModelSpec, SpecError, components

Attend = Callable[..., Tensor]  # (q, k, v, layer, **per_head)


def alibi_slopes(heads: int) -> list[float]:
    """Geometric slopes 2^(−8i/n) (Press et al. 2022); for other head counts, every second one of the next power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    extra = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return slopes + extra


@dataclass(frozen=True)
class Pattern:
    """Causal, optionally within a window, within documents, or with ALiBi's penalty on distance."""

    window: int = 0  # keys that a query sees, itself included; 0: all before it
    slopes: tuple[float, ...] = ()  # ALiBi's, one for each query head that is here; empty: no ALiBi
    documents: Tensor | None = None  # (batch, seq): index of the document that a position belongs to
    offset: int = 0  # position of the first query among the keys: what a KV cache already holds
    softcap: float = 0.0  # of scores, before ALiBi's penalty and the mask; 0: none

    @property
    def plain(self) -> bool:
        return not (self.window or self.slopes or self.offset or self.softcap) and self.documents is None

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """True where a query may attend: (queries, keys), or (batch, 1, queries, keys) with documents."""
        q = torch.arange(queries, device=device).unsqueeze(1) + self.offset
        k = torch.arange(keys, device=device)
        allowed = k <= q
        if self.window:
            allowed &= k > q - self.window
        if self.documents is not None:
            same = self.documents.unsqueeze(2) == self.documents.unsqueeze(1)
            allowed = (allowed & same).unsqueeze(1)
        return allowed

    def bias(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """What is added to the scores: −∞ where it may not attend, ALiBi's penalty elsewhere."""
        allowed = self.mask(queries, keys, device)
        bias = torch.zeros(allowed.shape, device=device).masked_fill(~allowed, -math.inf)
        if self.slopes:
            q = torch.arange(queries, device=device).unsqueeze(1) + self.offset
            distance = q - torch.arange(keys, device=device)
            slopes = torch.tensor(self.slopes, device=device).view(-1, 1, 1)
            bias = bias - slopes * distance
        return bias


def reference(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, sinks: Tensor | None = None) -> Tensor:
    """Attention as it is written on paper: softmax(cap(q·kᵀ/√d) + bias)·v, every score in memory."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, heads, seq, head_dim)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(2, 3)).float() / math.sqrt(q.shape[-1])
    scores = soft_cap(scores, pattern.softcap) + pattern.bias(q.shape[2], k.shape[2], q.device)
    p = sink_softmax(scores, None if sinks is None else sinks.view(-1, 1, 1))
    return (p.type_as(v) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """PyTorch's fused attention. `mask` spells a pattern out (bool, or what to add); the plain one is just `causal`.

    Of its kernels PyTorch takes cuDNN's first on a Hopper GPU where cuDNN is newer than 9.15, as it is from 2.11 on.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    width = v.shape[-1]
    if q.device.type == "cpu" and width < q.shape[-1]:  # the fused kernel of a CPU takes heads of one width
        v = F.pad(v, (0, q.shape[-1] - width))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)
    return out[..., :width].transpose(1, 2)


@functools.cache
def flex_kernel(device_type: str) -> Any:
    """FlexAttention: compiled to a block-sparse kernel on a GPU, run op by op on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if device_type == "cuda" else flex_attention


def flex_block_mask(pattern: Pattern, batch: int, queries: int, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    documents = pattern.documents

    def visible(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q + pattern.offset
        allowed = k <= q
        if pattern.window:
            allowed = allowed & (k > q - pattern.window)
        if documents is not None:
            allowed = allowed & (documents[b, q] == documents[b, k])
        return allowed

    rows = batch if documents is not None else None
    return create_block_mask(visible, rows, None, queries, keys, device=str(device))


def flex(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, block_mask: Any, sinks: Tensor | None = None) -> Tensor:
    """Block-sparse attention: masked-out blocks of documents and windows are never computed."""
    if q.device.type == "cpu" and q.requires_grad:
        works = "reference" if pattern.softcap or sinks is not None else "sdpa"
        raise SpecError(
            f"model.attention = 'flex' cannot train on a CPU (PyTorch has no backward for it); use '{works}'"
        )
    score_mod = None
    if pattern.slopes or pattern.softcap:
        slopes = torch.tensor(pattern.slopes, device=q.device)

        def score_mod(score: Tensor, _b: Tensor, h: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            score = soft_cap(score, pattern.softcap)
            return score - slopes[h] * (q_pos + pattern.offset - k_pos) if pattern.slopes else score

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    # Left to itself, grouped-query attention below 128 positions goes to a decoding kernel that cannot be built (2.11).
    options: Any = {"BACKEND": "TRITON"} if q.device.type == "cuda" else None
    call = functools.partial(flex_kernel(q.device.type), q, k, v, score_mod, block_mask, kernel_options=options)
    if sinks is None:
        return call(enable_gqa=gqa).transpose(1, 2)
    from torch.nn.attention.flex_attention import AuxRequest

    # softmax with a sink: e^lse / (e^lse + e^sink) of the mixture without it
    out, aux = call(enable_gqa=gqa, return_aux=AuxRequest(lse=True))
    share = torch.sigmoid(aux.lse - sinks.float().view(-1, 1))
    return (out * share.unsqueeze(-1)).type_as(v).transpose(1, 2)


@dataclass
class Dense:
    """Attention over contiguous keys. All layers (of a kind, with `ByLayer`) share one mask."""

    backend: str
    pattern: Pattern
    mask: Any = field(default=None)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        pattern, queries = self.pattern, q.shape[1]
        self.prepare(q.shape[0], queries, k.shape[1], q.device)
        if self.backend == "reference":
            return reference(q, k, v, pattern, sinks)
        if self.backend == "flex":
            return flex(q, k, v, pattern, self.mask, sinks)
        if self.backend == "flash":
            return flash_attention(q, k, v, window=pattern.window, documents=self.mask, implementation="triton")
        if pattern.plain and queries > 1:  # a branch, not an argument: to a compiler `queries` may be any number
            return sdpa(q, k, v, None, causal=True)
        if self.mask is None:  # one query: the newest position sees the last `window` keys (0: all of them)
            return sdpa(q, k[:, -pattern.window :], v[:, -pattern.window :], None, causal=False)
        return sdpa(q, k, v, self.mask, causal=False)

    def prepare(self, batch: int, queries: int, keys: int, device: torch.device) -> None:
        """Make the mask, where this backend needs one for the pattern and it is not there yet.

        Better before the first layer than in it: a compiled block that is computed again may change nothing outside.
        """
        pattern = self.pattern
        if self.mask is not None:
            return
        if self.backend == "flex":
            self.mask = flex_block_mask(pattern, batch, queries, keys, device)
        elif self.backend == "flash" and pattern.documents is not None:
            self.mask = DocumentBounds.of(pattern.documents)
        elif self.backend == "sdpa" and not pattern.plain:
            if pattern.slopes:
                self.mask = pattern.bias(queries, keys, device)
            elif queries > 1 or pattern.documents is not None:
                self.mask = pattern.mask(queries, keys, device)


@dataclass
class ByLayer:
    """Layers with a sliding window beside layers without: a backend for each kind."""

    spec: ModelSpec
    sliding: Attend
    full: Attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, **per_head: Tensor) -> Tensor:
        return (self.sliding if self.spec.window_of(layer) else self.full)(q, k, v, layer, **per_head)


@functools.lru_cache(maxsize=64)
def uniform(spec: ModelSpec) -> tuple[ModelSpec, ModelSpec]:
    """As if all layers were sliding ones, and as if none were."""
    alike = spec.replace(layer_types=(), rope_local_theta=0.0)
    return alike, alike.replace(sliding_window=0)


def by_layer(spec: ModelSpec, make: Callable[[ModelSpec], Attend]) -> Attend:
    """The backend that `make` gives for a model whose layers are alike, or one for each kind."""
    return ByLayer(spec, *map(make, uniform(spec))) if spec.layer_types else make(spec)


def make_pattern(
    spec: ModelSpec, documents: Tensor | None = None, offset: int = 0, heads: slice = slice(None)
) -> Pattern:
    """The attention mask of a model whose layers are alike (`uniform`); `heads` are those that this rank holds."""
    slopes = tuple(alibi_slopes(spec.heads)[heads]) if spec.positions == "alibi" else ()
    return Pattern(spec.sliding_window, slopes, documents, offset, spec.attention_softcap)


def cached_backend(spec: ModelSpec) -> ModelSpec:
    """With the backend for a KV cache: prompts come in every length, and FlexAttention would be compiled for each;
    flash attention has no cache."""
    if spec.attention not in ("auto", "flash"):
        return spec
    return spec.replace(attention=components.attention_backend(spec.replace(attention="auto"), "cpu"))


def paged_options(spec: ModelSpec, device: torch.device, heads: slice = slice(None)) -> list[dict[str, Any]]:
    """The pattern of each layer as keywords of `kernels.inference.paged_attention`."""
    pattern = make_pattern(spec, heads=heads)
    slopes = torch.tensor(pattern.slopes, device=device) if pattern.slopes else None
    common = {"slopes": slopes, "softcap": pattern.softcap}
    return [{"window": spec.window_of(layer), **common} for layer in range(spec.layers)]


def dense(
    spec: ModelSpec,
    device: torch.device,
    documents: Tensor | None = None,
    offset: int = 0,
    heads: slice = slice(None),
    seq: int = 0,  # positions that are to come, where that is known: the mask is then made at once
) -> Attend:
    """The backend that the spec names; `auto` takes the fastest that handles the pattern on this device."""
    return by_layer(spec, lambda alike: dense_alike(alike, device, documents, offset, heads, seq))


def dense_alike(
    spec: ModelSpec, device: torch.device, documents: Tensor | None, offset: int, heads: slice, seq: int
) -> Dense:
    """Of a model whose layers are alike."""
    backend = components.attention_backend(spec, device.type)
    if backend == "auto":
        backend = fastest_backend(spec, device, sparse=documents is not None or spec.sliding_window > 0,
                                  offset=offset, seq=seq or spec.context)  # fmt: skip
    made = Dense(backend, make_pattern(spec, documents, offset, heads))
    if seq:
        made.prepare(1 if documents is None else documents.shape[0], seq, seq, device)
    return made


def fastest_backend(spec: ModelSpec, device: torch.device, *, sparse: bool, offset: int, seq: int) -> str:
    """Ours where it was measured to be the fastest, else PyTorch's own: block-sparse where much is hidden."""
    if device.type != "cuda" or offset:
        return components.attention_backend(spec, "cpu")
    core = components.attention_core(spec)
    if not core.fused:
        return "flex"
    if spec.positions != "alibi" and core.v_dim == core.qk_dim <= 256:
        op = "sparse_attention" if sparse else "flash_attention"
        if fastest(op, device, seq=seq, head_dim=core.qk_dim) == "triton":
            return "flash"
    return "flex" if sparse else "sdpa"
