"""Clipped policy-gradient losses over sampled answers: PPO, GRPO and its variants, RLOO.

Tensors are (batch, tokens), log-probabilities of the sampled tokens under the temperature that sampled them; `mask` is
1 at tokens of the answer that the policy chose (0: prompt, padding, output of tools). `old_logps` are those of the
policy that the batch is compared with, before the first update on it; None: the policy itself, so that all ratios
are 1. Advantages are (batch,) or (batch, tokens).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .kl import KLKind, clamp_log_ratio, kl_penalty
from .logprobs import Metrics
from .masked import Denominator, at_least_fp32, batch_mean, masked_mean, masked_sum, masked_var, zero_outside

Aggregation = Literal["grpo", "dapo", "dr_grpo"]


def grpo_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    *,
    clip_high: float | None = None,
    ratio: Literal["token", "sequence"] = "token",
    aggregation: Aggregation = "grpo",
    max_length: int | None = None,
    ref_logps: Tensor | None = None,
    beta: float = 0.0,
    kl: KLKind = "k3",
    kl_bias_correction: bool = False,
    sampler_logps: Tensor | None = None,
    importance_cap: float = 2.0,
    entropies: Tensor | None = None,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """−min(r A, clip(r, 1 − clip, 1 + clip_high) A) + β KL(policy ‖ reference) per token (Shao et al. 2024, eq. 3).

    ratio: r of every token, or one of the answer, the geometric mean of its tokens' (GSPO, Zheng et al. 2025, eq. 7).
    clip_high: upper bound of its own, None: as `clip` (DAPO's clip-higher: 0.28 beside 0.2, Yu et al. 2025, eq. 10).
    aggregation, and what `denominator` counts in the global batch:
      grpo      mean over the tokens of each answer, then over answers; answers
      dapo      mean over all tokens, long answers weigh more; tokens
      dr_grpo   sum over tokens / `max_length`, a constant, then mean over answers (Liu et al. 2025); answers
    sampler_logps: of the engine that sampled; each token's loss is weighed by `importance_weights` with that cap.
    kl_bias_correction: the KL of each token times r, which makes the gradient of k3 that of the KL (DeepSeek-V3.2).
    entropies: of the policy at each token (`entropy`), for the metrics only.
    """
    mask = mask.bool()
    logps = zero_outside(logps, mask)
    old = logps.detach() if old_logps is None else zero_outside(old_logps, mask).detach()
    log_ratio = clamp_log_ratio(logps - old if ratio == "token" else sequence_log_ratio(logps, old, mask))
    losses, metrics = clipped_surrogate(log_ratio.expand_as(logps), advantages, mask, clip, clip_high)
    metrics["approx_kl"] = masked_mean(0.5 * (logps - old).detach() ** 2, mask)
    if sampler_logps is not None:
        weights = importance_weights(old, sampler_logps, mask, importance_cap)
        losses = losses * weights
        metrics["importance_weight/mean"] = masked_mean(weights, mask)
        metrics["importance_weight/capped"] = masked_mean((weights >= importance_cap).float(), mask)
    if ref_logps is not None:
        kl_tokens = kl_penalty(logps, zero_outside(ref_logps, mask).detach(), kl)
        kl_tokens = kl_tokens * log_ratio.exp() if kl_bias_correction else kl_tokens
        losses = losses + beta * kl_tokens
        metrics["kl"] = masked_mean(kl_tokens.detach(), mask)
    if entropies is not None:
        metrics["entropy"] = masked_mean(entropies.detach(), mask)
    return aggregate(losses, mask, aggregation, max_length, denominator), metrics


def ppo_policy_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    *,
    clip_high: float | None = None,
    sampler_logps: Tensor | None = None,
    importance_cap: float = 2.0,
    entropies: Tensor | None = None,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """−min(r A, clip(r) A), mean over tokens (Schulman et al. 2017, eq. 7); `denominator`: tokens of the global batch.

    PPO's KL penalty is in the rewards (`token_rewards`).
    """
    return grpo_loss(
        logps,
        old_logps,
        advantages,
        mask,
        clip,
        clip_high=clip_high,
        aggregation="dapo",
        sampler_logps=sampler_logps,
        importance_cap=importance_cap,
        entropies=entropies,
        denominator=denominator,
    )


def rloo_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    *,
    clip_high: float | None = None,
    entropies: Tensor | None = None,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """−min(r A, clip(r) A) with the ratio of whole answers, π(y) / π_old(y) (Ahmadian et al. 2024).

    With ratios of 1 this is REINFORCE over answers. `denominator`: answers of the global batch. The KL penalty is in
    the rewards: reward − β Σ over tokens of (old − reference).
    """
    mask = mask.bool()
    logps = zero_outside(logps, mask)
    old = logps.detach() if old_logps is None else zero_outside(old_logps, mask).detach()
    log_ratio = clamp_log_ratio((logps - old).sum(-1))
    losses, metrics = clipped_surrogate(log_ratio, advantages, torch.ones_like(log_ratio).bool(), clip, clip_high)
    metrics["approx_kl"] = masked_mean(0.5 * (logps - old).detach() ** 2, mask)
    if entropies is not None:
        metrics["entropy"] = masked_mean(entropies.detach(), mask)
    return batch_mean(losses, denominator), metrics


def ppo_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None = 0.2,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """½ max((V − R)², (clip(V, V_old ± clip) − R)²), mean over tokens; clip = None: ½ (V − R)².

    As OpenAI's baselines and lm-human-preferences clip it (Huang et al. 2024). `denominator`: tokens.
    """
    mask = mask.bool()
    values, old_values, returns = (zero_outside(one, mask) for one in (values, old_values.detach(), returns.detach()))
    errors = (values - returns) ** 2
    clipped = torch.zeros_like(errors)
    if clip is not None:
        clipped_errors = (values.clamp(old_values - clip, old_values + clip) - returns) ** 2
        clipped = (clipped_errors > errors).float()
        errors = torch.max(errors, clipped_errors)
    loss = 0.5 * (masked_mean(errors, mask) if denominator is None else masked_sum(errors, mask) / denominator)
    return loss, {
        "value/mean": masked_mean(values.detach(), mask),
        "value/clip_ratio": masked_mean(clipped, mask),
        "value/explained_variance": explained_variance(values.detach(), returns, mask),
    }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 − Var(returns − values) / Var(returns): 1 for a perfect critic, 0 for a constant; 0 for constant returns."""
    total, left = masked_var(returns, mask), masked_var(returns - values, mask)
    return torch.where(total > 0, 1 - left / torch.where(total > 0, total, 1.0), 0.0)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip: float, clip_high: float | None
) -> tuple[Tensor, Metrics]:
    """Losses of the shape of `log_ratio`; low and high clips are those that stop a gradient."""
    high = clip if clip_high is None else clip_high
    advantages = at_least_fp32(advantages).detach()
    if advantages.dim() < log_ratio.dim():
        advantages = advantages.unsqueeze(-1)
    ratio = log_ratio.exp()
    losses = -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + high) * advantages)
    seen = ratio.detach()
    low_clips = ((seen < 1 - clip) & (advantages < 0)).float()
    high_clips = ((seen > 1 + high) & (advantages > 0)).float()
    return losses, {
        "clip_ratio/low_mean": masked_mean(low_clips, mask),
        "clip_ratio/high_mean": masked_mean(high_clips, mask),
        "ratio/mean": masked_mean(seen, mask),
        "ratio/max": zero_outside(seen, mask).max(),
    }


