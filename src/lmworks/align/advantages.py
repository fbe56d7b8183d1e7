"""Advantages: GAE from a critic, or comparisons within a group of answers to one prompt.

Groups are consecutive: rewards (prompts × group_size,) hold the answers to the first prompt, then to the second;
(prompts, group_size) is the same. Results have the shape of the rewards, but for the indices of `best_of_n`.
A reward of NaN (a reward function that returned None) takes no part in its group, and its advantage is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masked import at_least_fp32, zero_outside


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (advantages, returns), (batch, tokens).

    Aₜ = δₜ + γλ Aₜ₊₁ with δₜ = rₜ + γ Vₜ₊₁ − Vₜ; V after the last token is 0; returns = A + V. Positions outside the
    mask are passed over: the token before the output of a tool continues with the one after it. They get zeros.
    """
    kept = mask.bool()
    rewards, values = zero_outside(rewards, kept), zero_outside(values, kept)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(kept[:, t], advantage, next_advantage)
        next_value = torch.where(kept[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    return zero_outside(advantages, kept), zero_outside(advantages + values, kept)


def group_advantages(rewards: Tensor, group_size: int, normalize_by_std: bool = True, eps: float = 1e-4) -> Tensor:
    """Reward − mean of its group, divided by the group's unbiased standard deviation + eps (GRPO).

    `normalize_by_std=False`: without the division, which favours prompts that are nearly always or never solved
    (Dr. GRPO, Liu et al. 2025).
    """
    groups = from_lowest(in_groups(rewards, group_size))
    centered = groups - groups.nanmean(-1, keepdim=True)
    if normalize_by_std:
        count = groups.isfinite().sum(-1, keepdim=True)
        variance = centered.square().nansum(-1, keepdim=True) / (count - 1).clamp(min=1)
        centered = centered / (variance.sqrt() + eps)
    return centered.nan_to_num(nan=0.0).view_as(rewards)


def rloo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Reward − mean of the others in its group, leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, eq. 8)."""
    groups = from_lowest(in_groups(rewards, group_size))
    others = groups.isfinite().sum(-1, keepdim=True) - 1
    baseline = (groups.nansum(-1, keepdim=True) - groups) / others.clamp(min=1)
    return torch.where(others > 0, groups - baseline, 0.0).nan_to_num(nan=0.0).view_as(rewards)


def dynamic_sampling_mask(rewards: Tensor, group_size: int) -> Tensor:
    """True for answers of groups whose rewards differ: the others have no gradient (DAPO, Yu et al. 2025, eq. 11)."""
    groups = in_groups(rewards, group_size)
    high, low = groups.nan_to_num(nan=-torch.inf).amax(-1), groups.nan_to_num(nan=torch.inf).amin(-1)
    return (high > low).repeat_interleave(group_size).view_as(rewards)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """DAPO's soft punishment (eq. 13): 0 up to max_length − buffer, from there linear to −penalty at max_length."""
    over = lengths.float() - (max_length - buffer)
    return -penalty * (over / buffer).clamp(0, 1) if buffer else -penalty * (over > 0).float()


def best_of_n(rewards: Tensor, n: int) -> Tensor:
    """Index into `rewards` of the best answer of each group of n, the first among equals: (prompts,).

    A group without any reward has none: −1.
    """
    groups = in_groups(rewards, n)
    start = torch.arange(0, rewards.numel(), n, device=rewards.device)
    best = start + groups.nan_to_num(nan=-torch.inf).argmax(-1)
    return torch.where(groups.isnan().all(-1), -1, best)


def in_groups(rewards: Tensor, group_size: int) -> Tensor:
    if rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards are no whole number of groups of {group_size}")
    return at_least_fp32(rewards.detach()).view(-1, group_size)


def from_lowest(groups: Tensor) -> Tensor:
    """Each reward less the lowest of its group: equal rewards are zeros, which no rounding of a mean sets apart."""
    return groups - groups.nan_to_num(nan=torch.inf).amin(-1, keepdim=True)
