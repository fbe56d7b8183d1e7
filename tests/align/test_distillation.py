"""Distillation against the definitions of the divergences in numpy (fp64)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmworks.align import distill_loss

STUDENT, TEACHER = torch.randn(2, 2, 3, 7, generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def probabilities(logits: Tensor, temperature: float) -> np.ndarray:
    p = np.exp(logits.double().numpy() / temperature)
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergences(kind: Any, temperature: float) -> None:
    """Agarwal et al. 2024, eq. 1 for the generalised Jensen–Shannon divergence."""
    p, q = probabilities(TEACHER, temperature), probabilities(STUDENT, temperature)
    mixture = 0.3 * p + 0.7 * q

    def kl(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return (one * np.log(one / other)).sum(-1)

    expected = {"forward": kl(p, q), "reverse": kl(q, p), "jsd": 0.3 * kl(p, mixture) + 0.7 * kl(q, mixture)}[kind]
    loss, metrics = distill_loss(STUDENT, TEACHER, MASK, kind, temperature, jsd_beta=0.3)
    assert loss.item() == pytest.approx(expected[MASK.numpy() == 1].mean(), rel=1e-5)
    assert metrics["divergence"] == loss
    assert torch.autograd.gradcheck(
        lambda one: distill_loss(one, TEACHER.double(), MASK, kind, temperature, 0.3)[0],
        STUDENT.double().requires_grad_(),
    )


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_equal_models_have_no_divergence_and_no_gradient(kind: Any) -> None:
    student = TEACHER.clone().requires_grad_()
    loss, metrics = distill_loss(student, TEACHER + 3.0, MASK, kind)
    loss.backward()
    assert abs(loss.item()) < 1e-6 and metrics["top1_agreement"] == 1
    assert student.grad is not None and student.grad.abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_tokens_that_cannot_be_and_padding(kind: Any) -> None:
    """A vocabulary padded with −∞ changes nothing, and what is outside the mask is not looked at."""
    padded = [torch.nn.functional.pad(one, (0, 2), value=-torch.inf) for one in (STUDENT, TEACHER)]
    padded[0][~MASK.bool()], padded[1][~MASK.bool()] = torch.nan, torch.inf
    padded[0].requires_grad_()
    loss, _ = distill_loss(padded[0], padded[1], MASK, kind)
    torch.testing.assert_close(loss, distill_loss(STUDENT, TEACHER, MASK, kind)[0])
    loss.backward()
    assert padded[0].grad is not None and padded[0].grad.isfinite().all()


def test_the_teacher_is_not_trained() -> None:
    teacher = TEACHER.clone().requires_grad_()
    distill_loss(STUDENT.clone().requires_grad_(), teacher, MASK, "jsd")[0].backward()
    assert teacher.grad is None
    with pytest.raises(ValueError, match="forward, reverse or jsd"):
        distill_loss(STUDENT, TEACHER, MASK, "kl")  # type: ignore[arg-type]
