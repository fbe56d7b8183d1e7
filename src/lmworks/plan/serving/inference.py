"""The time of one step of a serving engine, by roofline with fitted efficiencies.

A step runs `decode` sequences one token further and, at the same time, `prefill` tokens of new prompts. A product
costs the time to read its weights plus the time to multiply: the two overlap so little at the sizes of decoding that
their sum fits what was measured better than the larger one. Attention reads the cache and multiplies likewise.
Collectives of tensor parallelism, and a fixed time a layer and a step (launches, gaps, the host), come on top.

Array-safe: `decode`, `context` and `prefill` may be arrays.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...spec import Cluster, Gpu, SpecError
from ...spec.errors import did_you_mean
from ..devices.links import Fabric
from .served_model import WEIGHT_FORMATS, Cache, Linear, ServedModel, compute_format

DIRECT = ("nvswitch", "mesh")
OWN_KERNEL = {"all-reduce": 8 * 2**20, "all-to-all": np.inf}  # bytes up to which engines have better than NCCL's
LINK_SHARE = 0.8  # of the links' datasheet rate is what such a kernel reaches
CONSTANTS = Path(__file__).with_name("serving.toml")


@dataclass(frozen=True)
class Rates:
    """What an engine reaches of the datasheet, and what it spends besides. Fitted by validation/fit_serving.py."""

    weight_bandwidth: float  # share of the memory bandwidth while weights are read
    dequantise: float  # of that share, what is left where weights are widened to 16 bits on the way
    expert_bandwidth: float  # the same for experts, of which a step meets some
    kv_bandwidth: float  # the same for the KV cache
    compute: float  # share of the dense peak in products
    attention_compute: float
    layer_us: float  # launches and gaps of one layer
    moe_layer_us: float  # besides, for routing, sorting and combining
    exchange_us: float  # start-up of a small exchange between joined ranks, in the engines' own kernel
    step_us: float  # host time that is not hidden, a step
    request_ms: float  # from a request's arrival to its first step, and from its first token to the client

    @classmethod
    def of(cls, engine: str) -> Rates:
        constants = read_constants()
        engines = constants["engine"]
        if engine not in engines:
            raise SpecError(f"engine {engine!r} is not known{did_you_mean(engine, engines)}")
        return cls(**constants["common"], **engines[engine])


@functools.cache
def read_constants() -> Mapping[str, Any]:
    return tomllib.loads(CONSTANTS.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Deployment:
    """One replica: a model on tp × attention_dp accelerators."""

    served: ServedModel
    gpu: Gpu
    rates: Rates
    tp: int = 1
    ep: int = 1  # groups of ranks between which whole experts are dealt out; 1: every expert is cut over all ranks
    attention_dp: int = 1  # groups that hold all of attention each, and sequences of their own
    weights: str = "bf16"
    kv: str = "bf16"
    chunk: int = 8192  # most tokens of prompts and sequences in one step

    def __post_init__(self) -> None:
        if self.weights not in WEIGHT_FORMATS:
            raise SpecError(f"weights = {self.weights!r} is not known{did_you_mean(self.weights, WEIGHT_FORMATS)}")
        if not self.gpu.bandwidth_gbs:
            raise SpecError(
                f"{self.gpu.name}: bandwidth_gbs is not in the catalogue, so no time can be predicted for it"
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.attention_dp

    @functools.cached_property
    def cache(self) -> Cache:
        return self.served.cache(self.kv, self.tp)

    @functools.cached_property
    def weight_bytes(self) -> float:
        return self.served.weight_bytes(self.weights, self.tp, self.attention_dp)

    @functools.cached_property
    def fabric(self) -> Fabric:
        """The usual machines of this accelerator, as many as the ranks fill."""
        per_node = min(self.ranks, self.gpu.per_node)
        return Fabric.of(Cluster(nodes=-(-self.ranks // per_node), gpus_per_node=per_node), self.gpu)

    @property
    def bandwidth(self) -> float:
        return self.gpu.bandwidth_gbs * 1e9

    @functools.cached_property
    def compute(self) -> str:
        """The number format of products with quantized weights on this hardware."""
        return compute_format(self.weights, self.gpu)

    @property
    def widening(self) -> float:
        return (
            1.0 if WEIGHT_FORMATS[self.weights].bytes >= 2 or self.compute in ("fp8", "fp4") else self.rates.dequantise
        )

    def peak(self, dtype: str) -> float:
        """FLOP/s that a product reaches."""
        return self.rates.compute * (self.gpu.peak_flops(dtype) or 0.0)

    # --- one step -------------------------------------------------------------------------------------

    def step(self, decode: Any = 0, context: Any = 0, prefill: Any = 0, before: Any = 0, prompts: Any = 1) -> Any:
        """Seconds of one step."""
        return sum(self.parts(decode, context, prefill, before, prompts).values())

    def parts(
        self, decode: Any = 0, context: Any = 0, prefill: Any = 0, before: Any = 0, prompts: Any = 1
    ) -> dict[str, Any]:
        """Seconds of one step by part, on the ranks of one attention group.

        `decode` sequences of `context` tokens, and `prefill` prompt tokens of `prompts` prompts that have `before`
        tokens in the cache already.
        """
        tokens = decode + prefill
        sampled = decode + np.minimum(prefill, prompts)
        return {
            "weights": sum(self.product(linear, tokens) for linear in self.served.linears) + self.head(sampled),
            "experts": self.experts(tokens),
            "attention": self.attention(decode, context, prefill, before, prompts),
            "collectives": self.collectives(tokens),
            "overhead": self.overhead,
        }

    def product(self, linear: Linear, tokens: Any) -> Any:
        weights = linear.weights(self.tp)
        read = weights * WEIGHT_FORMATS[self.weights].bytes / (self.rates.weight_bandwidth * self.widening)
        return read / self.bandwidth + 2 * weights * tokens / self.peak(self.compute)

    def head(self, tokens: Any) -> Any:
        """Only tokens that a next one is sampled from meet the head."""
        weights = self.served.head.weights(self.tp)
        read = 2 * weights / (self.bandwidth * self.rates.weight_bandwidth)
        return read + 2 * weights * tokens / self.peak(compute_format("bf16", self.gpu))

    def experts(self, tokens: Any) -> Any:
        """Every rank reads its share of the experts that any token of the replica visits."""
        found = self.served.experts
        if not found:
            return 0.0 * tokens
        met = tokens * self.attention_dp
        read = found.layers * found.size * found.busiest(met, self.ranks, self.ep) * WEIGHT_FORMATS[self.weights].bytes
        flops = 2 * found.layers * found.size * found.top_k * met / self.ranks
        reach = self.bandwidth * self.rates.expert_bandwidth * self.widening
        return read / reach + flops / self.peak(self.compute)

    def attention(self, decode: Any, context: Any, prefill: Any, before: Any, prompts: Any) -> Any:
        """Decoding reads the cache; a prompt's token sees `before` and, on average, half of the new ones."""
        reach = self.served.window or np.inf
        each = prefill / np.maximum(prompts, 1)
        keys = before + (each + 1) / 2
        keys = self.cache.mean_over_layers(np.minimum(keys, reach), keys)
        seen = self.cache.mean_over_layers(np.minimum(context, reach), context)
        flops = self.served.decode_flops * decode * seen
        flops = flops + self.served.prefill_flops * prefill * keys
        peak = self.rates.attention_compute * (self.gpu.peak_flops(compute_format("bf16", self.gpu)) or 0.0)
        read = decode * self.cache.read(context) + np.minimum(prefill, prompts) * self.cache.read(before)
        return read / (self.bandwidth * self.rates.kv_bandwidth) + flops / (peak * self.tp)

    def collectives(self, tokens: Any) -> Any:
        """Two all-reduces a layer within a group; with attention_dp, experts' tokens travel there and back."""
        width = 2.0 * self.served.hidden
        seconds = 0.0 * tokens
        if self.tp > 1:
            seconds = seconds + 2 * self.served.layers * self.exchange("all-reduce", width * tokens, self.tp)
        if self.attention_dp > 1 and self.served.experts:
            moved = width * tokens * min(self.served.experts.top_k, self.ranks)
            seconds = seconds + 2 * self.served.experts.layers * self.exchange("all-to-all", moved, self.ranks)
        return seconds

    def exchange(self, kind: str, nbytes: Any, ranks: int) -> Any:
        """NCCL's time, or between directly joined ranks the engines' own kernel (vLLM's all-reduce, DeepEP) if less.

        It writes straight into the other ranks' memory: one start-up, and each number crosses the links once or twice.
        """
        nccl = self.fabric.seconds(kind, nbytes, ranks)
        if self.fabric.kind not in DIRECT or not self.fabric.inside(ranks, 1):
            return nccl
        crossings = (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks
        own = 1e-6 * self.rates.exchange_us + crossings * nbytes / (LINK_SHARE * 1e9 * self.gpu.link_gbs)
        return np.where(nbytes <= OWN_KERNEL[kind], np.minimum(own, nccl), nccl)

    @property
    def overhead(self) -> float:
        moe = self.served.experts.layers if self.served.experts else 0
        return 1e-6 * (self.rates.step_us + self.served.layers * self.rates.layer_us + moe * self.rates.moe_layer_us)
