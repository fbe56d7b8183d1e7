"""Sleeping and waking: the memory of the KV cache is given back between rollouts, for a trainer on the same device.

A cache at reserved addresses (`ModelRunner(…, sleepable=True)`, `virtual_memory.py`) wakes where it slept, and CUDA
graphs stay valid. Where the platform cannot, or for any other engine, it is freed and allocated again, and graphs are
captured again if it has moved. Weights stay: a trainer may share them, or replaces them (`live_weights.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...spec import LMWorksError, SpecError
from .cuda_graphs import CUDAGraphs, capture_graphs
from .kv_cache import KVCache
from .virtual_memory import OutOfMemory

if TYPE_CHECKING:
    from .model_runner import ModelRunner

ASLEEP = "the engine is asleep, without a KV cache: call wake() before requests are sent"


def sleep(runner: ModelRunner) -> int:
    """Release the memory of the KV cache on this rank; returns its bytes."""
    if runner.tp_rank is not None and not runner.tp_rank.called_on_all_ranks:
        raise SpecError(f"an engine can sleep with engine.tp = 1, not {runner.tp_rank.tp}")
    return sum(cache.sleep() for cache in caches(runner))


def wake(runner: ModelRunner) -> int:
    """Take it again, or nothing if there is too little; returns the CUDA graphs that have to be captured again."""
    if not any(cache.asleep for cache in caches(runner)):
        return 0
    try:
        unmoved = [cache.wake() for cache in caches(runner)]
    except OutOfMemory as error:
        sleep(runner)
        size = sum(cache.blocks * cache.shape.block_bytes for cache in caches(runner))
        raise LMWorksError(
            f"the engine cannot wake: its KV cache takes {size / 2**30:,.2f} GiB{free_memory(runner.device)}; "
            f"release memory and call wake() again, or lower engine.memory or engine.blocks ({error})"
        ) from None
    return 0 if all(unmoved) else recapture(runner)


def recapture(runner: ModelRunner) -> int:
    """Drop all graphs and capture those of plain decode steps; the others follow when they are needed."""
    graphs = captured_graphs(runner)
    dropped = sum(len(each.captured) for each in graphs)
    for each in graphs:
        each.reset()
    if runner.graphs is not None:
        capture_graphs(runner)
    return dropped


def caches(runner: ModelRunner) -> list[KVCache]:
    return [runner.cache, *([] if runner.draft is None else [runner.draft.cache])]


def captured_graphs(runner: ModelRunner) -> list[CUDAGraphs]:
    found = (runner.graphs, None if runner.draft is None else runner.draft.graphs)
    return [graphs for graphs in found if graphs is not None]


def free_memory(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f", of which {torch.cuda.mem_get_info(device)[0] / 2**30:,.2f} are free"


def resident_memory(runner: ModelRunner) -> dict[str, int]:
    """Bytes that a sleeping runner keeps, by what they are for. Weights may be a trainer's too."""
    models = [runner.model, *([] if runner.draft is None else [runner.draft.model])]
    weights = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    tables = [runner.token_lookup, *(value for value in vars(runner.sampler).values() if isinstance(value, Tensor))]
    graphs = captured_graphs(runner)
    inputs = [tensor for each in graphs for tensor in (each.buffer, each.logits) if tensor is not None]
    pools = {pool for each in graphs for pool in (each.pool, each.mixed_pool)}
    segments = torch.cuda.memory_snapshot() if pools else []
    return {
        "weights": storage_bytes(weights),
        "step inputs, sampler": storage_bytes([*tables, *inputs]),
        "CUDA graphs": sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) in pools),
    }


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each counted once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
