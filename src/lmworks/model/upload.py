"""From memory-mapped files to a device, several tensors at a time.

A copy from pageable memory to a GPU runs at the pace of one core that takes page faults. Here each of a few threads
fills page-locked buffers of its own in turn: while one is on its way, the other is being filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import local
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

THREADS = 8
PIECE = 32 * 2**20  # bytes of one buffer

Item = TypeVar("Item")


class Lane:
    """Two buffers that take turns. One thread uses it."""

    def __init__(self, device: torch.device, piece: int = PIECE) -> None:
        self.device, self.piece, self.turn = device, piece, 0
        self.cuda = device.type == "cuda"
        self.buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(2)]
        self.free = [torch.cuda.Event() for _ in self.buffers] if self.cuda else []

    def upload(self, host: Tensor) -> Tensor:
        """The same tensor on the device. It may still be on its way there; later work on the stream waits for it."""
        there = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        source: Any = host.contiguous().view(-1).view(torch.uint8).numpy()
        target = there.view(-1).view(torch.uint8)
        for begin in range(0, source.size, self.piece):
            part = source[begin : begin + self.piece]
            self.turn = 1 - self.turn
            buffer = self.buffers[self.turn][: part.size]
            if self.cuda:
                self.free[self.turn].synchronize()  # what it held last has left it
            np.copyto(buffer.numpy(), part)  # holds no lock of the interpreter, and takes the page faults
            target[begin : begin + part.size].copy_(buffer, non_blocking=True)
            if self.cuda:
                self.free[self.turn].record()
        return there


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
