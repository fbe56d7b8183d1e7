"""Log-probabilities and entropies of tokens, from whole logits: the plain reference of what a trainer computes."""

from __future__ import annotations

import torch
from torch import Tensor

from .masked import Denominator, at_least_fp32, masked_mean, masked_sum

Metrics = dict[str, Tensor]


def logprobs_from_logits(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `tokens`: (..., vocab) and (...) → (...).

    The temperature is the one that sampled the tokens: without it the policy of the loss is not the one that acted.
    """
    scaled = at_least_fp32(logits) / temperature
    return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def sequence_logps(logps: Tensor, mask: Tensor, average: bool = False) -> Tensor:
    """Log-probability of each answer, (batch, tokens) → (batch,); `average`: per token (IPO, ORPO, SimPO)."""
    return masked_mean(logps, mask, dim=-1) if average else masked_sum(logps, mask, dim=-1)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """−Σ p log p of the distribution over the vocabulary, (..., vocab) → (...), in nats."""
    logp = (at_least_fp32(logits) / temperature).log_softmax(-1)
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)


def sft_loss(logps: Tensor, mask: Tensor, denominator: Denominator = None) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood per token of the mask; `denominator`: tokens of the global batch."""
    loss = -(masked_mean(logps, mask) if denominator is None else masked_sum(logps, mask) / denominator)
    return loss, {"nll": -masked_mean(logps, mask).detach()}
