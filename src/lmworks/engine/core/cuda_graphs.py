"""Steps as CUDA graphs: all launches of a step replayed by one call.

A graph is made for a frame of places (a step that takes fewer is padded), a width of the block tables, and what the
sampler does. The first step of a kind runs as it is, which also compiles its kernels, and is then recorded; recording
runs nothing, so it changes no state.

Steps that compute prompts too are of more kinds than those that decode (`mixed_buckets`): one is recorded when its kind
comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .graph_buckets import PrefillBuckets, buffer_size, capture_sizes, mixed_bucket_for, next_size
from .sampler import SamplingMetadata
from .scheduler import Step
from .step_input import Batch, Layout, decode_bucket, unpack

MAX_MIXED_BUCKETS = 128  # frames that are recorded, each for a few widths of tables and ways to sample

Result = TypeVar("Result")
Work = Callable[[Batch, SamplingMetadata | None], Result]


def captured_metadata(sampling_metadata: SamplingMetadata) -> SamplingMetadata:
    """What a captured sampler computes: with noise, which greedy rows ignore, so that one graph serves both."""
    return replace(sampling_metadata, noise=True)


class CUDAGraphs(Generic[Result]):
    def __init__(
        self,
        work: Work[Result],
        largest: Layout,
        widest: int,
        device: torch.device,
        prompts: PrefillBuckets | None = None,
    ) -> None:
        """`largest`: the bucket of decoding steps; `widest`: of a block table."""
        self.work, self.sizes, self.prompts = work, capture_sizes(largest.seqs), prompts or PrefillBuckets()
        self.buffer = torch.zeros(buffer_size(largest, widest, self.prompts), dtype=torch.int64, device=device)
        self.mixed_buckets: set[Layout] = set()  # of mixed steps that came
        self.logits: Tensor | None = None  # what all graphs without a sampler give: a pool keeps what a graph returns
        self.most = largest.rows
        self.stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """All recordings, and with the last of them their memory: a pool without graphs takes no new ones."""
        self.captured: dict[tuple[Layout, SamplingMetadata | None], tuple[torch.cuda.CUDAGraph, Result]] = {}
        self.pool, self.mixed_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()

    def padded(self, sequences: int, each: int = 1) -> Layout:
        """The frame of a decoding step: so many sequences, of up to `each` tokens."""
        return decode_bucket(next_size(self.sizes, sequences), each)

    def mixed(self, step: Step) -> Layout | None:
        """The frame of a step that computes prompts too; None where it is large, or the first of its kind."""
        bucket = mixed_bucket_for(step, self.prompts, self.sizes[-1])
        if bucket is None:
            return None
        known = bucket in self.mixed_buckets
        if not known and len(self.mixed_buckets) < MAX_MIXED_BUCKETS:
            self.mixed_buckets.add(bucket)
        return bucket if known else None

    def run(self, buffer: Tensor, layout: Layout, sampling_metadata: SamplingMetadata | None) -> Result:
        """The step in `buffer`, on the host or already in ours. What it returns is overwritten by the next."""
        if buffer.data_ptr() != self.buffer.data_ptr():
            self.buffer[: layout.size].copy_(buffer, non_blocking=True)
        found = self.captured.get((layout, sampling_metadata))
        if found is not None:
            graph, result = found
            graph.replay()
            return result
        batch, mixed = unpack(self.buffer, layout), layout.rows < layout.tokens
        result = self.work(batch, sampling_metadata)
        if isinstance(result, Tensor) and (self.logits is None or len(self.logits) < len(result)):
            self.logits = result.new_empty(max(self.most, len(result)), *result.shape[1:])
        try:
            self.captured[layout, sampling_metadata] = self.capture(batch, sampling_metadata, mixed)
        except torch.OutOfMemoryError:  # a graph has memory of its own
            if not mixed:
                raise
            self.drop_prefill_graphs()
        return result

    def capture(
        self, batch: Batch, sampling_metadata: SamplingMetadata | None, mixed: bool
    ) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph()
        now = torch.cuda.current_stream()
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            # Other threads may use the device meanwhile. Graphs never run at once, so they may share memory.
            pool = self.mixed_pool if mixed else self.pool
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = self.work(batch, sampling_metadata)
                if isinstance(result, Tensor) and self.logits is not None:
                    result = self.logits[: len(result)].copy_(result)  # type: ignore[assignment]
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        now.wait_stream(self.stream)
        return graph, result

    def drop_prefill_graphs(self) -> bool:
        """From now on. What was recorded of them gives its memory back; false where there was nothing."""
        kept = {kind: made for kind, made in self.captured.items() if kind[0].rows == kind[0].tokens}
        fewer = len(kept) < len(self.captured)
        self.prompts = PrefillBuckets()
        torch.cuda.synchronize(self.buffer.device)
        self.captured = kept
        self.mixed_pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        return fewer
