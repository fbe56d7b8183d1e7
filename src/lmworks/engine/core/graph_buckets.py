"""Frames of places that steps are padded to, so that few graphs hold them all.

Decoding steps have a frame for each of a few numbers of sequences. Steps that compute prompts too are of more kinds,
so their frames are coarse; and there are some only up to the number of tokens from which the device takes longer to
compute a step than the host to launch it, and padding costs more than launches do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from ...kernels.inference.paged_attention import SHORT
from ...spec import EngineSpec, ModelSpec
from .scheduler import Step
from .step_input import Layout, mixed_bucket

# A mixed frame has places for so many prompts, and for so many sequences that decode. More than a step needs where they
# are cheap beside its tokens: places times the longest prompt are programs that end at once.
PROMPTS, PROGRAMS = (1, 4, 16, 64), 8
DECODING, PADDING = (0, 8, 32, 128, 512, 2048), 16
# Tokens of a sequence in them: a graph shares keys out as if all of its places were taken, too little for a long one.
CONTEXT = 8192
# Tokens × weights of a layer that an H200 computes in 0.7 ms, while a host launches the kernels of one layer.
LAUNCHED = 2e11


def capture_sizes(most: int) -> list[int]:
    """Numbers of sequences that graphs are made for: finer where a step is short."""
    fine = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    sizes = [size for size in fine if size < most]
    sizes += range(160, most, 32)
    return [*sizes, most]


class PrefillBuckets(NamedTuple):
    """Which steps that compute prompts are recorded."""

    rooms: tuple[int, ...] = ()  # tokens of prompts that their frames have room for
    most: int = 0  # tokens of a frame


def prefill_buckets(model: ModelSpec, engine: EngineSpec) -> PrefillBuckets:
    if not engine.graph_prompts:
        return PrefillBuckets()
    most, budget = int(LAUNCHED / model.block_params), engine.max_batch_tokens
    rooms = [size * 2**double for double in range(budget.bit_length()) for size in (64, 96)]
    return PrefillBuckets(tuple(room for room in rooms[: 1 + bisect_left(rooms, budget)] if room <= most), most)


def buffer_size(largest: Layout, widest: int, prompts: PrefillBuckets) -> int:
    """Of the largest step in a frame, in int64 numbers."""
    mixed = (mixed_bucket(largest.seqs, PROMPTS[-1], room, 1) for room in prompts.rooms[-1:])
    return max(bucket._replace(width=widest).size for bucket in (largest, *mixed))


def mixed_bucket_for(step: Step, prompts: PrefillBuckets, seqs: int) -> Layout | None:
    """That of a step that computes prompts too, where up to `seqs` may decode; None where none would pay."""
    counts = [chunk.count for chunk in step.chunks if chunk.count > 1]
    singles = len(step.chunks) - len(counts)
    drafting = any(chunk.wanted > 1 for chunk in step.chunks)
    if drafting or not counts or max(chunk.start + chunk.count for chunk in step.chunks) > CONTEXT:
        return None
    places = next_size(PROMPTS, len(counts))
    room = next_size(prompts.rooms, max(sum(counts), 2 * places))
    if not places or not room:
        return None
    longest = max(SHORT, power_of_two(max(counts)))
    places = max(places, *(size for size in PROMPTS if size * longest <= PROGRAMS * room))
    decoding = [*(size for size in DECODING if size < seqs), seqs]
    singles = max(singles, *(size for size in decoding if PADDING * size <= room))
    bucket = mixed_bucket(next_size(decoding, singles), places, room, longest)
    return bucket if bucket.tokens <= prompts.most else None


def next_size(sizes: Iterable[int], number: int) -> int:
    """The first of these, or 0."""
    return next((size for size in sizes if size >= number), 0)


def power_of_two(number: int) -> int:
    """The next one that is not below."""
    return 1 << (number - 1).bit_length()
