"""Objectives of the methods that learn from given answers: DPO, IPO, KTO, ORPO, SimPO and the reward model.

A micro-batch of pairs has 2·n rows: the chosen answers, then the rejected ones. One of KTO has n rows with a label, and
n more that put the answer of another example to each prompt: its estimate of the KL divergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data import Batch
from ..data.loader import IGNORED
from ..spec import AlignSpec
from ..train.objective import Forward, MetricSums, Objective
from .logprobs import sequence_logps, sft_loss
from .preference_losses import dpo_loss, ipo_loss, kto_kl, kto_loss, orpo_loss, reward_loss, simpo_loss

CALIBRATION_BINS = 5
SUM = 1.0  # as the denominator of a loss: the trainer divides by the units of the global batch


class AnswerObjective(Objective):
    """A loss over whole answers, with metrics. `reference`: forward pass of the frozen model, where there is one."""

    supports_async = False  # metrics are read after every step

    def __init__(self, spec: AlignSpec) -> None:
        self.spec, self.sums = spec, MetricSums()
        self.reference: Forward | None = None  # set once the models are built

    def reset_metrics(self) -> None:
        self.sums = MetricSums()

    def metrics(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        return self.sums.means(group)

    def add_metrics(self, metrics: dict[str, Tensor], weight: float) -> None:
        """Means of a micro-batch of `weight` units."""
        for name, value in metrics.items():
            self.sums.add(name, value, torch.full_like(value, weight, dtype=torch.float64))

    def answer_logps(self, forward: Forward, batch: Batch, average: bool = False) -> Tensor:
        """Log-probability of each row's answer."""
        return sequence_logps(forward(batch, logprobs=True).logps, batch.targets != IGNORED, average)

    def reference_logps(self, batch: Batch, average: bool = False) -> Tensor:
        assert self.reference is not None, f"align.method = {self.spec.method!r} needs a reference model"
        with torch.no_grad():
            return self.answer_logps(self.reference, batch, average)


