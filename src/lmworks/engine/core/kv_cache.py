"""The memory of the KV cache in blocks, and the attention backend over it.

The backend writes keys and values to the paged KV cache, and attends with queries. It replaces dense attention as
`attend(q, k, v, layer)`. Attention with a merged QKV projection (`engine.core.fusion`) passes the projection itself,
`attend.attend_qkv(…)`: one kernel normalises, rotates and writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.inference.kv_cache_write import write_kv_cache
from ...kernels.inference.paged_attention import AttentionMetadata, LayerCache, paged_attention, paged_decode
from ...spec import EngineSpec, LMWorksError, ModelSpec, SpecError
from ...spec.components import token_cache
from .step_input import Batch
from .virtual_memory import Buffer, OutOfMemory, TorchBuffer, VirtualBuffer, is_supported

CPU_BYTES = 2**30  # default on a CPU; pages that are never written take no memory
STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True)
class KVCacheShape:
    """Shape of a block."""

    layers: int
    kv_heads: int  # of this rank
    head_dim: int  # numbers in a vector
    size: int  # tokens in a block
    dtype: torch.dtype
    vectors: int = 2  # of a token and head: a key and a value, or one vector that is both

    @classmethod
    def of(cls, model: ModelSpec, engine: EngineSpec, dtype: torch.dtype, tp: int = 1) -> KVCacheShape:
        """On one of `tp` ranks; where they outnumber the heads, each has one."""
        stored, token = STORED.get(engine.kv_dtype, dtype), token_cache(model)
        if stored.itemsize == 1 and token.width % 2:
            raise SpecError(
                f"engine.kv_dtype = '{engine.kv_dtype}' keeps vectors of even width, but those of this model "
                f"(model.head_dim, or kv_lora_rank + rope_head_dim) have {token.width}; use engine.kv_dtype = 'auto'"
            )
        return cls(model.layers, max(1, token.heads // tp), token.width, engine.block, stored, token.vectors)

    @property
    def quantized(self) -> bool:
        return self.dtype in STORED.values()

    @property
    def block_bytes(self) -> int:
        """Keys and values of all layers, and fp32 scales for each token and head if quantized."""
        a_head = self.head_dim * self.dtype.itemsize + (4 if self.quantized else 0)
        return self.vectors * self.layers * self.kv_heads * self.size * a_head


class KVCache:
    """Asleep it has no memory; it wakes with zeros."""

    store: Tensor
    scales: Tensor | None
    layers: list[LayerCache]

    def __init__(self, shape: KVCacheShape, blocks: int, device: torch.device, sleepable: bool = False) -> None:
        """`sleepable`: at addresses that sleeping and waking do not change, where the platform has it."""
        self.shape, self.blocks = shape, blocks
        of_all = (shape.layers, shape.vectors, blocks, shape.kv_heads, shape.size)
        self.tensors: list[tuple[tuple[int, ...], torch.dtype]] = [((*of_all, shape.head_dim), shape.dtype)]
        if shape.quantized:
            self.tensors.append((of_all, torch.float32))
        kind = VirtualBuffer if sleepable and is_supported(device) else TorchBuffer
        self.buffers: list[Buffer] = []
        self.addresses: list[int] = []
        try:
            for sizes, dtype in self.tensors:
                self.buffers.append(kind(math.prod(sizes) * dtype.itemsize, device))
            self.wake()
        except OutOfMemory:
            raise LMWorksError(
                f"a cache of {blocks:,} blocks takes {blocks * shape.block_bytes / 2**30:,.1f} GiB, which the device "
                "does not have; lower engine.blocks, or leave it at 0 for as many as memory holds"
            ) from None

    @property
    def asleep(self) -> bool:
        return not all(buffer.mapped for buffer in self.buffers)

    def sleep(self) -> int:
        """Release the memory, and lose what is cached; returns its bytes."""
        released = sum(buffer.mapped_bytes for buffer in self.buffers)
        self.store, self.scales, self.layers = torch.empty(0), None, []
        for buffer in self.buffers:
            buffer.unmap()
        return released

    def wake(self) -> bool:
        """Take memory again, or none if there is too little; returns whether the addresses are those of before."""
        try:
            # Zeros: what was never written must be finite, as a masked probability of 0 is multiplied with it.
            for buffer in self.buffers:
                buffer.map()
        except OutOfMemory:
            for buffer in self.buffers:
                buffer.unmap()
            raise
        self.store, *scales = [
            buffer.tensor(*tensor) for buffer, tensor in zip(self.buffers, self.tensors, strict=True)
        ]
        self.scales = scales[0] if scales else None
        self.layers = [self.layer(index) for index in range(self.shape.layers)]
        before, self.addresses = self.addresses, [tensor.data_ptr() for tensor in (self.store, *scales)]
        return self.addresses == before

    def layer(self, index: int) -> LayerCache:
        store = self.store[index]  # one vector is key and value
        if self.scales is None:
            return LayerCache(store[0], store[-1])
        return LayerCache(store[0], store[-1], self.scales[index, 0], self.scales[index, -1])

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks from → to, in all layers. No block is both."""
        if not copies:
            return
        pairs = torch.tensor(copies, dtype=torch.int64)
        if self.store.is_cuda:
            pairs = pairs.pin_memory()
        source, target = pairs.to(self.store.device, non_blocking=True).unbind(1)
        for pool in self.pools():
            pool.index_copy_(2, target, pool.index_select(2, source))

    def pools(self) -> list[Tensor]:
        """As uint8 where PyTorch cannot index 8-bit floats."""
        store = self.store.view(torch.uint8) if self.shape.quantized else self.store
        return [store] if self.scales is None else [store, self.scales]