def sequence_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """GSPO: mean over the answer's tokens of logps − old_logps, (batch, 1)."""
    return masked_mean(at_least_fp32(logps) - at_least_fp32(old_logps), mask, dim=-1).unsqueeze(-1)


def importance_weights(logps: Tensor, sampler_logps: Tensor, mask: Tensor, cap: float = 2.0) -> Tensor:
    """min(π_trainer / π_sampler, cap) of each token, detached: corrects for a sampler with other numerics or weights.

    1 where the sampler's log-probability is unknown (NaN) and outside the mask (truncated importance sampling, Yao et
    al. 2025).
    """
    difference = zero_outside(logps, mask).detach() - zero_outside(sampler_logps, mask).detach()
    return clamp_log_ratio(difference.nan_to_num(nan=0.0)).exp().clamp(max=cap)


def aggregate(
    losses: Tensor, mask: Tensor, aggregation: Aggregation, max_length: int | None, denominator: Denominator
) -> Tensor:
    if aggregation == "dapo":
        return masked_mean(losses, mask) if denominator is None else masked_sum(losses, mask) / denominator
    if aggregation == "grpo":
        return batch_mean(masked_mean(losses, mask, dim=-1), denominator)
    if aggregation != "dr_grpo":
        raise ValueError(f"aggregation = {aggregation!r}: grpo, dapo or dr_grpo")
    if max_length is None:
        raise ValueError("aggregation = 'dr_grpo' needs max_length, the constant that it divides by")
    return batch_mean(masked_sum(losses, mask, dim=-1) / max_length, denominator)