class PairObjective(AnswerObjective):
    """A loss over pairs of answers."""

    unit = "pair"

    def units(self, batch: Batch) -> int:
        return half_the_rows(batch)

    def loss(self, forward: Forward, batch: Batch) -> Tensor:
        pairs = self.units(batch)
        loss, metrics = self.pair_loss(forward, batch)
        self.add_metrics(metrics, pairs)
        return loss if pairs else loss * 0.0  # a batch that only takes part in collectives

    def pair_loss(self, forward: Forward, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError


class ReferencePairs(PairObjective):
    """DPO and IPO."""

    def pair_loss(self, forward: Forward, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        spec, average = self.spec, self.spec.method == "ipo"
        ref_chosen, ref_rejected = self.reference_logps(batch, average).chunk(2)
        logps = forward(batch, logprobs=True).logps
        mask = batch.targets != IGNORED
        chosen, rejected = sequence_logps(logps, mask, average).chunk(2)
        if spec.method == "ipo":
            return ipo_loss(chosen, rejected, ref_chosen, ref_rejected, spec.beta, denominator=SUM)
        loss, metrics = dpo_loss(
            chosen, rejected, ref_chosen, ref_rejected, spec.beta, spec.label_smoothing, denominator=SUM
        )
        if spec.sft_weight:
            nll = -sequence_logps(logps, mask, average=True).chunk(2)[0]
            loss = loss + spec.sft_weight * nll.sum()
            metrics["nll"] = nll.detach().mean()
        return loss, metrics


class SimPO(PairObjective):
    def pair_loss(self, forward: Forward, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = self.answer_logps(forward, batch, average=True).chunk(2)
        spec = self.spec
        return simpo_loss(chosen, rejected, spec.beta, spec.simpo_margin, spec.label_smoothing, denominator=SUM)


class ORPO(PairObjective):
    """The negative log-likelihood of the chosen answers is a mean over their tokens in the global batch."""

    needs_global_batch = True

    def __init__(self, spec: AlignSpec) -> None:
        super().__init__(spec)
        self.pairs_per_token = 1.0

    def before_passes(self, forward: Forward, batches: Sequence[Batch], group: dist.ProcessGroup | None) -> None:
        counts = torch.tensor([sum(int(chosen_mask(b).sum()) for b in batches), sum(map(self.units, batches))])
        if group is not None:
            dist.all_reduce(counts, group=group)
        tokens, pairs = counts.tolist()
        self.pairs_per_token = pairs / max(1, tokens)

    def pair_loss(self, forward: Forward, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logps = forward(batch, logprobs=True).logps
        mask = batch.targets != IGNORED
        chosen, rejected = sequence_logps(logps, mask, average=True).chunk(2)
        nll, means = sft_loss(logps.chunk(2)[0], mask.chunk(2)[0], denominator=1 / self.pairs_per_token)
        loss, metrics = orpo_loss(chosen, rejected, nll, self.spec.beta, denominator=SUM)
        return loss, metrics | means


def chosen_mask(batch: Batch) -> Tensor:
    return (batch.targets != IGNORED).chunk(2)[0]


class RewardModel(PairObjective):
    """Bradley–Terry: the reward of an answer is the scalar head's value at its last token."""

    def pair_loss(self, forward: Forward, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = answer_rewards(forward, batch).chunk(2)
        margin = batch.extras["margin"].to(chosen.device) if "margin" in batch.extras else 0.0
        loss, metrics = reward_loss(chosen, rejected, margin, self.spec.reward_center, denominator=SUM)
        rewards = torch.cat([chosen, rejected]).detach()
        metrics |= {"rewards/mean": rewards.mean(), "rewards/square": rewards.square().mean()}
        # How far the probability that the model gives to the choice is from it, squared: 0.25 for a model that guesses.
        metrics["rewards/brier"] = (chosen - rejected).detach().sigmoid().sub(1).square().mean()
        if not torch.is_grad_enabled():
            self.add_calibration((chosen - rejected).sigmoid(), counts=self.units(batch) > 0)
        return loss, metrics

    def add_calibration(self, probabilities: Tensor, counts: bool) -> None:
        """Of held-out pairs, in bins of the probability that the model gives to its choice, from 0.5 to 1: the mean
        probability, the share of choices that are right, and the share of pairs in the bin."""
        confidence = torch.maximum(probabilities, 1 - probabilities)
        bins = ((confidence - 0.5) * 2 * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
        right = (probabilities > 0.5).double()
        for number in range(CALIBRATION_BINS):
            inside = (bins == number).double() * counts
            self.sums.add(f"calibration/confidence_{number}", confidence, inside)
            self.sums.add(f"calibration/accuracy_{number}", right, inside)
            self.sums.add(f"calibration/share_{number}", inside, torch.full_like(inside, float(counts)))


def answer_rewards(forward: Forward, batch: Batch) -> Tensor:
    """The scalar head's value at the last token of each row's answer, (rows)."""
    values: Tensor = forward(batch)
    positions = torch.arange(batch.targets.shape[1], device=values.device)
    last = torch.where(batch.targets.to(values.device) != IGNORED, positions, 0).amax(dim=1)
    return values.gather(1, (last + 1).clamp(max=values.shape[1] - 1).unsqueeze(1)).squeeze(1)


class KTO(AnswerObjective):
    unit = "answer"
    needs_global_batch = True

    def __init__(self, spec: AlignSpec) -> None:
        super().__init__(spec)
        self.kl = torch.zeros(())

    def units(self, batch: Batch) -> int:
        return half_the_rows(batch)

    def before_passes(self, forward: Forward, batches: Sequence[Batch], group: dist.ProcessGroup | None) -> None:
        """The KL estimate of the global batch: the same for all its micro-batches, whatever the layout."""
        shares = []
        for batch in batches:
            other = half(batch, 1)
            with torch.no_grad():
                shares.append(kto_kl(self.answer_logps(forward, other), self.reference_logps(other), denominator=SUM))
        units = shares[0].new_tensor(sum(map(self.units, batches)))
        total = torch.stack([torch.stack(shares).sum(), units]).double()
        if group is not None:
            dist.all_reduce(total, group=group)
        self.kl = (total[0] / total[1].clamp(min=1)).clamp(min=0).float()

    def loss(self, forward: Forward, batch: Batch) -> Tensor:
        spec, own = self.spec, half(batch, 0)
        reference = self.reference_logps(own)
        loss, metrics = kto_loss(
            self.answer_logps(forward, own),
            reference,
            own.extras["label"].to(reference.device),
            self.kl.to(reference.device),
            spec.beta,
            spec.desirable_weight,
            spec.undesirable_weight,
            denominator=SUM,
        )
        units = self.units(batch)
        self.add_metrics(metrics, units)
        return loss if units else loss * 0.0


def half(batch: Batch, which: int) -> Batch:
    tokens, targets = (rows.chunk(2)[which] for rows in (batch.tokens, batch.targets))
    return Batch(tokens, targets, extras=batch.extras)


def half_the_rows(batch: Batch) -> int:
    """Pairs, or labelled answers, of a micro-batch; none where nothing counts."""
    return batch.targets.shape[0] // 2 if batch.counted is None or batch.counted else 0


OBJECTIVES: dict[str, Any] = {
    "dpo": ReferencePairs,
    "ipo": ReferencePairs,
    "simpo": SimPO,
    "orpo": ORPO,
    "kto": KTO,
    "reward": RewardModel,
}


def objective_of(spec: AlignSpec) -> Objective:
    return OBJECTIVES[spec.method](spec) if spec.method in OBJECTIVES else Objective()
