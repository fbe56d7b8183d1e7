"""A vocabulary cut over ranks: each looks up, and gives probabilities to, the tokens of its own range.

Logits are the largest tensor of a step, so they are never gathered. With z the logits of one token and r the ranks,

    log Σ exp z = logsumexp over r of (logsumexp of r's own z)        loss = log Σ exp z − z[target]

so two numbers a token travel: a rank's logsumexp, and z[target] from the one rank that has it. The gradient of its
own logits, softmax(z) − onehot(target), then needs nothing more; what it gives the hidden states is a part of the
sum over ranks, which is taken where the hidden states entered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.training.cross_entropy import IGNORE
from ..model.gpt import Embedding
from . import collectives
from .mesh import Mesh


class VocabEmbedding(Embedding):
    """Rows of this rank's range; a token of another range gives zeros, and `leave` adds the ranks up."""

    def __init__(self, part: Embedding, start: int, leave: Callable[[Tensor], Tensor]) -> None:
        super().__init__(part.weight.shape[0], part.embedding_dim, device="meta")
        self.weight, self.start, self.leave = part.weight, start, leave

    def forward(self, tokens: Tensor) -> Tensor:
        row, here = rows_of(tokens, self.start, self.weight.shape[0])
        return self.leave(F.embedding(row, self.weight) * here.unsqueeze(-1))


class VocabLoss:
    """`chunk_loss` of kernels.cross_entropy where the logits are those of this rank's range of the vocabulary."""

    def __init__(self, mesh: Mesh) -> None:
        self.group, self.rank = mesh.group("tp"), mesh.rank("tp")

    def __call__(self, logits: Tensor, target: Tensor, graded: bool, implementation: str) -> Tensor:
        """logits (rows, vocab / tp)"""
        counted = target != IGNORE
        index, here = rows_of(target, self.rank * logits.shape[1], logits.shape[1])
        if implementation == "triton":
            return self.in_place(logits, torch.where(here, index, -1), counted, graded)
        index, here = index.unsqueeze(1), here.unsqueeze(1)
        largest, wanted = logits.amax(dim=1, keepdim=True).float(), logits.gather(1, index).float() * here
        p = logits.float().sub_(largest).exp_()  # in fp32 in the logits' own place
        log_sum = p.sum(dim=1, keepdim=True).log() + largest
        loss, normaliser = self.of_all(torch.cat((log_sum, wanted), dim=1).t(), counted)
        if graded:
            p *= (largest - normaliser.unsqueeze(1)).exp()
            p.scatter_add_(1, index, -here.to(p.dtype))
            torch.mul(p, counted.unsqueeze(1), out=logits)
        return loss

    def in_place(self, logits: Tensor, index: Tensor, counted: Tensor, graded: bool) -> Tensor:
        """The same by kernels; index is −1 where another rank has the target."""
        from ..kernels.training.cross_entropy_triton import gradient_in_place, row_sums

        loss, normaliser = self.of_all(row_sums(logits, index), counted)
        if graded:
            gradient_in_place(logits, index, normaliser.masked_fill(~counted, torch.inf))
        return loss

    def of_all(self, own: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """From (2, rows), a rank's log Σ exp z and z[target]: the loss, and log Σ exp z of all ranks (rows)."""
        everyones = collectives.all_gather(own.unsqueeze(0), 0, self.group)  # (tp, 2, rows)
        normaliser, wanted = everyones[:, 0].logsumexp(dim=0), everyones[:, 1].sum(dim=0)
        return ((normaliser - wanted) * counted).sum(), normaliser


def rows_of(tokens: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """(row of each token among the `count` rows from `start`, whether it is among them); the row is 0 where not."""
    row = tokens - start
    here = (row >= 0) & (row < count)
    return torch.where(here, row, 0), here
