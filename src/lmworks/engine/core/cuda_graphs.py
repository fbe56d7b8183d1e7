"""Steps as CUDA graphs: all launches of a step replayed by one call.

A graph is made for a frame of places (a step that takes fewer is padded), a width of the block tables, and what the
sampler does. The first step of a kind runs as it is, which also compiles its kernels, and is then recorded; recording
runs nothing, so it changes no state.

Steps that compute prompts too are of more kinds than those that decode (`frames`): one is recorded when its kind comes
again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .graph_buckets import Prompts, buffer_size, frame_with_prompts, not_below, sizes_up_to
from .sampler import Wants
from .scheduler import Step
from .step_input import Batch, Layout, decoding_frame, unpack

MOST_MIXED = 128  # frames that are recorded, each for a few widths of tables and ways to sample

Result = TypeVar("Result")
Work = Callable[[Batch, Wants | None], Result]


def recorded_as(wants: Wants) -> Wants:
    """What the sampler in a graph does where `wants` is plain: greedy rows take no noise, so one graph does both."""
    return replace(wants, noise=True)


class Graphs(Generic[Result]):
    def __init__(
        self, work: Work[Result], largest: Layout, widest: int, device: torch.device, prompts: Prompts | None = None
    ) -> None:
        """`largest`: the frame of decoding steps; `widest`: of a block table."""
        self.work, self.sizes, self.prompts = work, sizes_up_to(largest.seqs), prompts or Prompts()
        self.buffer = torch.zeros(buffer_size(largest, widest, self.prompts), dtype=torch.int64, device=device)
        self.frames: set[Layout] = set()  # of mixed steps that came
        self.logits: Tensor | None = None  # what all graphs without a sampler give: a pool keeps what a graph returns
        self.most = largest.rows
        self.stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """All recordings, and with the last of them their memory: a pool without graphs takes no new ones."""
        self.recorded: dict[tuple[Layout, Wants | None], tuple[torch.cuda.CUDAGraph, Result]] = {}
        self.pool, self.mixed_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()

    def padded(self, sequences: int, each: int = 1) -> Layout:
        """The frame of a decoding step: so many sequences, of up to `each` tokens."""
        return decoding_frame(not_below(self.sizes, sequences), each)

    def mixed(self, step: Step) -> Layout | None:
        """The frame of a step that computes prompts too; None where it is large, or the first of its kind."""
        frame = frame_with_prompts(step, self.prompts, self.sizes[-1])
        if frame is None:
            return None
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
        batch, mixed = unpack(self.buffer, layout), layout.rows < layout.tokens
        result = self.work(batch, wants)
        if isinstance(result, Tensor) and (self.logits is None or len(self.logits) < len(result)):
            self.logits = result.new_empty(max(self.most, len(result)), *result.shape[1:])
        try:
            self.recorded[layout, wants] = self.record(batch, wants, mixed)
        except torch.OutOfMemoryError:  # a graph has memory of its own
            if not mixed:
                raise
            self.record_no_prompts()
        return result

    def record(self, batch: Batch, wants: Wants | None, mixed: bool) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph()
        now = torch.cuda.current_stream()
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            # Other threads may use the device meanwhile. Graphs never run at once, so they may share memory.
            pool = self.mixed_pool if mixed else self.pool
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = self.work(batch, wants)
                if isinstance(result, Tensor) and self.logits is not None:
                    result = self.logits[: len(result)].copy_(result)  # type: ignore[assignment]
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        now.wait_stream(self.stream)
        return graph, result

    def record_no_prompts(self) -> bool:
        """From now on. What was recorded of them gives its memory back; false where there was nothing."""
        kept = {kind: made for kind, made in self.recorded.items() if kind[0].rows == kind[0].tokens}
        fewer = len(kept) < len(self.recorded)
        self.prompts = Prompts()
        torch.cuda.synchronize(self.buffer.device)
        self.recorded = kept
        self.mixed_pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        return fewer
