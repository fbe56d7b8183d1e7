"""Policy losses against plain loops in numpy (fp64) beside the papers' formulas, and their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmworks.align import grpo_loss, importance_weights, ppo_policy_loss, ppo_value_loss, rloo_loss

GENERATOR = torch.Generator().manual_seed(1)
LENGTHS = [6, 4, 1, 3]
MASK = torch.tensor([[1] * n + [0] * (6 - n) for n in LENGTHS])
LOGPS = -3 * torch.rand(4, 6, generator=GENERATOR)
OLD = LOGPS + 0.4 * torch.randn(4, 6, generator=GENERATOR)
REF, SAMPLER = (OLD + 0.3 * torch.randn(4, 6, generator=GENERATOR) for _ in range(2))
ADVANTAGES = torch.tensor([1.5, -0.5, 2.0, -1.0])


def plain(
    low: float, high: float, sequence: bool, aggregation: str, beta: float = 0.0, cap: float | None = None
) -> float:
    """One token after the other, in fp64."""
    logps, old, ref, sampler = (one.double().numpy() for one in (LOGPS, OLD, REF, SAMPLER))
    answers: list[list[float]] = []
    for i, n in enumerate(LENGTHS):
        answers.append([])
        for t in range(n):
            log_ratio = (logps[i, :n] - old[i, :n]).mean() if sequence else logps[i, t] - old[i, t]
            ratio, a = np.exp(log_ratio), float(ADVANTAGES[i])
            loss = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
            loss *= 1.0 if cap is None else min(np.exp(old[i, t] - sampler[i, t]), cap)
            log_r = ref[i, t] - logps[i, t]
            answers[-1].append(loss + beta * (np.exp(log_r) - 1 - log_r))
    if aggregation == "grpo":
        return float(np.mean([np.mean(one) for one in answers]))
    if aggregation == "dapo":
        return float(np.mean([loss for one in answers for loss in one]))
    return float(np.mean([np.sum(one) / 9 for one in answers]))


@pytest.mark.parametrize("aggregation", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_grpo_and_its_variants(aggregation: Any, ratio: Any) -> None:
    loss, _ = grpo_loss(
        LOGPS, OLD, ADVANTAGES, MASK, 0.1, clip_high=0.25, ratio=ratio, aggregation=aggregation, max_length=9
    )
    assert loss.item() == pytest.approx(plain(0.1, 0.25, ratio == "sequence", aggregation), rel=1e-5)


def test_kl_and_importance_weights() -> None:
    """The weights of the sampler's mismatch are for the policy's term, not for the KL."""
    loss, metrics = grpo_loss(
        LOGPS, OLD, ADVANTAGES, MASK, 0.2, ref_logps=REF, beta=0.3, sampler_logps=SAMPLER, importance_cap=1.2
    )
    assert loss.item() == pytest.approx(plain(0.2, 0.2, False, "grpo", 0.3, 1.2), rel=1e-5)
    capped = ((OLD - SAMPLER).exp() > 1.2) & MASK.bool()
    assert 0 < capped.sum() < MASK.sum()
    assert metrics["importance_weight/capped"].item() == pytest.approx((capped.sum() / MASK.sum()).item())
    assert metrics["kl"] > 0


def test_the_corrected_kl_has_the_gradient_of_the_divergence() -> None:
    """Over all tokens that one position may have, weighed by their probability: ∇ KL(policy ‖ reference) over logits.

    k3 by itself has the gradient of another quantity: Σ p (1 − p_ref / p) ∇ log p is that of KL(reference ‖ policy).
    """
    logits, ref_logits = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    gradients = {}
    for corrected in (True, False, None):
        parameter = logits.clone().requires_grad_()
        policy, ref = parameter.log_softmax(-1), ref_logits.log_softmax(-1)
        if corrected is None:
            loss = (policy.exp() * (policy - ref)).sum()
        else:
            # One answer of one token for each of the vocabulary; the advantages are 0, so that only the KL is left.
            losses = [
                grpo_loss(
                    one[None, None],
                    None,
                    torch.zeros(1),
                    torch.ones(1, 1),
                    ref_logps=other[None, None],
                    beta=1.0,
                    kl_bias_correction=corrected,
                )[0]
                for one, other in zip(policy, ref, strict=True)
            ]
            loss = (policy.detach().exp() * torch.stack(losses)).sum()
        (gradients[corrected],) = torch.autograd.grad(loss, parameter)
    torch.testing.assert_close(gradients[True], gradients[None])
    assert (gradients[False] - gradients[None]).norm() > 0.1 * gradients[None].norm()


def test_ppo_is_a_mean_over_tokens() -> None:
    loss, _ = ppo_policy_loss(LOGPS, OLD, ADVANTAGES, MASK, 0.2)
    assert loss.item() == pytest.approx(plain(0.2, 0.2, False, "dapo"), rel=1e-5)
    per_token, _ = ppo_policy_loss(LOGPS, OLD, ADVANTAGES[:, None].expand(4, 6), MASK, 0.2)
    assert torch.equal(loss, per_token)


@pytest.mark.parametrize("old", [None, LOGPS])
def test_ratio_one_gives_the_policy_gradient(old: Tensor | None) -> None:
    """∇ = −A ∇ log π, over the tokens; nothing is clipped and no KL is seen."""
    logps = LOGPS.clone().requires_grad_()
    loss, metrics = ppo_policy_loss(logps, old, ADVANTAGES, MASK)
    loss.backward()
    expected = -ADVANTAGES[:, None] * MASK / MASK.sum()
    assert logps.grad is not None
    torch.testing.assert_close(logps.grad, expected)
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1
    assert metrics["approx_kl"] == metrics["clip_ratio/low_mean"] == metrics["clip_ratio/high_mean"] == 0


def test_sequence_ratios_share_the_gradient_of_an_answer() -> None:
    """GSPO's gradient is one weight for all tokens of an answer (Zheng et al. 2025, eq. 10)."""
    logps = LOGPS.clone().requires_grad_()
    grpo_loss(logps, LOGPS, ADVANTAGES, MASK, ratio="sequence")[0].backward()
    lengths = torch.tensor(LENGTHS)[:, None]
    assert logps.grad is not None
    torch.testing.assert_close(logps.grad, -ADVANTAGES[:, None] * MASK / lengths / 4)


