"""Truncation by top-k, top-p and min-p: the score threshold of each row.

top-k keeps the k highest scores. top-p, of the probabilities within those: a token is kept while the ones before it sum
to less than top_p. min-p: tokens at least min_p times as likely as the likeliest. Tokens of equal score are kept or
removed together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class TruncationParams(NamedTuple):
    """Parameters of each slot (top_k = 0, top_p = 1, min_p = 0: off), and the slot of each row."""

    temperatures: Tensor  # (slots) float32; 0 is greedy, without truncation
    top_k: Tensor  # (slots) float32
    top_p: Tensor  # (slots) float32
    min_p: Tensor  # (slots) float32
    slots: Tensor  # (rows) int64


def apply_temperature(scores: Tensor, temperatures: Tensor) -> Tensor:
    """Scores over temperature, the best at 0, so that a tiny temperature cannot overflow; greedy rows unscaled."""
    best = scores.amax(dim=1, keepdim=True)
    return (scores - best) / torch.where(temperatures > 0, temperatures, 1.0)


def reference(scores: Tensor, params: TruncationParams) -> Tensor:
    """(rows) float32, for scores (rows, valid): by sorting."""
    temperatures, top_k, top_p, min_p = (table[params.slots].unsqueeze(1) for table in params[:4])
    ordered = scores.float().sort(dim=1, descending=True).values  # (rows, valid)
    last = torch.where(top_k > 0, top_k, scores.shape[1]).clamp(max=scores.shape[1]).long() - 1
    threshold_k = torch.where(top_k > 0, ordered.gather(1, last), -math.inf)
    probabilities = (
        apply_temperature(ordered, temperatures).masked_fill_(ordered < threshold_k, -math.inf).softmax(dim=1)
    )
    mass_before = probabilities.cumsum(dim=1) - probabilities
    num_kept = (mass_before < top_p).sum(dim=1, keepdim=True).clamp(min=1)
    threshold_p = torch.where(top_p < 1, ordered.gather(1, num_kept - 1), -math.inf)
    threshold_min = ordered[:, :1] + torch.log(min_p) * temperatures
    threshold = torch.maximum(torch.maximum(threshold_k, threshold_p), threshold_min)
    return torch.where(temperatures > 0, threshold, -math.inf).squeeze(1)


def score_thresholds(scores: Tensor, params: TruncationParams) -> Tensor:
    """As `reference`; on a GPU without sorting."""
    if scores.device.type != "cuda":
        return reference(scores, params)
    from .top_k_top_p_triton import launch

    return launch(scores, params)
