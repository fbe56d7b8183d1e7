"""Steps as CUDA graphs: all launches of a step replayed by one call.

A graph is made for a frame of places (a step that takes fewer is padded), a width of the block tables, and what the
sampler does. The first step of a kind runs as it is, which also compiles its kernels, and is then recorded; recording
runs nothing, so it changes no state.

Decoding steps have a frame for each of a few numbers of sequences. Steps that compute prompts too are of more kinds:
small ones, which take the host longer to launch than the device to compute, are recorded when a kind comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .batch import Batch, Layout, decoding_frame, mixed_frame, unpack
from .sampler import Wants
from .scheduler import Step

MIXED = [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]  # tokens of prompts that a frame has room for
MOST_PROMPTS = 32  # that a mixed step may compute
MOST_MIXED = 256  # kinds of mixed steps that are recorded

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
    def __init__(self, work: Work[Result], largest: Layout, widest: int, device: torch.device) -> None:
        """`largest`: the frame of decoding steps; `widest`: of a block table."""
        self.work, self.sizes = work, sizes_up_to(largest.seqs)
        frames = (largest, mixed_frame(largest.seqs, MOST_PROMPTS, MIXED[-1], 1))
        size = max(frame._replace(width=widest).size for frame in frames)
        self.buffer = torch.zeros(size, dtype=torch.int64, device=device)
        self.frames: set[Layout] = set()  # of mixed steps that came
        self.stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """All recordings, and with the last of them their memory: a pool without graphs takes no new ones."""
        self.recorded: dict[tuple[Layout, Wants | None], tuple[torch.cuda.CUDAGraph, Result]] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def padded(self, sequences: int, each: int = 1) -> Layout:
        """The frame of a decoding step: so many sequences, of up to `each` tokens."""
        return decoding_frame(next(size for size in self.sizes if size >= sequences), each)

    def mixed(self, step: Step) -> Layout | None:
        """The frame of a step that computes prompts too; None where it is large, or the first of its kind."""
        counts = [chunk.count for chunk in step.chunks if chunk.count > 1]
        singles, tokens = len(step.chunks) - len(counts), sum(counts)
        guessing = any(chunk.wanted > 1 for chunk in step.chunks)
        if guessing or not 0 < len(counts) <= MOST_PROMPTS or tokens > MIXED[-1]:
            return None
        decoding = self.padded(singles).seqs if singles else 0
        room = next(size for size in MIXED if size >= tokens)
        frame = mixed_frame(decoding, power_of_two(len(counts)), room, power_of_two(max(counts)))
        known = frame in self.frames
        if not known and len(self.frames) < MOST_MIXED:
            self.frames.add(frame)
        return frame if known else None

    def run(self, buffer: Tensor, layout: Layout, wants: Wants | None) -> Result:
        """The step in `buffer`, on the host or already in ours. What it returns is overwritten by the next."""
        if buffer.data_ptr() != self.buffer.data_ptr():
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


def power_of_two(number: int) -> int:
    """The next one that is not below."""
    return 1 << (number - 1).bit_length()