def test_what_is_clipped_has_no_gradient_and_is_counted() -> None:
    """Ratios e^±1 around a clip of 0.2: with A > 0 only the high one is clipped, with A < 0 only the low one."""
    logps = torch.tensor([[1.0, -1.0], [1.0, -1.0]], requires_grad=True)
    advantages, mask = torch.tensor([1.0, -1.0]), torch.ones(2, 2)
    loss, metrics = grpo_loss(logps, torch.zeros(2, 2), advantages, mask)
    loss.backward()
    assert logps.grad is not None and (logps.grad != 0).tolist() == [[False, True], [True, False]]
    assert metrics["clip_ratio/low_mean"] == metrics["clip_ratio/high_mean"] == 0.25
    assert metrics["ratio/max"].item() == pytest.approx(np.e) and metrics["approx_kl"].item() == pytest.approx(0.5)
    higher, seen = grpo_loss(logps, torch.zeros(2, 2), advantages, mask, clip_high=2.0)
    assert seen["clip_ratio/high_mean"] == 0 and higher < loss


def test_dr_grpo_has_no_length_bias() -> None:
    """Tokens of a long and a short answer with one advantage get one gradient; GRPO's is divided by the length."""
    mask, logps = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]]), torch.full((2, 4), -1.0, requires_grad=True)
    advantages = torch.ones(2)
    grpo_loss(logps, None, advantages, mask, aggregation="dr_grpo", max_length=8)[0].backward()
    assert logps.grad is not None
    assert torch.equal(logps.grad, -mask / 8 / 2)
    logps.grad = None
    grpo_loss(logps, None, advantages, mask)[0].backward()
    assert logps.grad is not None and logps.grad[0, 0].item() == pytest.approx(logps.grad[1, 0].item() / 4)
    with pytest.raises(ValueError, match="max_length"):
        grpo_loss(logps, None, advantages, mask, aggregation="dr_grpo")
    with pytest.raises(ValueError, match="grpo, dapo or dr_grpo"):
        grpo_loss(logps, None, advantages, mask, aggregation="mean")  # type: ignore[arg-type]


def test_rloo() -> None:
    """Ratio of whole answers, the product over their tokens."""
    ratios = np.exp(((LOGPS - OLD).double().numpy() * MASK.numpy()).sum(1))
    a = ADVANTAGES.double().numpy()
    expected = -np.minimum(ratios * a, np.clip(ratios, 0.8, 1.2) * a).mean()
    loss, metrics = rloo_loss(LOGPS, OLD, ADVANTAGES, MASK, entropies=-LOGPS)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    kept = MASK.bool()
    assert metrics["approx_kl"].item() == pytest.approx(0.5 * ((LOGPS - OLD)[kept] ** 2).mean().item())
    assert metrics["entropy"].item() == pytest.approx(-LOGPS[kept].mean().item())
    assert metrics["ratio/max"].item() == pytest.approx(ratios.max(), rel=1e-5)
    logps = LOGPS.clone().requires_grad_()
    rloo_loss(logps, None, ADVANTAGES, MASK)[0].backward()
    assert logps.grad is not None
    torch.testing.assert_close(logps.grad, -ADVANTAGES[:, None] * MASK / 4)


