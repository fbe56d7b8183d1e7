"""Learning rate, batch, vocabulary and sequence length where no fitted law gives them: published rules, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LR_SOURCE = "Li et al. 2025 (Step Law, arXiv 2503.04715): lr = 1.79·N^-0.713·D^0.307, N without embeddings"
BATCH_SOURCE = "Li et al. 2025 (Step Law, arXiv 2503.04715): batch = 0.58·D^0.571 tokens"
TESTED = (1e9, 1e11)  # parameters and tokens of that paper's largest runs
UNLIKE = 3.0  # times the learning rate that a rule gives
VOCABULARIES = ((1e21, 128_256), (1e18, 50_304), (0.0, 8_192))  # from so many FLOPs on: Llama 3's, GPT-2's, a small one
SEQUENCES = ((1e21, 4096), (1e19, 2048), (0.0, 1024))


@dataclass(frozen=True)
class Recommended:
    value: float
    source: str


def learning_rate(n_no_embed: float, tokens: float) -> Recommended:
    return Recommended(1.79 * n_no_embed**-0.713 * tokens**0.307, LR_SOURCE)


def batch_tokens(tokens: float) -> Recommended:
    return Recommended(0.58 * tokens**0.571, BATCH_SOURCE)


def beyond_tested(n: float, tokens: float) -> list[str]:
    if n <= 2 * TESTED[0] and tokens <= 2 * TESTED[1]:
        return []
    return [
        f"learning rate and batch by a published rule that was tested up to {TESTED[0]:.0e} parameters and "
        f"{TESTED[1]:.0e} tokens: tune them on smaller runs first"
    ]


def unlike_runs(ranges: Mapping[str, tuple[float, float]]) -> list[str]:
    """Where the runs of a law had quite another learning rate than the rule has in the middle of their n and d."""
    if not {"n", "d", "lr"} <= ranges.keys():
        return []
    n, d, lr = (math.sqrt(ranges[name][0] * ranges[name][1]) for name in ("n", "d", "lr"))
    rule = learning_rate(n, d).value
    if 1 / UNLIKE <= rule / lr <= UNLIKE:
        return []
    return [
        f"the rule of the learning rate is {rule:.2g} for runs like those of the law, which had {lr:.2g}: tune it first"
    ]


def vocabulary(flops: float) -> int:
    return next(size for least, size in VOCABULARIES if flops >= least)


def sequence(flops: float) -> int:
    return next(length for least, length in SEQUENCES if flops >= least)


def sequences_of_batch(tokens: float, seq: int, gpus: int) -> int:
    """A multiple of the GPUs where there are as many, else a power of two: a layout must divide it."""
    wanted = max(1.0, tokens / seq)
    if wanted >= gpus:
        return gpus * max(1, round(wanted / gpus))
    power = 1
    while power * 2**0.5 < wanted:
        power *= 2
    return power
