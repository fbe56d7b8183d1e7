"""KL penalties: estimators over sampled tokens, rewards per token, and the controller of their coefficient."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .masked import at_least_fp32, zero_outside

KLKind = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = 20.0  # e²⁰ = 5e8: beyond it a ratio is constant, so that its square is finite in fp32


def clamp_log_ratio(x: Tensor) -> Tensor:
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_penalty(logps: Tensor, ref_logps: Tensor, kind: KLKind = "k1") -> Tensor:
    """KL(policy ‖ reference) of each sampled token, with d = logps − ref_logps (Schulman, "Approximating KL", 2020).

    k1: d, unbiased; k2: d² / 2, biased, low variance; k3: e⁻ᵈ − 1 + d, unbiased, never negative.
    """
    d = at_least_fp32(logps) - at_least_fp32(ref_logps)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d**2
    if kind == "k3":
        d = d.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-d) + d
    raise ValueError(f"kind of KL = {kind!r}: k1, k2 or k3")


def token_rewards(
    scores: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, kl_coef: float, kind: KLKind = "k1"
) -> Tensor:
    """PPO's rewards, (batch, tokens): −kl_coef · KL at every token, and the score (batch,) at the answer's last one."""
    mask = mask.bool()
    kl = kl_penalty(zero_outside(logps, mask), zero_outside(ref_logps, mask), kind)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return (zero_outside(-kl_coef * kl, mask) + last * at_least_fp32(scores).unsqueeze(-1)).detach()


def missing_eos_penalty(scores: Tensor, ended: Tensor, penalty: float = 1.0, replace: bool = False) -> Tensor:
    """Scores of answers without end-of-text are lowered by `penalty`, or become −penalty (`replace`).

    TRL lowers them (no penalty by default); lm-human-preferences replaces them by −1.
    """
    scores = at_least_fp32(scores)
    return torch.where(ended.bool(), scores, torch.full_like(scores, -penalty) if replace else scores - penalty)


class AdaptiveKL:
    """A coefficient that steers the KL of a sequence towards `target` (Ziegler et al. 2019, section 2.2).

    After `horizon` episodes with a KL off by 20 % or more the coefficient has changed by a fifth.
    """

    def __init__(self, init: float = 0.15, target: float = 6.0, horizon: int = 10_000) -> None:
        self.coef, self.target, self.horizon = init, target, horizon

    def update(self, kl: float, episodes: int) -> float:
        """With the mean KL of `episodes` answers, summed over their tokens; returns the new coefficient."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * episodes / self.horizon
        return self.coef

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = float(state["coef"])
