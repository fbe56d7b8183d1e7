"""From conversations and pairs of answers to a loss."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

IGNORE = -100  # a label that counts for nothing


class Turn(NamedTuple):
    """Of a conversation, in tokens."""

    role: str  # system, user, assistant
    header: list[int]  # says whose turn it is; the chat template writes it
    content: list[int]
    end: list[int]  # of the turn


def sft_labels(turns: list[Turn]) -> tuple[list[int], list[int]]:
    """(tokens, labels) of a conversation, of the same length. The loss shifts them, so here a label is its own token.

    What the model has to write itself is trained on: the assistant's content and that its turn ends there.
    """
    # exercise sft_labels(turns)
    tokens: list[int] = []
    labels: list[int] = []
    for turn in turns:
        written = turn.content + turn.end
        tokens += turn.header + written
        labels += [IGNORE] * len(turn.header)
        labels += written if turn.role == "assistant" else [IGNORE] * len(written)
    return tokens, labels
    # end sft_labels


def sequence_logps(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each answer (batch): the sum over its labels.

    logits (batch, seq, vocab), labels (batch, seq): the logits at position t are of the token at t + 1.
    """
    # exercise sequence_logps(logits, labels)
    following = labels[:, 1:]
    counted = following != IGNORE
    logps = logits[:, :-1].log_softmax(dim=-1)
    chosen = logps.gather(-1, following.where(counted, 0).unsqueeze(-1)).squeeze(-1)
    return chosen.where(counted, 0.0).sum(dim=-1)
    # end sequence_logps


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1) -> Tensor:
    """The mean over pairs, from the log-probabilities (pairs) of both answers, of the policy and of the reference."""
    # exercise dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -F.logsigmoid(beta * margin).mean()
    # end dpo_loss
