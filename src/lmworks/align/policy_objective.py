"""Objectives of the methods that learn from their own answers: GRPO, Dr. GRPO, DAPO, GSPO, RLOO and best-of-n."""

from __future__ import annotations

from torch import Tensor

from ..data import Batch
from ..spec import AlignSpec
from ..train.objective import Forward
from .logprobs import sft_loss
from .masked import masked_mean
from .objectives import SUM, AnswerObjective
from .policy_losses import Aggregation, grpo_loss, ppo_policy_loss, rloo_loss
from .rollouts import by_answer

AGGREGATION: dict[str, Aggregation] = {"grpo": "grpo", "gspo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo"}


class PolicyObjective(AnswerObjective):
    """The clipped policy gradient over the answers of a round; for best-of-n, the likelihood of the best ones."""

    def __init__(self, spec: AlignSpec) -> None:
        super().__init__(spec)
        by_token = spec.method in ("dapo", "best_of_n", "ppo")
        self.unit = "token" if by_token else "answer"

    def units(self, batch: Batch) -> int:
        if self.unit == "token":
            return batch.count()
        return len(batch.extras["mask"]) if batch.count() else 0

    def loss(self, forward: Forward, batch: Batch) -> Tensor:
        spec = self.spec
        found = forward(batch, logprobs=True, temperature=spec.temperature, with_entropy=True)
        logps, entropies = by_answer(found.logps, batch), by_answer(found.entropies, batch)
        extras = {name: tensor.to(logps.device) for name, tensor in batch.extras.items()}
        mask = extras["mask"]
        if spec.method == "best_of_n":
            loss, metrics = sft_loss(logps, mask, denominator=SUM)
            metrics["entropy"] = masked_mean(entropies.detach(), mask)
        elif spec.method == "ppo":
            loss, metrics = ppo_policy_loss(
                logps,
                extras["old_logps"],
                extras["advantages"],
                mask,
                spec.clip,
                clip_high=spec.clip_high,
                sampler_logps=extras["sampler_logps"] if spec.importance_cap else None,
                importance_cap=spec.importance_cap or 1.0,
                entropies=entropies,
                denominator=SUM,
            )
        elif spec.method == "rloo":
            loss, metrics = rloo_loss(
                logps,
                extras.get("old_logps"),
                extras["advantages"],
                mask,
                spec.clip,
                clip_high=spec.clip_high,
                entropies=entropies,
                denominator=SUM,
            )
        else:
            loss, metrics = grpo_loss(
                logps,
                extras.get("old_logps"),
                extras["advantages"],
                mask,
                spec.clip,
                clip_high=spec.clip_high,
                ratio="sequence" if spec.method == "gspo" else "token",
                aggregation=AGGREGATION[spec.method],
                max_length=spec.max_tokens,
                ref_logps=extras.get("ref_logps"),
                beta=spec.beta,
                kl=spec.kl,  # type: ignore[arg-type]
                sampler_logps=extras["sampler_logps"] if spec.importance_cap else None,
                importance_cap=spec.importance_cap or 1.0,
                entropies=entropies,
                denominator=SUM,
            )
        if "sampler_logps" in extras and "old_logps" not in extras:  # the policy is still the one that sampled
            fresh = extras.get("fresh", mask)
            for name, value in sampler_mismatch(logps.detach(), extras["sampler_logps"], fresh).items():
                self.sums.add(name, value, fresh.sum())  # means over fresh tokens
        self.add_metrics(metrics, batch.count())
        return loss


def sampler_mismatch(logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the log-probabilities of trainer and sampler are apart."""
    differences = (logps - sampler_logps).abs() * mask
    return {"sampler_diff/mean": masked_mean(differences, mask), "sampler_diff/max": differences.max()}
