"""Distillation: the divergence of a student's next-token distributions from a teacher's.

Off-policy the tokens come from data or the teacher, on-policy from the student (Agarwal et al. 2024): the loss is one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.training.token_divergence import DivergenceKind
from .logprobs import Metrics
from .masked import Denominator, at_least_fp32, masked_mean, masked_sum

EXCLUDED = -1e9  # logit of a token that cannot be: of probability 0, and finite, as −∞ − −∞ is not


def distill_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    kind: DivergenceKind = "forward",
    temperature: float = 1.0,
    jsd_beta: float = 0.5,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """Divergence over the vocabulary, (batch, tokens, vocab), mean over tokens; `denominator`: tokens.

    forward: KL(teacher ‖ student), which covers the teacher; reverse: KL(student ‖ teacher), which seeks its modes;
    jsd: β KL(teacher ‖ M) + (1 − β) KL(student ‖ M), M = β teacher + (1 − β) student (GKD, eq. 1).
    """
    kept = mask.bool().unsqueeze(-1)
    student = log_softmax(student_logits, kept, temperature)
    teacher = log_softmax(teacher_logits.detach(), kept, temperature)
    if kind == "forward":
        divergence = kl_divergence(teacher, student)
    elif kind == "reverse":
        divergence = kl_divergence(student, teacher)
    elif kind == "jsd":
        mixture = torch.logaddexp(teacher + math.log(jsd_beta), student + math.log1p(-jsd_beta))
        divergence = jsd_beta * kl_divergence(teacher, mixture) + (1 - jsd_beta) * kl_divergence(student, mixture)
    else:
        raise ValueError(f"kind of divergence = {kind!r}: forward, reverse or jsd")
    loss = masked_mean(divergence, mask) if denominator is None else masked_sum(divergence, mask) / denominator
    agreement = (student.detach().argmax(-1) == teacher.argmax(-1)).float()
    return loss, {"divergence": masked_mean(divergence.detach(), mask), "top1_agreement": masked_mean(agreement, mask)}


def log_softmax(logits: Tensor, kept: Tensor, temperature: float) -> Tensor:
    finite = torch.where(kept, at_least_fp32(logits), 0.0).clamp(min=EXCLUDED)
    return (finite / temperature).log_softmax(-1)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Σ p (log p − log q) of log-probabilities, over the vocabulary."""
    return (p.exp() * (p - q)).sum(-1)
