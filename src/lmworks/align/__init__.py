"""Post-training: losses and estimators as plain functions of tensors.

A loss returns (scalar, metrics): the metrics are detached means of the batch at hand. Its scalar is the mean over the
batch, or, where `denominator` is given, the sum divided by that count of the global batch, so that micro-batches and
ranks of any size add up to the loss and gradients of the whole (docs/post-training.md).
Names are loaded when they are used, as torch is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages import best_of_n as best_of_n
    from .advantages import dynamic_sampling_mask as dynamic_sampling_mask
    from .advantages import gae as gae
    from .advantages import group_advantages as group_advantages
    from .advantages import overlong_penalty as overlong_penalty
    from .advantages import rloo_advantages as rloo_advantages
    from .distillation import distill_loss as distill_loss
    from .environments import Environment as Environment
    from .environments import Step as Step
    from .environments import Turn as Turn
    from .kl import AdaptiveKL as AdaptiveKL
    from .kl import kl_penalty as kl_penalty
    from .kl import missing_eos_penalty as missing_eos_penalty
    from .kl import token_rewards as token_rewards
    from .logprobs import entropy as entropy
    from .logprobs import logprobs_from_logits as logprobs_from_logits
    from .logprobs import sequence_logps as sequence_logps
    from .logprobs import sft_loss as sft_loss
    from .masked import masked_mean as masked_mean
    from .masked import masked_var as masked_var
    from .masked import masked_whiten as masked_whiten
    from .policy_losses import grpo_loss as grpo_loss
    from .policy_losses import importance_weights as importance_weights
    from .policy_losses import ppo_policy_loss as ppo_policy_loss
    from .policy_losses import ppo_value_loss as ppo_value_loss
    from .policy_losses import rloo_loss as rloo_loss
    from .policy_losses import sequence_log_ratio as sequence_log_ratio
    from .preference_losses import dpo_loss as dpo_loss
    from .preference_losses import ipo_loss as ipo_loss
    from .preference_losses import kto_kl as kto_kl
    from .preference_losses import kto_loss as kto_loss
    from .preference_losses import orpo_loss as orpo_loss
    from .preference_losses import reward_loss as reward_loss
    from .preference_losses import simpo_loss as simpo_loss
    from .rewards import load_rewards as load_rewards

EXPORTS = {
    "AdaptiveKL": "kl",
    "Environment": "environments",
    "Step": "environments",
    "Turn": "environments",
    "best_of_n": "advantages",
    "distill_loss": "distillation",
    "dpo_loss": "preference_losses",
    "dynamic_sampling_mask": "advantages",
    "entropy": "logprobs",
    "gae": "advantages",
    "group_advantages": "advantages",
    "grpo_loss": "policy_losses",
    "importance_weights": "policy_losses",
    "ipo_loss": "preference_losses",
    "kl_penalty": "kl",
    "kto_kl": "preference_losses",
    "kto_loss": "preference_losses",
    "load_rewards": "rewards",
    "logprobs_from_logits": "logprobs",
    "masked_mean": "masked",
    "masked_var": "masked",
    "masked_whiten": "masked",
    "missing_eos_penalty": "kl",
    "orpo_loss": "preference_losses",
    "overlong_penalty": "advantages",
    "ppo_policy_loss": "policy_losses",
    "ppo_value_loss": "policy_losses",
    "reward_loss": "preference_losses",
    "rloo_advantages": "advantages",
    "rloo_loss": "policy_losses",
    "sequence_log_ratio": "policy_losses",
    "sequence_logps": "logprobs",
    "sft_loss": "logprobs",
    "simpo_loss": "preference_losses",
    "token_rewards": "kl",
}


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module 'lmworks.align' has no attribute '{name}'")
    return getattr(importlib.import_module(f".{EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(EXPORTS)
