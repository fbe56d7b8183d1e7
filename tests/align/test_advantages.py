"""Advantages against loops in numpy (fp64), and the cases in which they must vanish."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmworks.align import (
    best_of_n,
    dynamic_sampling_mask,
    gae,
    group_advantages,
    overlong_penalty,
    rloo_advantages,
)

RNG = np.random.default_rng(0)
REWARDS, VALUES = RNG.normal(size=(3, 5)), RNG.normal(size=(3, 5))
LENGTHS = [5, 3, 1]
MASK = torch.tensor([[1] * n + [0] * (5 - n) for n in LENGTHS])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_gae(gamma: float, lam: float) -> None:
    """Schulman et al. 2016, eq. 16, as a sum: Aₜ = Σₗ (γλ)ˡ δₜ₊ₗ."""
    advantages, returns = gae(torch.tensor(REWARDS), torch.tensor(VALUES), MASK, gamma, lam)
    for row, n in enumerate(LENGTHS):
        values = np.append(VALUES[row, :n], 0.0)
        deltas = REWARDS[row, :n] + gamma * values[1:] - values[:-1]
        expected = [sum((gamma * lam) ** i * delta for i, delta in enumerate(deltas[t:])) for t in range(n)]
        np.testing.assert_allclose(advantages[row, :n].numpy(), expected)
        np.testing.assert_allclose(returns[row, :n].numpy(), expected + VALUES[row, :n])
        assert not advantages[row, n:].any() and not returns[row, n:].any()


def test_gae_defaults_and_padding() -> None:
    rewards, values = torch.tensor(REWARDS).float(), torch.tensor(VALUES).float()
    expected = gae(rewards, values, MASK, gamma=1.0, lam=0.95)
    rewards[~MASK.bool()], values[~MASK.bool()] = torch.nan, torch.inf
    for found, one in zip(gae(rewards, values, MASK), expected, strict=True):
        assert torch.equal(found, one)


def test_gae_passes_over_the_output_of_tools() -> None:
    mask = torch.tensor([[1, 0, 0, 1, 1]])
    rewards, values = torch.tensor(REWARDS[:1]), torch.tensor(VALUES[:1])
    kept = mask[0].bool()
    found = gae(rewards, values, mask, 0.9, 0.8)
    expected = gae(rewards[:, kept], values[:, kept], torch.ones(1, 3), 0.9, 0.8)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[:, kept], other)
        assert not one[:, ~kept].any()


def test_groups() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 4.0, 5.0, 9.0])
    groups = rewards.reshape(2, 3)
    centered = groups - groups.mean(1, keepdims=True)
    found = group_advantages(torch.tensor(rewards), 3)
    np.testing.assert_allclose(found.numpy(), (centered / (groups.std(1, ddof=1, keepdims=True) + 1e-4)).ravel())
    np.testing.assert_allclose(group_advantages(torch.tensor(rewards), 3, False).numpy(), centered.ravel())
    with pytest.raises(ValueError, match=r"6 rewards .* groups of 4"):
        group_advantages(torch.tensor(rewards), 4)


@pytest.mark.parametrize("reward", [0.1, 1e6 + 0.1, -3.3])
def test_equal_rewards_give_no_advantage(reward: float) -> None:
    """Not even by rounding: 0.1 + 0.1 + 0.1 is not 0.3."""
    equal = torch.full((6,), reward)
    assert not group_advantages(equal, 3).any() and not rloo_advantages(equal, 3).any()
    assert not dynamic_sampling_mask(equal, 3).any()


def test_whole_numbers_and_single_answers() -> None:
    assert group_advantages(torch.tensor([1, 0]), 2, False).tolist() == [0.5, -0.5]
    assert group_advantages(torch.tensor([1.0, 2.0]), 1).tolist() == [0.0, 0.0]
    assert rloo_advantages(torch.tensor([1.0, 2.0]), 1).tolist() == [0.0, 0.0]


def test_leave_one_out() -> None:
    rewards = [1.0, 0.0, 5.0, 2.0]
    expected = [one - np.mean([other for j, other in enumerate(rewards) if j != i]) for i, one in enumerate(rewards)]
    np.testing.assert_allclose(rloo_advantages(torch.tensor(rewards), 4).numpy(), expected)


def test_answers_without_a_reward_take_no_part() -> None:
    rewards = torch.tensor([1.0, torch.nan, 3.0, torch.nan, torch.nan, torch.nan])
    for estimator in (group_advantages, rloo_advantages):
        found = estimator(rewards, 3)
        torch.testing.assert_close(found[[0, 2]], estimator(torch.tensor([1.0, 3.0]), 2))
        assert not found[[1, 3, 4, 5]].any()
    assert dynamic_sampling_mask(rewards, 3).tolist() == [True] * 3 + [False] * 3
    assert best_of_n(rewards, 3).tolist() == [2, -1]


def test_groups_that_differ_are_sampled() -> None:
    rewards = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    assert dynamic_sampling_mask(rewards, 2).tolist() == [True, True, False, False, False, False]


def test_rewards_may_come_as_a_table() -> None:
    flat = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 4.0])
    for estimator in (group_advantages, rloo_advantages, dynamic_sampling_mask):
        assert torch.equal(estimator(flat.view(2, 3), 3), estimator(flat, 3).view(2, 3))
    assert best_of_n(flat.view(2, 3), 3).tolist() == [1, 5]


def test_overlong_answers() -> None:
    """Yu et al. 2025, eq. 13, with L_max = 100 and L_cache = 20."""
    lengths = torch.tensor([1, 80, 81, 90, 100, 101, 500])
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20), -torch.tensor([0, 0, 0.05, 0.5, 1, 1, 1]))
    assert overlong_penalty(lengths, 100, 20, penalty=2.0)[3].item() == pytest.approx(-1.0)
    assert overlong_penalty(lengths, 100, 0).tolist() == [0, 0, 0, 0, 0, -1, -1]


def test_best_of_n() -> None:
    assert best_of_n(torch.tensor([1.0, 3.0, 3.0, -1.0, -2.0, -torch.inf]), 3).tolist() == [1, 3]
