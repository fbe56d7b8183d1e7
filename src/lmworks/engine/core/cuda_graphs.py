"""CUDA graphs: all kernel launches of a step, replayed by one call.

A graph is captured for a bucket (smaller steps are padded), a width of the block tables, and what the sampler computes.
The first step of a bucket runs eagerly, which also compiles its kernels, and is then captured; capture runs nothing, so
it changes no state. Before the first request decode steps are captured, and those of a single prompt of any size with
few decoding sequences. Other mixed steps fall into many buckets: one is captured when it is used for the second time.

Buckets are the sizes that steps are padded to, so that few CUDA graphs cover them all. Decode steps have a bucket for
each of a few numbers of sequences. Mixed steps (prefill and decode) vary more, so their buckets are coarse. They exist
only up to the number of tokens from which the device takes longer to compute a step than the host to launch it: beyond
that, padding costs more than launches.
"""

from __future__ import annotations

import gc
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...kernels.inference.paged_attention import SHORT_PROMPT
from ...spec import EngineSpec, ModelSpec
from .kv_cache import free_on_gpu
from .request import Request, Sequence
from .sampler import SamplingMetadata
from .sampling_params import SamplingParams
from .scheduler import Chunk, Step
from .step_input import Batch, Layout, decode_bucket, gathered_keys, mixed_bucket, unpack

if TYPE_CHECKING:
    from .model_runner import ModelRunner

# Prompts and decoding sequences of a mixed bucket. A bucket has more than a step needs where these are cheap beside its
# tokens: padded prompts times the longest prompt are programs that return at once.
PROMPT_SIZES, MAX_IDLE_PROGRAMS = (1, 4, 16, 64, 256), 8
DECODE_SIZES, TOKENS_PER_PADDED_DECODE = (0, 8, 32, 128, 512, 2048), 16
# Longest context of a sequence in a mixed bucket: split-K is chosen as if the bucket were full, too few splits for
# more.
MAX_CONTEXT = 8192
# Tokens × weights of a layer that an H200 computes in 0.7 ms, while a host launches the kernels of one layer.
LAUNCH_BOUND_WORK = 2e11


def capture_sizes(max_seqs: int) -> list[int]:
    """Batch sizes that CUDA graphs are captured for: finer where a step is short."""
    fine = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    sizes = [size for size in fine if size < max_seqs]
    sizes += range(160, max_seqs, 32)
    return [*sizes, max_seqs]


class PrefillBuckets(NamedTuple):
    """Which mixed steps are captured."""

    token_sizes: tuple[int, ...] = ()  # prompt tokens of each bucket
    max_tokens: int = 0  # of a bucket, decoding sequences included
    width: int = 0  # of its block tables: one width for all contexts, so that fewer graphs cover them
    gathers: bool = False  # whether keys of long prompts are gathered


def prefill_buckets(model: ModelSpec, engine: EngineSpec, gathers: bool = False) -> PrefillBuckets:
    if not engine.graph_prompts:
        return PrefillBuckets()
    most, budget = int(LAUNCH_BOUND_WORK / model.block_params), engine.max_batch_tokens
    token_sizes = [size * 2**double for double in range(budget.bit_length()) for size in (64, 96)]
    return PrefillBuckets(
        tuple(size for size in token_sizes[: 1 + bisect_left(token_sizes, budget)] if size <= most),
        most,
        math.ceil(min(MAX_CONTEXT, engine.context) / engine.block),
        gathers,
    )


def buffer_size(largest: Layout, max_blocks_per_seq: int, prompts: PrefillBuckets) -> int:
    """Of the largest bucket, in int64 numbers."""
    mixed = (mixed_bucket(largest.seqs, PROMPT_SIZES[-1], size, 1, keys=1) for size in prompts.token_sizes[-1:])
    sharing = largest._replace(shared_tiles=largest.seqs)
    return max(bucket._replace(width=max_blocks_per_seq).size for bucket in (sharing, *mixed))


def mixed_bucket_for(step: Step, prompts: PrefillBuckets, seqs: int) -> Layout | None:
    """The bucket of a mixed step, with up to `seqs` decoding sequences; None where a graph would not be faster."""
    prefills = [chunk for chunk in step.chunks if chunk.count > 1]
    drafting = any(chunk.num_logits > 1 for chunk in step.chunks)
    if drafting or not prefills or max(chunk.start + chunk.count for chunk in step.chunks) > MAX_CONTEXT:
        return None
    counts, ends = [chunk.count for chunk in prefills], [chunk.start + chunk.count for chunk in prefills]
    return prompts_bucket(counts, ends, len(step.chunks) - len(prefills), prompts, seqs)


