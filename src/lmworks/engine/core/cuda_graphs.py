"""CUDA graphs: all kernel launches of a step, replayed by one call.

A graph is captured for a bucket (smaller steps are padded), a width of the block tables, and what the sampler computes.
The first step of a bucket runs eagerly, which also compiles its kernels, and is then captured; capture runs nothing, so
it changes no state. Mixed steps fall into more buckets than decode steps (`graph_buckets`): one is captured when its
bucket is used for the second time.
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

MAX_MIXED_BUCKETS = 128  # that are captured, each for a few table widths and sampler variants

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
        max_blocks_per_seq: int,
        device: torch.device,
        prompts: PrefillBuckets | None = None,
    ) -> None:
        """`largest`: the bucket of decoding steps; `max_blocks_per_seq`: of a block table."""
        self.work, self.sizes, self.prompts = work, capture_sizes(largest.seqs), prompts or PrefillBuckets()
        self.buffer = torch.zeros(
            buffer_size(largest, max_blocks_per_seq, self.prompts), dtype=torch.int64, device=device
        )
        self.mixed_buckets: set[Layout] = set()  # buckets of mixed steps that were seen
        self.logits: Tensor | None = None  # output of all graphs without a sampler: a graph keeps its outputs alive
        self.max_rows = largest.rows
        self.stream = torch.cuda.Stream(device)
        self.reset()

    def reset(self) -> None:
        """Drop all graphs and their memory pools: a pool without graphs cannot be reused."""
        self.captured: dict[tuple[Layout, SamplingMetadata | None], tuple[torch.cuda.CUDAGraph, Result]] = {}
        self.pool, self.mixed_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()

    def padded(self, sequences: int, tokens_per_seq: int = 1) -> Layout:
        """The bucket of a decode step with so many sequences of up to `tokens_per_seq` tokens."""
        return decode_bucket(next_size(self.sizes, sequences), tokens_per_seq)

    def mixed(self, step: Step) -> Layout | None:
        """The bucket of a mixed step; None where the step is too large, or the first of its bucket."""
        bucket = mixed_bucket_for(step, self.prompts, self.sizes[-1])
        if bucket is None:
            return None
        known = bucket in self.mixed_buckets
        if not known and len(self.mixed_buckets) < MAX_MIXED_BUCKETS:
            self.mixed_buckets.add(bucket)
        return bucket if known else None

    def run(self, buffer: Tensor, layout: Layout, sampling_metadata: SamplingMetadata | None) -> Result:
        """Run the step in `buffer` (on the host, or already `self.buffer`). The next run overwrites the result."""
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
            self.logits = result.new_empty(max(self.max_rows, len(result)), *result.shape[1:])
        try:
            self.captured[layout, sampling_metadata] = self.capture(batch, sampling_metadata, mixed)
        except torch.OutOfMemoryError:  # capturing needs memory of its own
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
            # Other threads may use the device meanwhile. Graphs never run concurrently, so they share a pool.
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
        """Free the graphs of mixed steps and capture no more; false where there were none."""
        kept = {kind: made for kind, made in self.captured.items() if kind[0].rows == kind[0].tokens}
        fewer = len(kept) < len(self.captured)
        self.prompts = PrefillBuckets()
        torch.cuda.synchronize(self.buffer.device)
        self.captured = kept
        self.mixed_pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        return fewer
