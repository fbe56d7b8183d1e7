"""Blocks in host memory: slots of one allocation, the least recently used evicted first.

A slot is pinned while something reads or writes it: a copy from or to the device, a write to a disk, a reader at
another server. The engine's thread and those of the stores share it; what they copy, they copy without the lock.
Where an engine has several ranks, their processes map the same memory (`rank_copies.py`).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...spec import LMWorksError, SpecError


@dataclass(eq=False, slots=True)
class Slot:
    index: int
    key: bytes
    pins: int = 1
    ready: bool = False  # its content is there
    source: str = "host"  # the tier that it was fetched from


class HostMemory:
    def __init__(self, size: int, block_bytes: int, pinned: bool, shared: bool = False) -> None:
        """`size`: bytes. `pinned`: page-locked, for asynchronous copies to a GPU. `shared`: others can map it."""
        self.block_bytes = block_bytes
        slots = size // block_bytes
        if not slots:
            raise LMWorksError(
                f"engine.kv_host_gib = {size / 2**30:g}: one block takes {block_bytes:,} bytes, so none fits"
            )
        self.file = anonymous_file() if shared else None
        self.memory = (
            torch.empty((slots, block_bytes), dtype=torch.uint8)
            if self.file is None
            else map_memory(self.path, slots, block_bytes)
        )
        self.registered = pinned
        if pinned:
            page_lock(self.memory)
        self.slots: OrderedDict[bytes, Slot] = OrderedDict()  # least recently used first
        self.free = list(range(slots - 1, -1, -1))
        self.changed = threading.Condition()  # guards slots and free; notified when a slot is filled or given up

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        return self.memory.shape[0]

    @property
    def path(self) -> str:
        """Of the file that another process maps (`map_memory`), until it is closed."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def close_file(self) -> None:
        """All have mapped it: the memory is freed with the last of them."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    @property
    def whole(self) -> memoryview:
        return self.memory.numpy().reshape(-1).data

    def view(self, slot: Slot) -> memoryview:
        return self.memory[slot.index].numpy().data

    def __contains__(self, key: bytes) -> bool:
        """Also while it is being filled."""
        return key in self.slots

    def holds(self, slot: Slot) -> bool:
        """Whether it is found under its hash: neither given up nor dropped since."""
        return self.slots.get(slot.key) is slot

    def pin_prefix(self, keys: Sequence[bytes]) -> list[Slot]:
        """Slots of the first blocks, up to one that is not there, pinned."""
        found = []
        with self.changed:
            for key in keys:
                slot = self.slots.get(key)
                if slot is None or not slot.ready:
                    break
                slot.pins += 1
                self.slots.move_to_end(key)
                found.append(slot)
        return found

    def reserve(self, key: bytes) -> Slot | None:
        """A pinned slot to be filled; None if the block is there already, or all slots are pinned."""
        with self.changed:
            if key in self.slots:
                self.slots.move_to_end(key)
                return None
            if not self.free and not self.evict():
                return None
            slot = self.slots[key] = Slot(self.free.pop(), key)
            return slot

    def evict(self) -> bool:
        for key, slot in self.slots.items():
            if not slot.pins:
                del self.slots[key]
                self.free.append(slot.index)
                return True
        return False

    def fill(self, slots: Sequence[Slot]) -> None:
        """Their content is there. They stay pinned."""
        with self.changed:
            for slot in slots:
                slot.ready = True
            self.changed.notify_all()

    def unpin(self, slots: Sequence[Slot]) -> None:
        """A slot that is not filled by then is given up."""
        with self.changed:
            for slot in slots:
                slot.pins -= 1
                known = self.holds(slot)
                if slot.pins:
                    continue
                if known and not slot.ready:
                    del self.slots[slot.key]
                    known = False
                if not known:
                    self.free.append(slot.index)
            self.changed.notify_all()

    def wait(self, key: bytes, seconds: float) -> None:
        """Until nobody fills this block."""
        with self.changed:
            self.changed.wait_for(lambda: (slot := self.slots.get(key)) is None or slot.ready, seconds)

    def drop(self, key: bytes) -> None:
        """It is found no more; its slot is free once nobody uses it."""
        with self.changed:
            slot = self.slots.pop(key, None)
            if slot is not None and not slot.pins:
                self.free.append(slot.index)

    def clear(self) -> None:
        with self.changed:
            keys = list(self.slots)
        for key in keys:
            self.drop(key)

    def close(self) -> None:
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self.registered = False
        self.close_file()


def anonymous_file() -> int:
    """In memory, without the limit of a mounted /dev/shm."""
    if not hasattr(os, "memfd_create"):
        raise SpecError(
            "engine.kv_host_gib with engine.tp > 1: ranks share host memory by memfd_create, of Linux alone"
        )
    return os.memfd_create("lmworks-kv-blocks")


def map_memory(path: str, slots: int, block_bytes: int) -> Tensor:
    """(slots, block_bytes) uint8."""
    return torch.from_file(path, shared=True, size=slots * block_bytes, dtype=torch.uint8).view(slots, block_bytes)


def page_lock(memory: Tensor) -> None:
    """Registered, as torch's pinned allocator would round the size up to a power of two."""
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status != 0:
        size = memory.numel() / 2**30
        raise LMWorksError(f"engine.kv_host_gib: {size:g} GiB cannot be page-locked (CUDA error {status})")
