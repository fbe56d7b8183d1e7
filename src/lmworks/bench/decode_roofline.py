"""The roofline of a decoding step: the bytes it must read over memory bandwidth.

A step reads every weight once, whatever the batch, except input embeddings (one row per token) and experts without
tokens, and the keys and values of every sequence.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.core.kv_cache import KVCacheShape
from ..model import GPT
from ..model.moe import MoE
from ..plan.serving.served_model import ServedModel

COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # bytes of the copy that measures bandwidth
COPIES = 10


@dataclass(frozen=True)
class DecodeRoofline:
    """Of one model on one device; `seconds`: of a step with `batch` sequences of `context` tokens."""

    model: GPT
    cache: KVCacheShape
    bandwidth: float  # bytes/s, reading and writing together

    def seconds(self, batch: int, context: float) -> float:
        return (self.weight_bytes(batch) + self.kv_bytes(batch, context)) / self.bandwidth

    def weight_bytes(self, batch: int) -> float:
        routed = sum(tensor.nbytes for tensor in expert_tensors(self.model))
        seen = ServedModel.of(self.model.spec).experts
        visited = float(seen.distinct(batch)) / seen.count if seen else 1.0
        return stored_bytes(self.model) - lookup_bytes(self.model) - routed * (1 - visited)

    def kv_bytes(self, batch: int, context: float) -> float:
        reach = min(context, self.model.spec.sliding_window or context)
        return batch * reach * self.cache.block_bytes / self.cache.size


def stored_bytes(model: GPT) -> int:
    """Tied weights count once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def lookup_bytes(model: GPT) -> int:
    """Bytes of tables of which a token reads one row; a tied embedding is read whole, by the head."""
    tables = [model.positions]
    if not model.spec.tie_embeddings:
        tables.append(model.embed)
    return sum(table.weight.nbytes for table in tables if table is not None)


def expert_tensors(model: GPT) -> list[Tensor]:
    """Weights of shape (experts, out, in), without the router."""
    found = [module for module in model.modules() if isinstance(module, MoE)]
    return [tensor for moe in found for tensor in moe.parameters(recurse=False) if tensor.dim() == 3]


def measure_bandwidth(device: torch.device) -> float:
    """Bytes/s of a copy, read and written: the best of a few."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(copy_seconds(source, target) for _ in range(COPIES))
    return 2 * source.nbytes / seconds


def copy_seconds(source: Tensor, target: Tensor) -> float:
    """On a GPU by CUDA events: host time would include a launch and a synchronisation, some percent."""
    if not source.is_cuda:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    target.copy_(source)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3