def blocks_that_fit(shape: KVCacheShape, room: int, engine: EngineSpec) -> int:
    """Blocks that fit `room` bytes, at most what all sequences at full length need."""
    fitting = max(room, 0) // shape.block_bytes
    if fitting == 0:
        raise LMWorksError(
            f"no memory is left for the cache: one block of {engine.block} tokens takes {shape.block_bytes:,} bytes, "
            f"and {max(room, 0):,} are free; raise engine.memory (now {engine.memory:g}), lower "
            f"engine.max_batch_tokens (now {engine.max_batch_tokens}), or take a smaller model"
        )
    return min(fitting, engine.max_seqs * math.ceil(engine.context / engine.block))


def free_on_gpu(device: torch.device, part: float, peak: int) -> int:
    """Bytes of `part` of the GPU that are left beside `peak`, the peak of a step, and what torch has not allocated:
    other processes, and caches of sleepable engines in this one."""
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    return int(total * part) - elsewhere - peak


# --- attention backend -----------------------------------------------------------------------------------


Rotary = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class PagedAttention:
    """Attention of one step over a flat batch: the tokens of all sequences, concatenated."""

    caches: Sequence[LayerCache]  # by layer
    slot_mapping: Tensor  # (tokens) int64: cache slot of each token's key and value; −1: none
    metadata: Sequence[AttentionMetadata]  # of decoding sequences and of prefills: each has a kernel of its own
    num_decodes: int  # tokens of decoding sequences, where there are both
    options: Sequence[Mapping[str, Any]]  # of the kernels, by layer: `model.attention.paged_options`
    invariant: bool = False

    @classmethod
    def of(cls, cache: KVCache, batch: Batch, options: Sequence[Mapping[str, Any]], invariant: bool) -> PagedAttention:
        metadata = batch.attention_metadata
        return cls(cache.layers, batch.slot_mapping, metadata, batch.num_decodes, options, invariant)

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
        options = {**self.options[layer], **per_head}
        q = write_kv_cache(qkv, heads, kv_heads, q_norm, k_norm, eps, rotary, cache, self.slot_mapping)
        if len(self.metadata) == 1:
            return self.attend(q, cache, self.metadata[0], options)
        out = torch.zeros_like(q)
        for rows, metadata in zip((slice(self.num_decodes), slice(self.num_decodes, None)), self.metadata, strict=True):
            self.attend(q[rows], cache, metadata, {**options, "out": out[rows]})
        return out

    def attend(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata, options: Mapping[str, Any]) -> Tensor:
        if metadata.max_query_len == 1 and q.device.type == "cpu" and not self.invariant:
            return paged_decode(q, cache, metadata, **options)
        return paged_attention(q, cache, metadata, invariant=self.invariant, **options)
