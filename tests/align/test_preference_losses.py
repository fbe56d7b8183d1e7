"""Losses of preference optimisation against the papers' formulas in numpy (fp64), and their limits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lmworks.align import dpo_loss, ipo_loss, kto_kl, kto_loss, orpo_loss, reward_loss, sft_loss, simpo_loss

CHOSEN, REJECTED = torch.tensor([-3.0, -12.5, -0.7]), torch.tensor([-5.0, -9.0, -0.9])
REF_CHOSEN, REF_REJECTED = torch.tensor([-4.0, -11.0, -0.8]), torch.tensor([-4.5, -9.5, -2.0])
LABELS = torch.tensor([True, False, True])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def f64(*tensors: Tensor) -> list[np.ndarray]:
    return [one.double().numpy() for one in tensors]


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_dpo(epsilon: float) -> None:
    """Rafailov et al. 2023, eq. 7, and its conservative form with swapped labels."""
    chosen, rejected, ref_chosen, ref_rejected = f64(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)
    h = 0.3 * ((chosen - ref_chosen) - (rejected - ref_rejected))
    expected = -(1 - epsilon) * np.log(sigmoid(h)) - epsilon * np.log(sigmoid(-h))
    loss, metrics = dpo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, 0.3, label_smoothing=epsilon)
    assert loss.item() == pytest.approx(expected.mean())
    assert metrics["rewards/chosen"].item() == pytest.approx(0.3 * (chosen - ref_chosen).mean())
    assert metrics["rewards/rejected"].item() == pytest.approx(0.3 * (rejected - ref_rejected).mean())
    assert metrics["rewards/margins"].item() == pytest.approx(h.mean())
    assert metrics["rewards/accuracies"].item() == pytest.approx(1 / 3)  # h = 1.5, −2.0, −1.0


def test_dpo_of_the_reference_itself() -> None:
    """Loss log 2; the gradient of each pair is −β/2 at the chosen answer and +β/2 at the rejected."""
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    loss, metrics = dpo_loss(chosen, rejected, CHOSEN, REJECTED, 0.3)
    loss.backward()
    assert loss.item() == pytest.approx(np.log(2)) and metrics["rewards/accuracies"] == 0
    assert chosen.grad is not None and rejected.grad is not None
    torch.testing.assert_close(chosen.grad, torch.full((3,), -0.3 / 2 / 3))
    torch.testing.assert_close(rejected.grad, torch.full((3,), 0.3 / 2 / 3))
    assert not any(value.requires_grad for value in metrics.values())


def test_ipo() -> None:
    """Azar et al. 2023, eq. 17."""
    chosen, rejected, ref_chosen, ref_rejected = f64(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    loss, _ = ipo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, 0.3)
    assert loss.item() == pytest.approx(((h - 1 / 0.6) ** 2).mean())
    at_optimum, _ = ipo_loss(REF_CHOSEN + 1 / 0.6, REF_REJECTED, REF_CHOSEN, REF_REJECTED, 0.3)
    assert at_optimum.item() == pytest.approx(0, abs=1e-10)


def test_simpo() -> None:
    """Meng et al. 2024, eq. 6: γ is not multiplied by β."""
    chosen, rejected = f64(CHOSEN, REJECTED)
    loss, _ = simpo_loss(CHOSEN, REJECTED, beta=2.5, gamma=1.4)
    assert loss.item() == pytest.approx(-np.log(sigmoid(2.5 * (chosen - rejected) - 1.4)).mean())


def test_orpo() -> None:
    """Hong et al. 2024, eq. 6 and 7."""
    chosen, rejected = f64(CHOSEN, REJECTED)
    odds = [np.exp(one) / (1 - np.exp(one)) for one in (chosen, rejected)]
    expected = 3.25 - 0.2 * np.log(sigmoid(np.log(odds[0] / odds[1]))).mean()
    loss, metrics = orpo_loss(CHOSEN, REJECTED, torch.tensor(3.25), 0.2)
    assert loss.item() == pytest.approx(expected)
    assert metrics["log_odds_chosen"].item() == pytest.approx(np.log(odds[0] / odds[1]).mean())


def test_kto() -> None:
    """Ethayarajh et al. 2024, eq. 8: λ_y − v, with λ = weight, so that each answer's loss is λ (1 − σ(±…))."""
    policy, ref = f64(CHOSEN, REF_CHOSEN)
    kl, ratios = 0.25, policy - ref
    signs, weights = np.array([1, -1, 1]), np.array([1.0, 1.5, 1.0])
    expected = (weights * (1 - sigmoid(0.3 * signs * (ratios - kl)))).mean()
    loss, metrics = kto_loss(CHOSEN, REF_CHOSEN, LABELS, torch.tensor(kl), 0.3, undesirable_weight=1.5)
    assert loss.item() == pytest.approx(expected)
    assert metrics["rewards/chosen"].item() == pytest.approx(0.3 * ratios[[0, 2]].mean())
    assert metrics["rewards/rejected"].item() == pytest.approx(0.3 * ratios[1])
    doubled, _ = kto_loss(CHOSEN, REF_CHOSEN, LABELS, kl, 0.3, 2.0, 2 * 1.5)
    assert doubled.item() == pytest.approx(2 * expected)


