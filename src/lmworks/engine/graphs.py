"""Decoding steps as CUDA graphs: all launches of a step replayed by one call.

A graph is made for a number of sequences (a step is padded to the next one), a width of the block tables, and what the
sampler does. The first step of a kind runs as it is, which also compiles its kernels, and is then recorded; recording
runs nothing, so it changes no state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .batch import Batch, Layout, unpack
from .sampler import Wants

Result = TypeVar("Result")
Work = Callable[[Batch, Wants | None], Result]


def recorded_as(wants: Wants) -> Wants:
    """What the sampler in a graph does where `wants` is plain: greedy rows take no noise, so one graph does both."""
    return replace(wants, noise=True)


def sizes_up_to(most: int) -> list[int]:
    """Numbers of sequences that graphs are made for: finer where a step is short."""
    fine = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    sizes = [size for size in fine if size < most]
    sizes += range(160, most, 32)
    return [*sizes, most]


class Graphs(Generic[Result]):
    def __init__(self, work: Work[Result], largest: Layout, device: torch.device) -> None:
        self.work, self.sizes = work, sizes_up_to(largest.seqs)
        self.buffer = torch.zeros(largest.size, dtype=torch.int64, device=device)
        self.recorded: dict[tuple[Layout, Wants | None], tuple[torch.cuda.CUDAGraph, Result]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def padded(self, sequences: int) -> int:
        return next(size for size in self.sizes if size >= sequences)

    def run(self, buffer: Tensor, layout: Layout, wants: Wants | None) -> Result:
        """The step in `buffer` (on the host). What it returns is overwritten by the next."""
        self.buffer[: layout.size].copy_(buffer, non_blocking=True)
        found = self.recorded.get((layout, wants))
        if found is not None:
            graph, result = found
            graph.replay()
            return result
        batch = unpack(self.buffer, layout)
        result = self.work(batch, wants)
        self.recorded[layout, wants] = self.record(batch, wants)
        return result

    def record(self, batch: Batch, wants: Wants | None) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph()
        now = torch.cuda.current_stream()
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            # Other threads may use the device meanwhile. Graphs never run at once, so they may share memory.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            result = self.work(batch, wants)
            graph.capture_end()
        now.wait_stream(self.stream)
        return graph, result
