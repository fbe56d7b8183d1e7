"""Sampling by the Gumbel-max trick in one pass over the logits: argmax of score + temperature · Gumbel noise.

That is a sample from softmax(score / temperature) in a form in which a temperature of 0 is greedy and a tiny one cannot
overflow. Scores are the model's logits after penalties, masks and truncation; log-probabilities and the check for
non-finite values are of the logits themselves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import counter_rng


class RowParams(NamedTuple):
    """Sampling parameters: tables by slot, and slot and position of each row."""

    temperatures: Tensor  # (slots) float32
    seeds: Tensor  # (slots) int64
    slots: Tensor  # (rows) int64
    output_positions: Tensor  # (rows) int64


class SampleResult(NamedTuple):
    tokens: Tensor  # (rows) int64; 0 in bad rows
    bad: Tensor  # (rows) bool: a logit is not finite, or no token is allowed
    logprobs: Tensor | None  # (rows) float32: log softmax(logits) of the token


def reference(
    logits: Tensor,  # (rows, vocab)
    scores: Tensor,  # (rows, valid): only the first `valid` tokens are sampled
    rows: RowParams | None,  # None: greedy
    logprobs: bool,
    threshold: Tensor | None = None,  # (rows) float32: no token of a lower score is sampled
    mask: Tensor | None = None,  # (rows, ⌈valid/32⌉) int32: bit i of word w is 1 if token 32·w + i is allowed
) -> SampleResult:
    scores = scores.float()
    if threshold is not None:
        scores = scores.masked_fill(scores < threshold.unsqueeze(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~unpack_mask(mask, scores.shape[1]), -math.inf)
    if rows is not None:
        ids = torch.arange(scores.shape[1], device=scores.device)
        drawn = counter_rng.gumbel(
            counter_rng.bits(rows.seeds[rows.slots], rows.output_positions, ids)
        )  # (rows, valid)
        scores = drawn.mul_(rows.temperatures[rows.slots].unsqueeze(1)).add_(scores)
    tokens = scores.argmax(dim=1)  # the first of equal scores
    best = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    bad = ~torch.isfinite(logits).all(dim=1) | (best == -math.inf)
    tokens = tokens.masked_fill(bad, 0)
    if not logprobs:
        return SampleResult(tokens, bad, None)
    wide = logits.float()
    chosen = wide.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return SampleResult(tokens, bad, chosen - wide.logsumexp(dim=1))


def unpack_mask(mask: Tensor, valid: int) -> Tensor:
    """(rows, words) int32 to (rows, valid) bool."""
    shifts = torch.arange(32, device=mask.device, dtype=torch.int32)
    return ((mask.unsqueeze(2) >> shifts) & 1).bool().flatten(1)[:, :valid]


def sample(
    logits: Tensor,
    scores: Tensor,
    rows: RowParams | None,
    logprobs: bool,
    threshold: Tensor | None = None,
    mask: Tensor | None = None,
) -> SampleResult:
    """As `reference`; on a GPU every logit is read once."""
    if logits.device.type != "cuda":
        return reference(logits, scores, rows, logprobs, threshold, mask)
    from .gumbel_sample_triton import launch

    return launch(logits, scores, rows, logprobs, threshold, mask)
