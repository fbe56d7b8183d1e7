"""Post-training beside LMWorks' losses and advantages."""

from __future__ import annotations

from types import ModuleType

from .rows import Beside, Row, numbers


def sequence_logps(module: ModuleType) -> list[Row]:
    import torch

    from ...align.logprobs import logprobs_from_logits, sequence_logps

    logits, labels = numbers(2, 8, 16), torch.arange(16).view(2, 8)
    labels[0, :4] = -100
    following = labels[:, 1:]
    ours = sequence_logps(logprobs_from_logits(logits[:, :-1], following.clamp(min=0)), following != -100)
    yours = module.sequence_logps(logits, labels)
    return [Row(f"log-probability of answer {index}", float(yours[index]), float(ours[index])) for index in range(2)]


def dpo_loss(module: ModuleType) -> list[Row]:
    from ...align.preference_losses import dpo_loss

    inputs = numbers(8), numbers(8, seed=1), numbers(8, seed=2), numbers(8, seed=3)
    return [
        Row(f"loss of 8 pairs, β = {beta}", float(module.dpo_loss(*inputs, beta)), float(dpo_loss(*inputs, beta)[0]))
        for beta in (0.1, 0.5)
    ]


def gae(module: ModuleType) -> list[Row]:
    import torch

    from ...align.advantages import gae

    rewards, values = numbers(4, 16), numbers(4, 16, seed=1)
    pairs = zip(module.gae(rewards, values, 0.99, 0.9), gae(rewards, values, torch.ones(4, 16), 0.99, 0.9), strict=True)
    return [
        Row(f"mean of {name}", *(float(one.mean()) for one in pair))
        for name, pair in zip(("advantages", "returns"), pairs, strict=True)
    ]


def grpo_advantages(module: ModuleType) -> list[Row]:
    from ...align.advantages import group_advantages

    rewards = numbers(4, 8)
    best = (float(one.max()) for one in (module.grpo_advantages(rewards), group_advantages(rewards, 8)))
    return [Row("largest of 4 prompts × 8 answers", *best)]


def ppo_loss(module: ModuleType) -> list[Row]:
    from ...align.policy_losses import ppo_policy_loss

    logps, old, advantages = (numbers(4, 16, seed=seed) for seed in range(3))
    mask = numbers(4, 16, seed=3) > 0
    ours, _ = ppo_policy_loss(logps, old, advantages, mask)
    return [Row("loss of 4 answers", float(module.ppo_loss(logps, old, advantages, mask.float())), float(ours))]


BESIDE: dict[str, Beside] = {
    "sequence_logps": sequence_logps,
    "dpo_loss": dpo_loss,
    "gae": gae,
    "grpo_advantages": grpo_advantages,
    "ppo_loss": ppo_loss,
}
