"""The objective of distillation: a student's distributions over the vocabulary against those of a frozen teacher."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import Batch
from ..kernels.training.token_divergence import Teacher
from ..parallel.parallel_model import ParallelModel
from ..spec import AlignSpec, RunSpec, SpecError
from ..train.objective import Forward
from .frozen_model import model_of
from .objectives import AnswerObjective
from .policy_objective import sampler_mismatch
from .rollouts import by_answer

KEY = "align.teacher"


class DistillObjective(AnswerObjective):
    """The divergence at every token that counts, of given answers or of the student's own.

    `scores_sampler`: tokens were sampled by the weights that the loss is computed with, so that both log-probabilities
    of a token should be equal.
    """

    unit = "token"

    def __init__(self, spec: AlignSpec, scores_sampler: bool = False) -> None:
        super().__init__(spec)
        self.scores_sampler = scores_sampler
        self.teacher: ParallelModel | None = None  # set once the models are built

    def loss(self, forward: Forward, batch: Batch) -> Tensor:
        spec, model = self.spec, self.teacher
        assert model is not None, "align.method = 'distill' needs a teacher"
        with torch.no_grad():
            states = model.forward(batch, final_states=True)
        part = model.parts[0]
        teacher = Teacher(
            states,
            part.head_weight.detach(),
            part.spec.final_softcap,
            spec.divergence,  # type: ignore[arg-type]
            spec.temperature,
            spec.jsd_beta,
        )
        found = forward(batch, teacher=teacher)
        model.reshard()
        count = max(1, batch.count())
        metrics = {
            "divergence": found.loss.detach() / count,
            "top1_agreement": found.agreement.sum() / count,
            "nll": -found.logps.sum() / count,
        }
        self.add_metrics(metrics, batch.count())
        if self.scores_sampler:
            extras = {name: tensor.to(states.device) for name, tensor in batch.extras.items()}
            fresh = extras.get("fresh", extras["mask"])
            compared = sampler_mismatch(by_answer(found.logps, batch), extras["sampler_logps"], fresh)
            for name, value in compared.items():  # means over fresh tokens
                self.sums.add(name, value, fresh.sum())
        return found.loss


def check_padding(spec: RunSpec) -> None:
    """Of a teacher with the student's tokens: under tensor parallelism the rows that pad its vocabulary count."""
    folder = spec.align.teacher
    model, own = model_of(folder, KEY), spec.model
    if model.vocab != own.vocab and spec.parallel.tp > 1:
        raise SpecError(
            f"{KEY} = {folder!r} pads its vocabulary to {model.vocab:,}, the student to {own.vocab:,}: "
            "ranks of parallel.tp would hold different tokens; use parallel.tp = 1"
        )
