"""Copies of blocks between the device's cache and host memory.

A block in the cache is a slice of every layer; outside it is contiguous: the numbers of all layers and, of a quantized
cache, their scales, then the same of the draft model's cache. On CUDA blocks are gathered into a staging buffer on the
compute stream, so in the order of the steps that write and overwrite them, and cross the bus on a stream beside it.
The compute stream waits for the bus only when it needs what comes over it, or when all staging buffers are under way.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.kv_cache import KVCache

STAGING_BYTES = 64 * 2**20  # of one buffer
BUFFERS = 3  # of each direction

Done = Callable[[], None]


@dataclass(eq=False)
class Staging:
    """A buffer on the device, and the last copy that uses it."""

    data: Tensor  # (blocks, block_bytes) uint8
    used: torch.cuda.Event | None = None


class DeviceCopies:
    """Called by the engine's thread. `done` is called there, or on CUDA by a thread that waits for the copy."""

    def __init__(self, caches: Sequence[KVCache], memory: Tensor) -> None:
        """`memory`: (slots, block_bytes) uint8, on the host."""
        self.caches, self.memory = caches, memory
        self.device = caches[0].store.device
        self.block_bytes = memory.shape[1]
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            rows = max(1, STAGING_BYTES // self.block_bytes)
            self.stream = torch.cuda.Stream(self.device)

            def buffers() -> list[Staging]:
                return [
                    Staging(torch.empty((rows, self.block_bytes), dtype=torch.uint8, device=self.device))
                    for _ in range(BUFFERS)
                ]

            self.saving, self.loading = buffers(), buffers()
            self.start_waiting()

    def start_waiting(self) -> None:
        self.pending: queue.SimpleQueue[tuple[torch.cuda.Event, Done] | None] = queue.SimpleQueue()
        self.waiting = threading.Thread(target=self.wait_for_copies, name="kv-copies", daemon=True)
        self.waiting.start()

    def save(self, blocks: Sequence[int], slots: Sequence[int], done: Done) -> None:
        """Blocks of the cache, as they are after all launched steps, to slots of host memory."""
        if self.stream is None:
            self.memory[list(slots)] = gather(self.caches, blocks)
            done()
            return
        main, rows = torch.cuda.current_stream(self.device), len(self.saving[0].data)
        for begin in range(0, len(blocks), rows):
            part = blocks[begin : begin + rows]
            staging = self.next(self.saving)
            if staging.used is not None:
                main.wait_event(staging.used)
            staging.data[: len(part)].copy_(gather(self.caches, part))
            self.stream.wait_stream(main)
            with torch.cuda.stream(self.stream):
                for row, slot in enumerate(slots[begin : begin + rows]):
                    self.memory[slot].copy_(staging.data[row], non_blocking=True)
                staging.used = self.stream.record_event()
        assert staging.used is not None
        self.pending.put((staging.used, done))

    def load(self, slots: Sequence[int], blocks: Sequence[int], done: Done) -> None:
        """Slots of host memory to blocks of the cache, before all steps that are launched from now on."""
        if self.stream is None:
            scatter(self.caches, self.memory[list(slots)], blocks)
            done()
            return
        main, rows = torch.cuda.current_stream(self.device), len(self.loading[0].data)
        for begin in range(0, len(blocks), rows):
            part = blocks[begin : begin + rows]
            staging = self.next(self.loading)
            with torch.cuda.stream(self.stream):
                if staging.used is not None:
                    self.stream.wait_event(staging.used)
                for row, slot in enumerate(slots[begin : begin + rows]):
                    staging.data[row].copy_(self.memory[slot], non_blocking=True)
                arrived = self.stream.record_event()
            main.wait_event(arrived)
            scatter(self.caches, staging.data[: len(part)], part)
            staging.used = main.record_event()
        self.pending.put((arrived, done))

    def next(self, buffers: list[Staging]) -> Staging:
        """The one that was used first."""
        buffers.append(buffers.pop(0))
        return buffers[-1]

    def wait_for_copies(self) -> None:
        while (item := self.pending.get()) is not None:
            event, done = item
            event.synchronize()
            done()

    def settle(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()
            self.stream.synchronize()

    def close(self) -> None:
        if self.stream is not None:
            self.settle()
            self.pending.put(None)
            self.waiting.join()


def block_bytes(caches: Sequence[KVCache]) -> int:
    return sum(cache.shape.block_bytes for cache in caches)


def gather(caches: Sequence[KVCache], blocks: Sequence[int]) -> Tensor:
    """(blocks, block_bytes) uint8 on the device."""
    index = to_device(blocks, caches[0].store.device)
    parts = [
        pool.index_select(2, index).movedim(2, 0).contiguous().view(len(blocks), -1).view(torch.uint8)
        for cache in caches
        for pool in cache.pools()
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def scatter(caches: Sequence[KVCache], data: Tensor, blocks: Sequence[int]) -> None:
    """The reverse."""
    index, begin = to_device(blocks, caches[0].store.device), 0
    for cache in caches:
        for pool in cache.pools():
            shape = (*pool.shape[:2], *pool.shape[3:])  # (layers, vectors, heads, size, …)
            end = begin + math.prod(shape) * pool.element_size()
            part = data[:, begin:end].contiguous().view(pool.dtype).view(len(blocks), *shape)
            pool.index_copy_(2, index, part.movedim(0, 2))
            begin = end


def to_device(blocks: Sequence[int], device: torch.device) -> Tensor:
    index = torch.tensor(blocks, dtype=torch.int64)
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)
