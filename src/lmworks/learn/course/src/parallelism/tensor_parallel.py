"""One layer on several ranks: each holds a part of its weights. Weights are (out, in), as nn.Linear has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

if TYPE_CHECKING:
    from communication.links import Link


def shard_mlp(up: Tensor, down: Tensor, link: Link) -> tuple[Tensor, Tensor]:
    """This rank's part of up (inner, width) and of down (width, inner)."""
    # exercise tensor_parallel_mlp.shard(up, down, link)
    return up.chunk(link.ranks, dim=0)[link.rank], down.chunk(link.ranks, dim=1)[link.rank]
    # end tensor_parallel_mlp.shard


def parallel_mlp(x: Tensor, up: Tensor, down: Tensor, bias: Tensor, link: Link) -> Tensor:
    """gelu(x · upᵀ) · downᵀ + bias, from this rank's parts of up and down; x, bias and the result are whole."""
    # exercise tensor_parallel_mlp.forward(x, up, down, bias, link)
    return link.all_reduce(F.gelu(x @ up.T) @ down.T) + bias
    # end tensor_parallel_mlp.forward


def vocab_parallel_loss(logits: Tensor, targets: Tensor, link: Link) -> Tensor:
    """The mean cross-entropy of all tokens.

    logits (tokens, vocab / ranks): this rank's columns, which begin at rank · vocab / ranks. targets (tokens) are
    numbers of the whole vocabulary.
    """
    # exercise vocab_parallel_loss(logits, targets, link)
    largest = link.all_reduce(logits.amax(-1), "max")
    total = link.all_reduce((logits - largest.unsqueeze(-1)).exp().sum(-1))
    column = targets - link.rank * logits.shape[-1]
    here = (column >= 0) & (column < logits.shape[-1])
    own = logits.gather(-1, column.where(here, 0).unsqueeze(-1)).squeeze(-1)
    wanted = link.all_reduce(own.where(here, 0.0))
    return (total.log() + largest - wanted).mean()
    # end vocab_parallel_loss
