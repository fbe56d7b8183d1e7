"""The KV cache of a served model, in bytes on one rank.

A token leaves a key and a value in every layer, one of each per KV head. Tensor parallelism shares the heads out; a
rank holds at least one, so fewer heads than ranks are kept more than once. A sliding window keeps no more than itself.
The cache is paged: a sequence takes whole blocks of 16 tokens, so its last block is half empty on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...spec import ModelSpec, SpecError
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

    def __post_init__(self) -> None:
        if self.dtype not in KV_FORMATS:
            raise SpecError(f"KV cache format {self.dtype!r} is not known{did_you_mean(self.dtype, KV_FORMATS)}")

    @classmethod
    def of(cls, model: ModelSpec, dtype: str = "bf16", tp: int = 1) -> Cache:
        kept = token_cache(model)
        vectors = kept.vectors * heads_per_rank(kept.heads, tp)
        return cls(model.layers, vectors, kept.width, dtype, model.sliding_window)

    @property
    def token_bytes(self) -> float:
        form = KV_FORMATS[self.dtype]
        return self.layers * self.vectors * (self.width * form.number + form.scales)

    def blocks(self, tokens: Any) -> Any:
        """Pages of a sequence of `tokens`. A window rarely begins where a page does, so it reaches into one more."""
        pages = np.ceil(np.asarray(tokens) / self.block)
        if self.window:
            pages = np.minimum(pages, np.ceil((self.window - 1) / self.block) + 1)
        return pages

    def held(self, tokens: Any) -> Any:
        """Bytes that a sequence of `tokens` occupies, its last page whole."""
        return self.blocks(tokens) * self.block * self.token_bytes

    def read(self, tokens: Any) -> Any:
        """Bytes that one decode step of a sequence reads: only what is filled and still in the window."""
        return np.minimum(tokens, self.window or np.inf) * self.token_bytes

    def sequences(self, budget: float, tokens: int) -> int:
        """How many sequences of `tokens` fit in `budget` bytes."""
        return max(0, int(budget // float(self.held(tokens))))

    def longest(self, budget: float, sequences: int = 1, limit: int = 2**31) -> int:
        """The longest context, in whole pages, at which `sequences` of them still fit; `limit` where nothing binds."""
        pages = int(budget // (sequences * self.block * self.token_bytes))
        if self.window and pages >= int(self.blocks(limit)):
            return limit
        return min(limit, max(0, pages) * self.block)


def heads_per_rank(kv_heads: int, tp: int) -> int:
    """KV heads that one rank holds. They must share out evenly one way or the other."""
    if kv_heads % tp and tp % kv_heads:
        even = [n for n in range(1, 2 * kv_heads + 1) if kv_heads % n == 0 or n % kv_heads == 0]
        raise SpecError(
            f"{kv_heads} KV heads cannot be shared evenly by tp = {tp} ranks; tp can be {', '.join(map(str, even))}, …"
        )
    return max(1, kv_heads // tp)
