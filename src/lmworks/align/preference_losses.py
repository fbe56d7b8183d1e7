"""Losses over pairs of answers, chosen and rejected, or over single answers with a label.

All take one number per answer, (batch,): its log-probability under the policy and a frozen reference, or its reward.
Log-probabilities are sums over the answer's tokens for DPO and KTO, and means over them for IPO, ORPO and SimPO
(`sequence_logps`). `denominator` counts pairs, for KTO answers, of the global batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .logprobs import Metrics
from .masked import Denominator, at_least_fp32, batch_mean, masked_mean

CLOSEST_TO_ONE = -1e-7  # log of the largest probability whose odds ORPO takes: those of 1 are infinite


def dpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """−log σ(β h), h = log-ratio of the chosen − log-ratio of the rejected answer (Rafailov et al. 2023, eq. 7).

    `label_smoothing` ε: the share of pairs assumed to be swapped, −(1 − ε) log σ(βh) − ε log σ(−βh) (cDPO).
    """
    chosen = at_least_fp32(policy_chosen_logps) - at_least_fp32(ref_chosen_logps)
    rejected = at_least_fp32(policy_rejected_logps) - at_least_fp32(ref_rejected_logps)
    losses = smoothed_log_sigmoid(beta * (chosen - rejected), label_smoothing)
    return batch_mean(losses, denominator), reward_metrics(beta * chosen, beta * rejected)


def ipo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float = 0.1,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """(h − 1/(2β))² with DPO's h; β is the paper's τ (Azar et al. 2023, eq. 17)."""
    chosen = at_least_fp32(policy_chosen_logps) - at_least_fp32(ref_chosen_logps)
    rejected = at_least_fp32(policy_rejected_logps) - at_least_fp32(ref_rejected_logps)
    losses = (chosen - rejected - 1 / (2 * beta)) ** 2
    return batch_mean(losses, denominator), reward_metrics(beta * chosen, beta * rejected)


def simpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """−log σ(β (chosen − rejected) − γ) of log-probabilities per token, without a reference (Meng et al. 2024)."""
    chosen, rejected = at_least_fp32(policy_chosen_logps), at_least_fp32(policy_rejected_logps)
    losses = smoothed_log_sigmoid(beta * (chosen - rejected) - gamma, label_smoothing)
    return batch_mean(losses, denominator), reward_metrics(beta * chosen, beta * rejected)


def orpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    chosen_nll: Tensor,
    beta: float = 0.1,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """NLL of the chosen answers − β log σ(log odds(chosen) / odds(rejected)), odds = p / (1 − p) (Hong et al. 2024).

    `chosen_nll` is the scalar of `sft_loss` on the chosen answers, over its own count of tokens. β is the paper's λ.
    """
    chosen, rejected = at_least_fp32(policy_chosen_logps), at_least_fp32(policy_rejected_logps)
    log_odds = chosen - rejected - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected))
    odds_ratio = batch_mean(-F.logsigmoid(log_odds), denominator)
    metrics = reward_metrics(beta * chosen, beta * rejected)
    metrics |= {"log_odds_chosen": log_odds.detach().mean(), "nll": chosen_nll.detach()}
    return chosen_nll + beta * odds_ratio, metrics


def kto_loss(
    policy_logps: Tensor,
    ref_logps: Tensor,
    labels: Tensor,
    kl: Tensor | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """w (1 − σ(±β (log-ratio − kl))), + for desirable answers, − for undesirable (Ethayarajh et al. 2024, eq. 8).

    `labels`: True where the answer is desirable. `kl`: of the global batch, from `kto_kl`.
    """
    log_ratios = at_least_fp32(policy_logps) - at_least_fp32(ref_logps)
    desirable, kl = labels.bool(), torch.as_tensor(kl, device=log_ratios.device).detach()
    gains = beta * torch.where(desirable, log_ratios - kl, kl - log_ratios)
    losses = torch.where(desirable, desirable_weight, undesirable_weight) * torch.sigmoid(-gains)
    rewards = beta * log_ratios.detach()
    chosen, rejected = masked_mean(rewards, desirable), masked_mean(rewards, ~desirable)
    metrics = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    metrics |= {"kl": kl, "desirable": desirable.float().mean()}
    return batch_mean(losses, denominator), metrics


def kto_kl(policy_logps: Tensor, ref_logps: Tensor, denominator: Denominator = None) -> Tensor:
    """KTO's reference point: the mean log-ratio of answers put to the prompts of others, at least 0, detached.

    With `denominator` a share of that mean, which may be negative: sum over micro-batches and ranks, then clamp.
    """
    share = batch_mean(at_least_fp32(policy_logps).detach() - at_least_fp32(ref_logps).detach(), denominator)
    return share.clamp(min=0) if denominator is None else share


def reward_loss(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    margin: Tensor | float = 0.0,
    center: float = 0.0,
    denominator: Denominator = None,
) -> tuple[Tensor, Metrics]:
    """−log σ(chosen − rejected − margin), Bradley–Terry (Ouyang et al. 2022; margin: Touvron et al. 2023, eq. 2).

    `center` weighs (chosen + rejected)², which keeps rewards around 0 (Eisenstein et al. 2023, eq. 2).
    """
    chosen, rejected = at_least_fp32(chosen_rewards), at_least_fp32(rejected_rewards)
    losses = -F.logsigmoid(chosen - rejected - margin) + center * (chosen + rejected) ** 2
    return batch_mean(losses, denominator), reward_metrics(chosen, rejected)


def reward_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    """Means of the rewards, implicit or modelled, their margin, and how often the chosen answer has the larger one."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).float().mean(),
    }


def smoothed_log_sigmoid(logits: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 − eˣ) for x ≤ 0: by expm1 near 0 and log1p elsewhere, each where it is exact."""
    x = x.clamp(max=CLOSEST_TO_ONE)
    near = x > -0.6931
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