def test_value_loss() -> None:
    """½ E max((V − R)², (V_clip − R)²): clipping only ever makes the loss larger."""
    values, old, returns = (one.double().numpy() for one in (LOGPS, OLD, REF))
    clipped = np.clip(values, old - 0.2, old + 0.2)
    errors = np.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    kept = MASK.numpy() == 1
    loss, metrics = ppo_value_loss(LOGPS, OLD, REF, MASK, clip=0.2)
    assert loss.item() == pytest.approx(0.5 * errors[kept].mean(), rel=1e-5)
    larger = (clipped - returns) ** 2 > (values - returns) ** 2
    assert 0 < metrics["value/clip_ratio"].item() == pytest.approx(larger[kept].mean())
    explained = 1 - (returns - values)[kept].var(ddof=1) / returns[kept].var(ddof=1)
    assert metrics["value/explained_variance"].item() == pytest.approx(explained, rel=1e-4)
    unclipped, _ = ppo_value_loss(LOGPS, OLD, REF, MASK, clip=None)
    assert unclipped.item() == pytest.approx(0.5 * ((values - returns) ** 2)[kept].mean(), rel=1e-5)
    assert unclipped < loss


def test_critics_that_explain_all_or_nothing() -> None:
    assert ppo_value_loss(REF, REF, REF, MASK)[1]["value/explained_variance"] == 1
    constant = torch.full_like(REF, 0.5)
    assert ppo_value_loss(constant, constant, REF, MASK)[1]["value/explained_variance"].abs() < 1e-6
    assert ppo_value_loss(REF, REF, constant, MASK)[1]["value/explained_variance"] == 0


def test_importance_weights() -> None:
    logps, sampler = torch.tensor([[-1.0, -1.0, -1.0, -1.0]]), torch.tensor([[-1.5, -0.5, -9.0, torch.nan]])
    found = importance_weights(logps, sampler, torch.ones(1, 4), cap=2.0)
    torch.testing.assert_close(found, torch.tensor([[np.exp(0.5), np.exp(-0.5), 2.0, 1.0]]).float())


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_gradients_are_those_of_finite_differences(ratio: Any, kl: Any) -> None:
    old, ref, sampler = (one.double() for one in (OLD, REF, SAMPLER))

    def loss(logps: Tensor) -> Tensor:
        options = {"ref_logps": ref, "beta": 0.1, "kl": kl, "sampler_logps": sampler, "ratio": ratio}
        return grpo_loss(logps, old, ADVANTAGES, MASK, **options)[0]

    assert torch.autograd.gradcheck(loss, LOGPS.double().requires_grad_())
    values = LOGPS.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda one: ppo_value_loss(one, old, ref, MASK)[0], values)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_extreme_ratios_and_garbage_in_the_padding_stay_finite(sign: float, ratio: Any) -> None:
    logps = torch.where(MASK.bool(), sign * 1e4 * torch.ones(4, 6), torch.nan).requires_grad_()
    others = torch.where(MASK.bool(), torch.zeros(4, 6), -torch.inf)
    options = {"ref_logps": others, "beta": 0.1, "sampler_logps": others, "entropies": others, "ratio": ratio}
    loss, metrics = grpo_loss(logps, others, ADVANTAGES, MASK, **options)
    loss.backward()
    assert loss.isfinite() and logps.grad is not None and logps.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())
    value_loss, _ = ppo_value_loss(logps, others, others, MASK)
    assert value_loss.isfinite()


def test_bf16_inputs_are_computed_in_fp32() -> None:
    inputs = [one.bfloat16() for one in (LOGPS, OLD, REF)]
    low = grpo_loss(inputs[0], inputs[1], ADVANTAGES, MASK, ref_logps=inputs[2], beta=0.1)[0]
    high = grpo_loss(*(one.float() for one in inputs[:2]), ADVANTAGES, MASK, ref_logps=inputs[2].float(), beta=0.1)[0]
    assert low.dtype == torch.float32 and torch.equal(low, high)
