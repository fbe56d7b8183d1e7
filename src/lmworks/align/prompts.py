"""The prompts of online methods."""

from __future__ import annotations

import math

from ..data.example_batches import PromptBatches
from ..spec import RunSpec
from ..spec.run import DataSpec


def open_prompts(spec: RunSpec) -> tuple[PromptBatches, PromptBatches]:
    """Prompts of rounds, and held-out ones. Every rank sees all of a round: which of them samples what is decided
    there."""
    align, init = spec.align, spec.checkpoint.init
    prompts = PromptBatches(prompt_data(spec, align.prompts), init=init, seed=spec.seed)
    prompts.steps_per_round = align.updates(spec.data.global_batch)
    prompts.draws_per_round = 1 + align.dynamic_sampling
    prompts.in_flight = in_flight(align.prompts, align.partial_rollouts) - align.prompts
    count = min(align.prompts, spec.log.eval_batches * spec.data.micro_batch or align.prompts)
    held_out = PromptBatches(prompt_data(spec, count), init=init, seed=spec.seed, split="val", shuffle=False)
    return prompts, held_out


def prompt_data(spec: RunSpec, prompts: int) -> DataSpec:
    """So many at once, each short enough for the longest answer to fit beside it."""
    data = spec.data
    for key, value in (("global_batch", prompts), ("micro_batch", 1)):
        data = data.with_derived(key, value)
    return data.with_derived("seq", spec.data.seq - spec.align.max_tokens + 1)


def in_flight(prompts: int, share: float) -> int:
    """Prompts whose answers are sampled at the same time, where a share of further ones goes on in the next round."""
    return prompts + math.ceil(prompts * share)
