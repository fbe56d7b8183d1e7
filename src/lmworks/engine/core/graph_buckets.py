"""Buckets: the sizes that steps are padded to, so that few CUDA graphs cover them all.

Decode steps have a bucket for each of a few numbers of sequences. Mixed steps (prefill and decode) vary more, so their
buckets are coarse. They exist only up to the number of tokens from which the device takes longer to compute a step than
the host to launch it: beyond that, padding costs more than launches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from ...kernels.inference.paged_attention import SHORT
from ...spec import EngineSpec, ModelSpec
from .scheduler import Step
from .step_input import Layout, mixed_bucket

# Prompts and decoding sequences of a mixed bucket. A bucket has more than a step needs where these are cheap beside its
# tokens: padded prompts times the longest prompt are programs that return at once.
PROMPT_SIZES, MAX_IDLE_PROGRAMS = (1, 4, 16, 64), 8
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


def prefill_buckets(model: ModelSpec, engine: EngineSpec) -> PrefillBuckets:
    if not engine.graph_prompts:
        return PrefillBuckets()
    most, budget = int(LAUNCH_BOUND_WORK / model.block_params), engine.max_batch_tokens
    token_sizes = [size * 2**double for double in range(budget.bit_length()) for size in (64, 96)]
    return PrefillBuckets(
        tuple(size for size in token_sizes[: 1 + bisect_left(token_sizes, budget)] if size <= most), most
    )


def buffer_size(largest: Layout, max_blocks_per_seq: int, prompts: PrefillBuckets) -> int:
    """Of the largest bucket, in int64 numbers."""
    mixed = (mixed_bucket(largest.seqs, PROMPT_SIZES[-1], size, 1) for size in prompts.token_sizes[-1:])
    return max(bucket._replace(width=max_blocks_per_seq).size for bucket in (largest, *mixed))


def mixed_bucket_for(step: Step, prompts: PrefillBuckets, seqs: int) -> Layout | None:
    """The bucket of a mixed step, with up to `seqs` decoding sequences; None where a graph would not be faster."""
    counts = [chunk.count for chunk in step.chunks if chunk.count > 1]
    singles = len(step.chunks) - len(counts)
    drafting = any(chunk.num_logits > 1 for chunk in step.chunks)
    if drafting or not counts or max(chunk.start + chunk.count for chunk in step.chunks) > MAX_CONTEXT:
        return None
    num_prompts = next_size(PROMPT_SIZES, len(counts))
    prompt_tokens = next_size(prompts.token_sizes, max(sum(counts), 2 * num_prompts))
    if not num_prompts or not prompt_tokens:
        return None
    max_query_len = max(SHORT, power_of_two(max(counts)))
    idle_programs = MAX_IDLE_PROGRAMS * prompt_tokens
    num_prompts = max(num_prompts, *(size for size in PROMPT_SIZES if size * max_query_len <= idle_programs))
    decode_sizes = [*(size for size in DECODE_SIZES if size < seqs), seqs]
    singles = max(singles, *(size for size in decode_sizes if TOKENS_PER_PADDED_DECODE * size <= prompt_tokens))
    bucket = mixed_bucket(next_size(decode_sizes, singles), num_prompts, prompt_tokens, max_query_len)
    return bucket if bucket.tokens <= prompts.max_tokens else None


def next_size(sizes: Iterable[int], number: int) -> int:
    """The first size that is not below `number`, or 0."""
    return next((size for size in sizes if size >= number), 0)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
