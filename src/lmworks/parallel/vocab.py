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

from ..kernels.cross_entropy import IGNORE, accumulate_outer
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
    """`chunk_loss` of kernels.cross_entropy where `weight` holds this rank's range of the vocabulary."""

    def __init__(self, mesh: Mesh) -> None:
        self.group, self.rank = mesh.group("tp"), mesh.rank("tp")

    def __call__(
        self, hidden: Tensor, weight: Tensor, target: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None
    ) -> Tensor:
        counted = (target != IGNORE).unsqueeze(1)  # (rows, 1)
        index, here = (x.unsqueeze(1) for x in rows_of(target, self.rank * weight.shape[0], weight.shape[0]))
        logits = (hidden @ weight.t()).float()  # (rows, vocab / tp)
        own = torch.stack((logits.logsumexp(dim=1, keepdim=True), logits.gather(1, index) * here))
        everyones = collectives.all_gather(own.unsqueeze(0), 0, self.group)  # (tp, 2, rows, 1)
        normaliser, wanted = everyones[:, 0].logsumexp(dim=0), everyones[:, 1].sum(dim=0)
        loss = ((normaliser - wanted) * counted).sum()
        if grad_hidden is None and grad_weight is None:
            return loss
        p = logits.sub_(normaliser).exp_()
        p.scatter_add_(1, index, -here.to(p.dtype))
        grad = p.mul_(counted).to(hidden.dtype)
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden)
        if grad_weight is not None:
            accumulate_outer(grad_weight, grad, hidden)
        return loss


def rows_of(tokens: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """(row of each token among the `count` rows from `start`, whether it is among them); the row is 0 where not."""
    row = tokens - start
    here = (row >= 0) & (row < count)
    return torch.where(here, row, 0), here
