"""The memory of the KV cache: blocks of keys and values of all layers, their number, and copies between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.inference.paged_attention import LayerCache
from ...spec import EngineSpec, LMWorksError, ModelSpec, SpecError
from ...spec.components import token_cache

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
                f"engine.kv_dtype = '{engine.kv_dtype}' keeps heads of even width, but model.head_dim = "
                f"{token.width}; use engine.kv_dtype = 'auto'"
            )
        return cls(model.layers, max(1, token.heads // tp), token.width, engine.block, stored, token.vectors)

    @property
    def quantised(self) -> bool:
        return self.dtype in STORED.values()

    @property
    def block_bytes(self) -> int:
        """Keys and values of all layers, and fp32 scales for each token and head if quantised."""
        a_head = self.head_dim * self.dtype.itemsize + (4 if self.quantised else 0)
        return self.vectors * self.layers * self.kv_heads * self.size * a_head


class KVCache:
    def __init__(self, shape: KVCacheShape, blocks: int, device: torch.device) -> None:
        self.shape, self.blocks = shape, blocks
        of_all = (shape.layers, shape.vectors, blocks, shape.kv_heads, shape.size)
        try:
            # Zeros: what was never written must be finite, as a masked probability of 0 is multiplied with it.
            self.store = torch.zeros(*of_all, shape.head_dim, dtype=shape.dtype, device=device)
            self.scales = torch.zeros(of_all, device=device) if shape.quantised else None
        except RuntimeError:  # out of memory, of several types
            raise LMWorksError(
                f"a cache of {blocks:,} blocks takes {blocks * shape.block_bytes / 2**30:,.1f} GiB, which the device "
                "does not have; lower engine.blocks, or leave it at 0 for as many as memory holds"
            ) from None
        self.layers = [self.layer(index) for index in range(shape.layers)]

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
        store = self.store.view(torch.uint8) if self.shape.quantised else self.store
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
    """Bytes of `part` of the GPU that are left beside other processes and `peak`, the peak of a step."""
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    return int(total * part) - elsewhere - peak
