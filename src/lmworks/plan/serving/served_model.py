"""A model as an engine serves it: its matrices, how ranks share them, and their bytes in a quantized format.

Serving keeps weights and nothing else of training. What a step costs follows from a short list: the matrices that every
token meets, the experts of which it meets a few, the head, and what attention reads. `ServedModel.of` makes that list
from a ModelSpec; a network that a ModelSpec cannot describe (linear attention, dense layers among experts) is listed by
hand.

Its KV cache, in bytes on one rank: a token leaves a key and a value in every layer, one of each per KV head. Tensor
parallelism shares the heads out; a rank holds at least one, so fewer heads than ranks are kept more than once. A
layer with a sliding window keeps no more than the window (as vLLM's hybrid cache does; our own engine keeps it all
where other layers see everything). The cache is paged: a sequence takes whole blocks of 16 tokens, so its last block is
half empty on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from ...spec import Gpu, ModelSpec, SpecError, components
from ...spec.components import token_cache
from ...spec.errors import did_you_mean

BLOCK = 16  # tokens of a page, as vLLM, SGLang and TensorRT-LLM have it (or a multiple of it)


@dataclass(frozen=True)
class KvFormat:
    """Bytes of one number, and of the scales that come with one vector (the key or value of a head)."""

    number: float
    scales: float = 0.0


KV_FORMATS = {
    "bf16": KvFormat(2.0),
    "fp8": KvFormat(1.0),  # one scale for a whole layer: nothing per token
    "int8": KvFormat(1.0, scales=2.0),  # an fp16 scale per token and head
    "int4": KvFormat(0.5, scales=4.0),  # an fp16 scale and zero point per token and head
}


@dataclass(frozen=True)
class Cache:
    """What one rank keeps of every token: `vectors` of `width` numbers, in each of `layers` layers."""

    layers: int
    vectors: int
    width: int
    dtype: str = "bf16"
    window: int = 0  # tokens that are kept (0: all)
    block: int = BLOCK
    full_layers: int = 0  # with a window: layers that keep all tokens

    def __post_init__(self) -> None:
        if self.dtype not in KV_FORMATS:
            raise SpecError(f"KV cache format {self.dtype!r} is not known{did_you_mean(self.dtype, KV_FORMATS)}")

    @classmethod
    def of(cls, model: ModelSpec, dtype: str = "bf16", tp: int = 1) -> Cache:
        kept = token_cache(model)
        vectors = kept.vectors * heads_per_rank(kept.heads, tp)
        full = model.full_layers if model.layer_types else 0
        return cls(model.layers, vectors, kept.width, dtype, model.sliding_window, full_layers=full)

    @property
    def token_bytes(self) -> float:
        form = KV_FORMATS[self.dtype]
        return self.layers * self.vectors * (self.width * form.number + form.scales)

    def mean_over_layers(self, windowed: Any, full: Any) -> Any:
        """Of a quantity in layers with the window and in those that keep all tokens."""
        return windowed + (full - windowed) * self.full_layers / self.layers if self.full_layers else windowed

    def blocks(self, tokens: Any) -> Any:
        """Pages of a sequence of `tokens` in a layer with the window, which rarely begins where a page does, so it
        reaches into one more."""
        pages = np.ceil(np.asarray(tokens) / self.block)
        if self.window:
            pages = np.minimum(pages, np.ceil((self.window - 1) / self.block) + 1)
        return pages

    def held(self, tokens: Any) -> Any:
        """Bytes that a sequence of `tokens` occupies, its last page whole."""
        pages = self.mean_over_layers(self.blocks(tokens), np.ceil(np.asarray(tokens) / self.block))
        return pages * self.block * self.token_bytes

    def read(self, tokens: Any) -> Any:
        """Bytes that one decode step of a sequence reads: only what is filled and still in the window."""
        return self.mean_over_layers(np.minimum(tokens, self.window or np.inf), tokens) * self.token_bytes

    def sequences(self, budget: float, tokens: int) -> int:
        """How many sequences of `tokens` fit in `budget` bytes."""
        return max(0, int(budget // float(self.held(tokens))))

    def longest(self, budget: float, sequences: int = 1, limit: int = 2**31) -> int:
        """The longest context, in whole pages, at which `sequences` of them still fit; `limit` where nothing binds."""
        page = self.block * self.token_bytes  # of all layers
        pages, windowed = int(budget // (sequences * page)), int(self.blocks(limit))
        if self.window and pages >= windowed:
            if not self.full_layers:
                return limit
            full = page * self.full_layers / self.layers
            pages = int((budget / sequences - windowed * (page - full)) // full)
        return min(limit, max(0, pages) * self.block)


def heads_per_rank(kv_heads: int, tp: int) -> int:
    """KV heads that one rank holds. They must share out evenly one way or the other."""
    if kv_heads % tp and tp % kv_heads:
        even = [n for n in range(1, 2 * kv_heads + 1) if kv_heads % n == 0 or n % kv_heads == 0]
        raise SpecError(
            f"{kv_heads} KV heads cannot be shared evenly by tp = {tp} ranks; tp can be {', '.join(map(str, even))}, …"
        )
    return max(1, kv_heads // tp)


# --- served model ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightFormat:
    """Bytes of one weight, scales included, and the number format in which products are computed."""

    bytes: float
    compute: str


# Embedding, head, router, norms and biases stay in bf16, as the published checkpoints have them.
WEIGHT_FORMATS = {
    "bf16": WeightFormat(2.0, "bf16"),
    "fp8": WeightFormat(1.0 + 4 / 128**2, "fp8"),  # an fp32 scale per 128 × 128 tile
    "int8": WeightFormat(1.0 + 2 / 4096, "bf16"),  # an fp16 scale per output; weights only
    "int4": WeightFormat(0.5 + 2.5 / 128, "bf16"),  # an fp16 scale and a 4-bit zero per 128 weights; weights only
    "fp4": WeightFormat(0.5 + 1 / 16, "fp4"),  # an fp8 scale per 16 weights (NVFP4)
}


def compute_format(weights: str, gpu: Gpu) -> str:
    """Where the hardware cannot multiply a format, weights are stored in it and multiplied in 16 bits."""
    for dtype in (WEIGHT_FORMATS[weights].compute, "bf16", "fp16"):
        if gpu.peak_flops(dtype):
            return dtype
    raise SpecError(f"{gpu.name}: no bf16 or fp16 peak is in the catalogue, so no time can be predicted for it")


@dataclass(frozen=True)
class Linear:
    """y = x·W with W of k × n, in `layers` layers. Ranks share the columns, the rows, or hold it `whole`."""

    k: int
    n: int
    layers: int = 1
    split: str = "columns"

    def on(self, tp: int) -> tuple[float, float]:
        """k and n on one of tp ranks."""
        if self.split == "columns":
            return self.k, self.n / tp
        return (self.k / tp, self.n) if self.split == "rows" else (self.k, self.n)

    def weights(self, tp: int = 1) -> float:
        k, n = self.on(tp)
        return self.layers * k * n


@dataclass(frozen=True)
class Experts:
    """Routed experts of `layers` layers; a token visits `top_k` of `count`. Shared ones are ordinary matrices."""

    count: int
    top_k: int
    layers: int
    size: int  # weights of one expert

    def distinct(self, tokens: Any) -> Any:
        """Experts that at least one of `tokens` visits, each choosing evenly and on its own: E·(1 − (1 − k/E)^t)."""
        return self.count * (1 - (1 - self.top_k / self.count) ** np.asarray(tokens, dtype=float))

    def busiest(self, tokens: Any, ranks: int, ep: int) -> Any:
        """Experts' worth of weights that the slowest rank reads: with ep > 1 luck decides which rank has most.

        The largest of ep counts lies about z standard deviations above their mean (Blom's approximation).
        """
        mean = self.distinct(tokens) / ranks
        if ep == 1:
            return mean
        held, visited = self.count / ep, self.distinct(tokens) / self.count
        z = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))
        return np.minimum(self.count / ranks, mean + z * np.sqrt(held * visited * (1 - visited)) * ep / ranks)


@dataclass(frozen=True)
class ServedModel:
    name: str
    layers: int
    hidden: int
    linears: tuple[Linear, ...]
    head: Linear
    tables: float  # numbers of embeddings that are looked up; 0 where the head is the table
    small: float  # numbers of norms, biases and routers: every rank has them all
    experts: Experts | None
    kv_layers: int  # layers that keep keys and values
    kv_heads: int
    kv_width: int
    kv_vectors: int  # per head: a key and a value, or one latent vector for both
    window: int
    prefill_flops: float  # of attention, a query and a key, all layers
    decode_flops: float
    context: int = 2**31
    full_layers: int = 0  # with a window: of the kv_layers, those that keep all tokens
    heads: int = 0  # query heads, which tensor-parallel ranks must share evenly; 0: not known

    @classmethod
    def of(cls, model: ModelSpec, name: str = "") -> ServedModel:
        m, layers = model, model.layers
        linears = [linear for kind, count in m.kinds for linear in merged_linears(kind, count)]
        big = sum(linear.weights() for linear in linears)
        core, kv, routed = components.attention_core(m), components.token_cache(m), components.experts(m)
        return cls(
            name=name or m.preset or "model",
            layers=layers,
            hidden=m.hidden,
            linears=tuple(linears),
            head=Linear(m.hidden, m.vocab),
            tables=m.embedding_params - (m.vocab * m.hidden if m.tie_embeddings else 0),
            small=round(layers * m.block_params) - m.expert_layers * m.routed_params - big + m.norm_params,
            experts=Experts(routed.count, routed.top_k, m.expert_layers, routed.size) if routed else None,
            kv_layers=layers,
            kv_heads=kv.heads,
            kv_width=kv.width,
            kv_vectors=kv.vectors,
            window=core.window,
            prefill_flops=1.0 * layers * core.flops_per_key,
            decode_flops=1.0 * layers * components.decode_flops_per_key(m),
            context=m.context,
            full_layers=m.full_layers if m.layer_types else 0,
            heads=m.heads,
        )

    def cache(self, dtype: str, tp: int) -> Cache:
        heads = heads_per_rank(self.kv_heads, tp)
        vectors = self.kv_vectors * heads
        return Cache(self.kv_layers, vectors, self.kv_width, dtype, self.window, full_layers=self.full_layers)

    def weight_bytes(self, weights: str, tp: int = 1, attention_dp: int = 1) -> float:
        """Bytes of all weights on one rank: experts over every rank, the rest over the tp ranks of a group."""
        each = WEIGHT_FORMATS[weights].bytes
        total = each * sum(linear.weights(tp) for linear in self.linears)
        total += 2 * ((self.head.weights() + self.tables) / tp + self.small)
        if self.experts:
            total += each * self.experts.layers * self.experts.count * self.experts.size / (tp * attention_dp)
        return total

    @property
    def params(self) -> float:
        routed = self.experts.layers * self.experts.count * self.experts.size if self.experts else 0
        return (
            sum(linear.weights() for linear in self.linears) + self.head.weights() + self.tables + self.small + routed
        )


def merged_linears(model: ModelSpec, layers: int) -> list[Linear]:
    """Layers that read the same input are one product (q, k, v; gate, up); of that many alike blocks."""
    split = {"column": "columns", "kv_heads": "columns", "row": "rows", "replicated": "whole"}
    found: dict[tuple[str, int, str], int] = {}
    for linear in components.linears(model):
        key = (linear.name.rpartition(".")[0] + linear.reads, linear.inputs, split[linear.shard])
        found[key] = found.get(key, 0) + linear.outputs
    return [Linear(inputs, outputs, layers, how) for (_, inputs, how), outputs in found.items()]
