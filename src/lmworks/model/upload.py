"""From files to a device, several tensors at a time.

Memory-mapped files are read at the pace of page faults: 2 GB/s from a disk, 5 from memory. Here each of many threads
reads into page-locked buffers of its own in turn: while one is on its way to the GPU, the other is being filled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import local
from typing import TypeVar

import torch
from torch import Tensor

from ..spec import CheckpointError
from .tensor_files import Span

STAGED = ("cuda",)  # devices that weights reach so
THREADS = 16
PIECE = 8 * 2**20  # bytes of one buffer: a disk is asked for enough at once, and pinning a GiB would take a second

Item = TypeVar("Item")


class Lane:
    """Two buffers that take turns. One thread uses it."""

    def __init__(self, device: torch.device, piece: int = PIECE) -> None:
        self.device, self.piece, self.turn = device, piece, 0
        self.cuda = device.type == "cuda"
        self.buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(2)]
        self.free = [torch.cuda.Event() for _ in self.buffers] if self.cuda else []

    def fetch(self, file: int, span: Span) -> Tensor:
        """A tensor of an open file. It may still be on its way; later work on the stream waits for it."""
        there = torch.empty(span.shape, dtype=span.dtype, device=self.device)
        target = there.view(-1).view(torch.uint8)
        for begin in range(0, span.bytes, self.piece):
            size = min(self.piece, span.bytes - begin)
            self.turn = 1 - self.turn
            buffer = self.buffers[self.turn][:size]
            if self.cuda:
                self.free[self.turn].synchronize()  # what it held last has left it
            read_into(file, buffer.numpy().data, span.start + begin)
            target[begin : begin + size].copy_(buffer, non_blocking=True)
            if self.cuda:
                self.free[self.turn].record()
        return there


def read_into(file: int, buffer: memoryview, start: int) -> None:
    """All of it; the interpreter is not locked meanwhile."""
    while len(buffer):
        count = os.preadv(file, [buffer], start)
        if count == 0:
            raise CheckpointError("a file of weights became shorter while it was read")
        buffer, start = buffer[count:], start + count


def in_lanes(items: Iterable[Item], work: Callable[[Item, Lane], None], device: torch.device) -> None:
    """Do `work` on every item, by THREADS threads with a lane each. The first error is raised, after all have ended."""
    mine = local()

    def run(item: Item) -> None:
        here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.no_grad(), here:  # settings of the thread
            if not hasattr(mine, "lane"):
                mine.lane = Lane(device)
            work(item, mine.lane)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run, item) for item in items]:
            done.result()
