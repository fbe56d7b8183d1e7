"""Picking the next token of every row in one pass over the logits: argmax of score + temperature · Gumbel noise.

That is a draw from softmax(score / temperature), written so that a temperature of 0 is greedy and a tiny one cannot
overflow. The scores are the model's logits, or what penalties, masks and cuts have made of them; log-probabilities
and the check for bad numbers are always those of the logits themselves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import counter_rng


class RowParams(NamedTuple):
    """How each row is sampled: tables by slot, and each row's slot and place."""

    temperatures: Tensor  # (slots) float32
    seeds: Tensor  # (slots) int64
    slots: Tensor  # (rows) int64
    output_positions: Tensor  # (rows) int64


class Draw(NamedTuple):
    tokens: Tensor  # (rows) int64; 0 where the row is bad
    bad: Tensor  # (rows) bool: a logit is not finite, or no token is allowed
    logprobs: Tensor | None  # (rows) float32: log softmax(logits) of the token


def reference(
    logits: Tensor,  # (rows, vocab)
    scores: Tensor,  # (rows, valid): only the first `valid` tokens are picked
    rows: RowParams | None,  # None: greedy
    logprobs: bool,
    threshold: Tensor | None = None,  # (rows) float32: no token of a lower score is picked
    mask: Tensor | None = None,  # (rows, ⌈valid/32⌉) int32: bit i of word w is 1 where token 32·w + i may be picked
) -> Draw:
    scores = scores.float()
    if threshold is not None:
        scores = scores.masked_fill(scores < threshold.unsqueeze(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~unpacked(mask, scores.shape[1]), -math.inf)
    if rows is not None:
        ids = torch.arange(scores.shape[1], device=scores.device)
        drawn = counter_rng.gumbel(
            counter_rng.bits(rows.seeds[rows.slots], rows.output_positions, ids)
        )  # (rows, valid)
        scores = drawn.mul_(rows.temperatures[rows.slots].unsqueeze(1)).add_(scores)
    tokens = scores.argmax(dim=1)  # of equal scores the first
    best = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    bad = ~torch.isfinite(logits).all(dim=1) | (best == -math.inf)
    tokens = tokens.masked_fill(bad, 0)
    if not logprobs:
        return Draw(tokens, bad, None)
    wide = logits.float()
    chosen = wide.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Draw(tokens, bad, chosen - wide.logsumexp(dim=1))


def unpacked(mask: Tensor, valid: int) -> Tensor:
    """(rows, words) int32 to (rows, valid) bool."""
    shifts = torch.arange(32, device=mask.device, dtype=torch.int32)
    return ((mask.unsqueeze(2) >> shifts) & 1).bool().flatten(1)[:, :valid]


def draw(
    logits: Tensor,
    scores: Tensor,
    rows: RowParams | None,
    logprobs: bool,
    threshold: Tensor | None = None,
    mask: Tensor | None = None,
) -> Draw:
    """As `reference`; on a GPU one kernel that reads every number once."""
    if logits.device.type != "cuda":
        return reference(logits, scores, rows, logprobs, threshold, mask)
    from .gumbel_sample_triton import launch

    return launch(logits, scores, rows, logprobs, threshold, mask)