def test_the_reference_point_of_kto() -> None:
    assert kto_kl(CHOSEN + 1, CHOSEN).item() == pytest.approx(1) and kto_kl(CHOSEN - 1, CHOSEN).item() == 0
    shares = [kto_kl(policy, ref, 3) for policy, ref in ((CHOSEN[:1], REF_CHOSEN[:1]), (CHOSEN[1:], REF_CHOSEN[1:]))]
    assert min(shares) < 0  # a share is not clamped
    assert sum(shares).item() == pytest.approx((CHOSEN - REF_CHOSEN).mean().item())
    policy = CHOSEN.clone().requires_grad_()
    assert not kto_kl(policy, REF_CHOSEN).requires_grad


def test_reward_model() -> None:
    """Ouyang et al. 2022, eq. 1; Touvron et al. 2023, eq. 2 (margin); Eisenstein et al. 2023, eq. 2 (centring)."""
    margin = torch.tensor([0.0, 1.0, 0.5])
    chosen, rejected, margins = f64(CHOSEN, REJECTED, margin)
    expected = -np.log(sigmoid(chosen - rejected - margins)) + 0.01 * (chosen + rejected) ** 2
    loss, metrics = reward_loss(CHOSEN, REJECTED, margin, center=0.01)
    assert loss.item() == pytest.approx(expected.mean())
    assert metrics["rewards/accuracies"].item() == pytest.approx(2 / 3)
    assert reward_loss(CHOSEN, CHOSEN)[0].item() == pytest.approx(np.log(2))


def test_supervised() -> None:
    logps, mask = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -9.0, -9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert sft_loss(logps, mask)[0].item() == pytest.approx(7 / 3)
    assert sft_loss(logps, mask, 14)[0].item() == pytest.approx(0.5)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dpo": lambda a, b: dpo_loss(a, b, REF_CHOSEN, REF_REJECTED, 0.3, 0.1)[0],
    "ipo": lambda a, b: ipo_loss(a, b, REF_CHOSEN, REF_REJECTED, 0.3)[0],
    "simpo": lambda a, b: simpo_loss(a, b)[0],
    "orpo": lambda a, b: orpo_loss(a, b, torch.tensor(1.5))[0],
    "kto": lambda a, b: kto_loss(a, b, LABELS, torch.tensor(0.2))[0],
    "reward": lambda a, b: reward_loss(a, b, 0.5, 0.1)[0],
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    inputs = tuple(one.double().requires_grad_() for one in (CHOSEN, REJECTED))
    assert torch.autograd.gradcheck(LOSSES[name], inputs)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("values", [(-1e4, -1e-9), (0.0, 0.0), (-1e-9, -1e4)])
def test_extreme_log_probabilities_give_finite_gradients(name: str, values: tuple[float, float]) -> None:
    inputs = [torch.full((3,), one, requires_grad=True) for one in values]
    loss = LOSSES[name](*inputs)
    loss.backward()
    assert loss.isfinite() and all(one.grad is not None and one.grad.isfinite().all() for one in inputs)


@pytest.mark.parametrize("name", LOSSES)
def test_bf16_inputs_are_computed_in_fp32(name: str) -> None:
    """These numbers are exact in bf16, their differences are not."""
    chosen, rejected = torch.tensor([-300.0, -2.0, -4.0]), torch.tensor([-1.015625, -3.0, -0.5])
    found = LOSSES[name](chosen.bfloat16(), rejected.bfloat16())
    assert found.dtype == torch.float32 and torch.equal(found, LOSSES[name](chosen, rejected))