def prompts_bucket(
    counts: list[int], ends: list[int], singles: int, prompts: PrefillBuckets, seqs: int
) -> Layout | None:
    """For chunks of `counts` tokens that end at `ends` beside `singles` decoding sequences."""
    num_prompts = next_size(PROMPT_SIZES, len(counts))
    prompt_tokens = next_size(prompts.token_sizes, max(sum(counts), 2 * num_prompts))
    if not num_prompts or not prompt_tokens:
        return None
    max_query_len = max(SHORT_PROMPT, power_of_two(max(counts)))
    idle_programs = MAX_IDLE_PROGRAMS * prompt_tokens
    num_prompts = max(num_prompts, *(size for size in PROMPT_SIZES[:-1] if size * max_query_len <= idle_programs))
    decode_sizes = [*(size for size in DECODE_SIZES if size < seqs), seqs]
    singles = max(singles, *(size for size in decode_sizes if TOKENS_PER_PADDED_DECODE * size <= prompt_tokens))
    keys = gathered_keys(np.array(ends), np.array(counts)) if prompts.gathers else 0
    bucket = mixed_bucket(
        next_size(decode_sizes, singles),
        num_prompts,
        prompt_tokens,
        max_query_len,
        prompts.width,
        power_of_two(keys) if keys else 0,
    )
    return bucket if bucket.tokens <= prompts.max_tokens else None


def next_size(sizes: Iterable[int], number: int) -> int:
    """The first size that is not below `number`, or 0."""
    return next((size for size in sizes if size >= number), 0)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


# --- graphs ---------------------------------------------------------------------------------------------

MAX_MIXED_BUCKETS = 128  # that are captured, each for a few table widths and sampler variants

Result = TypeVar("Result")
Work = Callable[[Batch, SamplingMetadata | None], Result]


def captured_metadata(sampling_metadata: SamplingMetadata) -> SamplingMetadata:
    """What a captured sampler computes: with noise, which greedy rows ignore, so that one graph serves both."""
    return sampling_metadata._replace(noise=True)


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

    @property
    def max_mixed_tokens(self) -> int:
        """Of a bucket of mixed steps, padding included."""
        return self.sizes[-1] + max(self.prompts.token_sizes, default=0)

    def mixed(self, step: Step) -> Layout | None:
        """The bucket of a mixed step; None where the step is too large, or the first of its bucket."""
        bucket = mixed_bucket_for(step, self.prompts, self.sizes[-1])
        if bucket is None:
            return None
        known = bucket in self.mixed_buckets
        if not known and len(self.mixed_buckets) < MAX_MIXED_BUCKETS:
            self.mixed_buckets.add(bucket)
        return bucket if known else None

    def single_prompts(self, context: int) -> list[Layout]:
        """The buckets of single prompts below `context`, the largest first."""
        sizes = (1, *self.prompts.token_sizes)
        fitting = [min(size, context - 1) for before, size in pairwise(sizes) if before < context - 1]
        buckets = (prompts_bucket([size], [size], 0, self.prompts, self.sizes[-1]) for size in reversed(fitting))
        return [bucket for bucket in buckets if bucket is not None]

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
        with torch.cuda.stream(self.stream), paused_gc():
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


@contextmanager
def paused_gc() -> Iterator[None]:
    """No search for reference cycles. With a trainer's objects it takes longer than a decode step; and a graph of a
    former engine that it destroys breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# --- memory profile and capture, before the first request ------------------------------------------------


def run_largest_step(runner: ModelRunner) -> None:
    """A dummy step with the most tokens and sequences."""
    spec = runner.spec
    seqs = min(spec.max_seqs, spec.max_batch_tokens)
    run_dummy_step(runner, seqs, max(1, min(spec.max_batch_tokens // seqs, spec.context - 1)))


def run_dummy_step(runner: ModelRunner, seqs: int, count: int) -> None:
    """A dummy prefill of `seqs` prompts of `count` tokens; all write to block 0."""
    request = Request([0] * count, SamplingParams(max_tokens=1))
    chunks = []
    for slot in range(seqs):
        sequence = Sequence(request, slot, slot, [0] * count, count, slot=slot)
        sequence.blocks = [0] * math.ceil(count / runner.spec.block)
        runner.admit(sequence)
        chunks.append(Chunk(sequence, 0, count, 1))
    runner.launch(Step(chunks)).read()


def profile_cache_memory(runner: ModelRunner) -> int:
    """Bytes left for the KV cache beside the peak of the largest step, which also loads its kernels."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(runner.device)
    run_largest_step(runner)
    peak = torch.cuda.max_memory_allocated(runner.device)
    torch.cuda.empty_cache()
    return free_on_gpu(runner.device, runner.spec.memory, peak)


@torch.no_grad()
def capture_graphs(runner: ModelRunner) -> None:
    """Capture plain decode steps of all bucket sizes, and single prompts.

    Rarer variants (wider tables, log-probabilities) are captured when first needed, other mixed steps when their bucket
    is used again; that step takes longer.
    """
    graphs = runner.graphs
    assert graphs is not None
    buckets = [graphs.padded(size) for size in reversed(graphs.sizes)]  # the largest first: others reuse its memory
    if runner.draft is None:
        prompts = graphs.single_prompts(runner.spec.context)
        graphs.mixed_buckets.update(prompts)
        buckets += prompts
    for bucket in buckets:
        graphs.run(*runner.packer.dummy_step(bucket), captured_metadata(SamplingMetadata()))
    torch.cuda.synchronize(runner.device)
