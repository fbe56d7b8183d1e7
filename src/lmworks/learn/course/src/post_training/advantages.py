"""How much better an action was than expected, and the loss that follows from it."""

from __future__ import annotations

import torch
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


def gae(rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: (advantages, returns), from rewards and values (batch, tokens).

    After the last token there is nothing: its next value and next advantage are 0.
    """
    # exercise gae(rewards, values, gamma, lam)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, step]
        advantages[:, step] = next_advantage
    return advantages, advantages + values
    # end gae


def grpo_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """rewards (prompts, answers) → how each answer stands among those to the same prompt, in standard deviations.

    The standard deviation is the unbiased one, and eps is added to it.
    """
    # exercise grpo_advantages(rewards, eps)
    centered = rewards - rewards.mean(dim=-1, keepdim=True)
    return centered / (rewards.std(dim=-1, keepdim=True) + eps)
    # end grpo_advantages


def ppo_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2) -> Tensor:
    """The clipped surrogate, the mean over the tokens of the mask. All (batch, tokens); mask: the answer's tokens."""
    # exercise ppo_loss(logps, old_logps, advantages, mask, clip)
    ratio = (logps - old_logps.detach()).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -gain.where(mask.bool(), 0.0).sum() / mask.sum()
    # end ppo_loss
