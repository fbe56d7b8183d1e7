"""KL estimators, PPO's rewards per token, and the adaptive coefficient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmworks.align import AdaptiveKL, entropy, kl_penalty, logprobs_from_logits, missing_eos_penalty, token_rewards

LOGPS, REF = torch.tensor([[-1.0, -2.5, -0.2]]), torch.tensor([[-1.5, -2.0, -0.2]])


def test_estimators() -> None:
    """Schulman 2020: with r = π_ref / π, k1 = −log r, k2 = (log r)² / 2, k3 = r − 1 − log r."""
    log_r = (REF - LOGPS).double().numpy()
    for kind, expected in {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r}.items():
        np.testing.assert_allclose(kl_penalty(LOGPS, REF, kind).numpy(), expected, rtol=1e-6, atol=1e-9)
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_penalty(LOGPS, REF, "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(kind: str) -> None:
    """Over all tokens of the vocabulary, weighed by their probability, the sum is KL(policy ‖ reference)."""
    policy, ref = torch.randn(2, 1, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    expected = torch.nn.functional.kl_div(ref, policy, log_target=True, reduction="sum")
    torch.testing.assert_close((policy.exp() * kl_penalty(policy, ref, kind)).sum(), expected)  # type: ignore[arg-type]


def test_extreme_ratios_stay_finite() -> None:
    for kind in ("k1", "k2", "k3"):
        logps = torch.tensor([-1e4, 0.0], requires_grad=True)
        kl = kl_penalty(logps, torch.tensor([0.0, -1e4]), kind)  # type: ignore[arg-type]
        kl.sum().backward()
        assert kl.isfinite().all() and logps.grad is not None and logps.grad.isfinite().all()


def test_the_score_is_added_at_the_last_token() -> None:
    logps = torch.tensor([[-1.0, -2.0, -3.0, -9.0], [-1.0, -9.0, -9.0, -9.0], [-9.0] * 4])
    ref = torch.tensor([[-1.5, -1.0, -3.0, torch.nan], [-3.0, 0.0, 0.0, 0.0], [0.0] * 4])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    found = token_rewards(torch.tensor([10.0, 20.0, 30.0]), logps, ref, mask, kl_coef=0.1)
    expected = [[-0.05, 0.1, 10.0, 0.0], [19.8, 0.0, 0.0, 0.0], [0.0] * 4]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_the_last_token_follows_the_output_of_a_tool() -> None:
    mask = torch.tensor([[1, 0, 1, 0]])
    zeros = torch.zeros(1, 4)
    assert token_rewards(torch.tensor([5.0]), zeros, zeros, mask, 0.1).tolist() == [[0, 0, 5, 0]]


def test_answers_without_end_of_text() -> None:
    scores, ended = torch.tensor([0.5, 2.0]), torch.tensor([True, False])
    assert missing_eos_penalty(scores, ended).tolist() == [0.5, 1.0]
    assert missing_eos_penalty(scores, ended, replace=True).tolist() == [0.5, -1.0]
    assert missing_eos_penalty(scores, ended, 3.0).tolist() == [0.5, -1.0]


def test_adaptive_coefficient() -> None:
    """Ziegler et al. 2019: e = clip(KL / target − 1, ±0.2), β ← β (1 + e · episodes / horizon)."""
    controller = AdaptiveKL()
    assert (controller.coef, controller.target, controller.horizon) == (0.15, 6.0, 10_000)
    assert controller.update(6.6, 512) == pytest.approx(0.15 * (1 + 0.1 * 512 / 10_000))
    before = controller.coef
    assert controller.update(60.0, 512) == pytest.approx(before * (1 + 0.2 * 512 / 10_000))
    assert AdaptiveKL().update(0.0, 512) == pytest.approx(0.15 * (1 - 0.2 * 512 / 10_000))
    assert AdaptiveKL().update(6.0, 512) == 0.15


def test_adaptive_coefficient_resumes() -> None:
    one, other = AdaptiveKL(), AdaptiveKL()
    one.update(9.0, 64)
    other.load_state_dict(one.state_dict())
    assert one.update(5.5, 64) == other.update(5.5, 64) != 0.15


def test_log_probabilities_with_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]])
    scaled = logits.double().numpy() / 0.7
    expected = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    found = logprobs_from_logits(logits, torch.tensor([2, 0]), temperature=0.7)
    np.testing.assert_allclose(found.numpy(), [expected[0, 2], expected[1, 0]], rtol=1e-6)
    assert logprobs_from_logits(logits * 1e4, torch.tensor([0, 1])).isfinite().all()


def test_entropy_per_token() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0], [5.0, 5.0, 5.0]])
    p = np.exp(logits.double().numpy() / 2)
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(entropy(logits, temperature=2.0).numpy(), -(p * np.log(p)).sum(-1), rtol=1e-6)
    assert entropy(logits)[1].item() == pytest.approx(np.log(3))


def test_entropy_with_tokens_that_cannot_be() -> None:
    logits = torch.tensor([[0.0, 0.5, -torch.inf]], requires_grad=True)
    found = entropy(logits)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), entropy(torch.tensor([[0.0, 0.5]])))
    assert logits.grad is not None and logits.grad.isfinite().all()
