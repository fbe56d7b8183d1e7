"""Which answers of a round are written to samples.jsonl, and what of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..record.samples import Sample
from .rollouts import Rollout

ANSWERS = 4  # of a round: the best, the worst, and some at random


def samples_of(rollouts: Sequence[Rollout], seed: int, number: int, decode: Callable[[list[int]], str]) -> list[Sample]:
    """Of round `number`, best first: reward hacking shows in the best."""
    rewards = np.nan_to_num([rollout.reward for rollout in rollouts], nan=-np.inf)
    drawn = np.random.default_rng([seed, number]).permutation(len(rollouts)).tolist()
    chosen = list(dict.fromkeys([int(rewards.argmax()), int(rewards.argmin()), *drawn]))[:ANSWERS]
    return [sample_of(rollouts[index], decode) for index in sorted(chosen, key=lambda one: -rewards[one])]


def sample_of(rollout: Rollout, decode: Callable[[list[int]], str]) -> Sample:
    return {
        "prompt": decode(rollout.prompt_ids),
        "answer": rollout.text if not rollout.messages else decode(rollout.token_ids),
        "reward": None if np.isnan(rollout.reward) else rollout.reward,
        "rewards": dict(rollout.rewards),
        "tokens": len(rollout.token_ids),
        "ended": rollout.ended,
    }
