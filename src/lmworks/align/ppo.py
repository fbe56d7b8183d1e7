"""PPO's advantages: rewards of tokens from the score and the KL penalty, values of the critic, GAE, whitening."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..spec import AlignSpec
from .advantages import gae
from .kl import missing_eos_penalty, token_rewards
from .masked import masked_whiten
from .rollouts import Rollout, padded


def set_token_advantages(rollouts: Sequence[Rollout], align: AlignSpec, kl_coef: float) -> None:
    """Advantages and returns of every token of a round; whitened over the whole round.

    An answer without a reward takes no part: its advantages are 0, its returns the values.
    """
    for rollout in rollouts:
        rollout.advantages, rollout.returns = [0.0] * len(rollout.token_ids), known(rollout, "values")
    rollouts = [rollout for rollout in rollouts if not math.isnan(rollout.reward)]
    if not rollouts:
        return
    width = max(len(rollout.token_ids) for rollout in rollouts)
    mask = padded([rollout.mask for rollout in rollouts], width).bool()
    logps, values = (padded([known(rollout, name) for rollout in rollouts], width) for name in ("old_logps", "values"))
    reference = logps if rollouts[0].ref_logps is None else padded([known(one, "ref_logps") for one in rollouts], width)
    scores = torch.tensor([rollout.reward for rollout in rollouts])
    ended = torch.tensor([rollout.ended for rollout in rollouts])
    scores = missing_eos_penalty(scores, ended, align.missing_eos_penalty)
    rewards = token_rewards(scores, logps, reference, mask, kl_coef)
    if align.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False)
    advantages, returns = gae(rewards, values, mask, align.gamma, align.lam)
    if align.whiten_advantages:
        advantages = masked_whiten(advantages, mask)
    for index, rollout in enumerate(rollouts):
        size = len(rollout.token_ids)
        rollout.advantages, rollout.returns = row(advantages, index, size), row(returns, index, size)


def known(rollout: Rollout, name: str) -> list[float]:
    found: list[float] | None = getattr(rollout, name)
    assert found is not None
    return found


def row(table: Tensor, index: int, size: int) -> list[float]:
    found: list[float] = table[index, :size].tolist()
    return found
