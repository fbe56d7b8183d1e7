"""Where top-k, top-p and min-p cut a distribution: the least score that each row leaves.

top-k leaves the k best scores. top-p, of the probabilities within those: a token stays while the likelier ones sum to
less than top_p. min-p: tokens at least min_p times as likely as the best. Tokens of equal score stay or go together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Cuts(NamedTuple):
    """What each slot asks for (top_k = 0, top_p = 1, min_p = 0: nothing), and the slot of each row."""

    temperatures: Tensor  # (slots) float32; 0 is greedy, and never cut
    top_k: Tensor  # (slots) float32
    top_p: Tensor  # (slots) float32
    min_p: Tensor  # (slots) float32
    slots: Tensor  # (rows) int64


def cooled(scores: Tensor, temperatures: Tensor) -> Tensor:
    """Scores over temperature, the best at 0, so that a tiny temperature cannot overflow; greedy rows as they are."""
    best = scores.amax(dim=1, keepdim=True)
    return (scores - best) / torch.where(temperatures > 0, temperatures, 1.0)


def reference(scores: Tensor, cuts: Cuts) -> Tensor:
    """(rows) float32, for scores (rows, valid): by sorting them."""
    temperatures, top_k, top_p, min_p = (table[cuts.slots].unsqueeze(1) for table in cuts[:4])
    ordered = scores.float().sort(dim=1, descending=True).values  # (rows, valid)
    last = torch.where(top_k > 0, top_k, scores.shape[1]).clamp(max=scores.shape[1]).long() - 1
    least_k = torch.where(top_k > 0, ordered.gather(1, last), -math.inf)
    probabilities = cooled(ordered, temperatures).masked_fill_(ordered < least_k, -math.inf).softmax(dim=1)
    likelier = probabilities.cumsum(dim=1) - probabilities
    staying = (likelier < top_p).sum(dim=1, keepdim=True).clamp(min=1)
    least_p = torch.where(top_p < 1, ordered.gather(1, staying - 1), -math.inf)
    least_min = ordered[:, :1] + torch.log(min_p) * temperatures
    least = torch.maximum(torch.maximum(least_k, least_p), least_min)
    return torch.where(temperatures > 0, least, -math.inf).squeeze(1)


def least_scores(scores: Tensor, cuts: Cuts) -> Tensor:
    """As `reference`; on a GPU without sorting."""
    if scores.device.type != "cuda":
        return reference(scores, cuts)
    from .top_k_top_p_triton import launch

    return launch(scores, cuts)
