"""Attention over a sequence that is cut over ranks: keys and values go around, queries stay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

if TYPE_CHECKING:
    from communication.links import Link


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(heads, queries, dim) over (heads, keys, dim): the output, and the log of Σ exp(score) of each query."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    lse = scores.logsumexp(dim=-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over keys of two kinds, from attention over each: (output, log Σ exp(score)) of both together.

    out and more (…, queries, dim), lse and more_lse (…, queries). One of the two may be −∞: no keys.
    """
    # exercise merge_attention(out, lse, more, more_lse)
    both = torch.logaddexp(lse, more_lse)
    return out * (lse - both).exp().unsqueeze(-1) + more * (more_lse - both).exp().unsqueeze(-1), both
    # end merge_attention


def ring_attention(q: Tensor, k: Tensor, v: Tensor, link: Link) -> Tensor:
    """Causal attention of this rank's queries over the keys of all ranks.

    q, k and v (heads, chunk, dim) are of the positions rank · chunk … (rank + 1) · chunk − 1.
    """
    # exercise ring_attention(q, k, v, link)
    right, left = (link.rank + 1) % link.ranks, (link.rank - 1) % link.ranks
    out, lse = attend(q, k, v, causal=True)
    block = torch.stack((k, v))
    for turn in range(1, link.ranks):
        block = link.exchange(right, block, left)
        source = (link.rank - turn) % link.ranks
        if source < link.rank:
            out, lse = merge(out, lse, *attend(q, block[0], block[1], causal=False))
    return out
    # end ring_attention
