"""The trainer of post-training: examples instead of tokens, an objective for each method, frozen models beside the
policy. Steps, layouts, checkpoints, health and reports are those of pretraining."""

from __future__ import annotations

import math
import os
from typing import cast

from ..data.chat_template import TOKENIZER_FOLDER
from ..data.chat_tokenizer import copy_tokenizer
from ..data.example_batches import ExampleBatches
from ..model.reward_stats import RewardStats, write_stats
from ..parallel.adapter_model import AdapterModel
from ..parallel.world import run_on_all_ranks, run_on_rank_zero
from ..plan.devices.machine import Machine
from ..plan.passes import REFERENCE, TEACHER, reference_is_base
from ..spec import RunSpec
from ..train import Trainer
from ..train.evaluate import Evaluation
from ..train.objective import Forward, Objective
from .distill_objective import KEY, DistillObjective, check_padding
from .frozen_model import load_frozen
from .model_folders import check_model_folders, check_tokens, digest_models
from .objectives import AnswerObjective, objective_of


class PostTrainer(Trainer):
    batches: ExampleBatches
    held_out: ExampleBatches

    def preflight(self, force: bool = False) -> None:
        run_on_rank_zero(lambda: check_model_folders(self.spec))
        super().preflight(force)
        run_on_rank_zero(lambda: check_tokens(self.spec, self.batches.tokenizer))
        self.frozen_models = run_on_rank_zero(lambda: digest_models(self.spec, self.base))

    def create_folder(self, spec: RunSpec, machine: Machine | None) -> None:
        super().create_folder(spec, machine)
        copy_tokenizer(spec.data, spec.checkpoint.init, self.folder.path / TOKENIZER_FOLDER)
        self.folder.event("examples", 0, **self.batches.report.to_dict())

    def make_objective(self) -> Objective:
        align = self.spec.align
        if align.method != "distill":
            return objective_of(align)
        run_on_all_ranks(lambda: check_padding(self.spec))
        return DistillObjective(align, align.online and align.updates(self.spec.data.global_batch) == 1)

    def run(self) -> Evaluation:
        result = super().run()
        if self.spec.align.method == "reward" and self.is_rank_zero:
            mean, square = result.metrics["rewards/mean"], result.metrics["rewards/square"]
            std = math.sqrt(max(square - mean**2, 1e-12))
            write_stats(self.folder.path, RewardStats(mean, std, self.step))
        return result

    def build(self) -> None:
        super().build()
        self.frozen.clear()
        self.checkpoints.frozen_models = self.frozen_models
        if self.spec.align.needs_reference and isinstance(self.objective, AnswerObjective):
            self.objective.reference = self.reference_forward()
        if isinstance(self.objective, DistillObjective):
            self.frozen[TEACHER] = load_frozen(self.spec, self.spec.align.teacher, KEY, self.mesh, self.device)
            self.objective.teacher = self.frozen[TEACHER]

    def reference_forward(self) -> Forward:
        """The forward pass of the frozen reference: with adapters, of the model without them."""
        if reference_is_base(self.spec):
            return AdapterModel(self.parallel_model, None).forward
        chosen = self.spec.align.reference
        key = "align.reference" if chosen else "checkpoint.init"
        model = load_frozen(self.spec, chosen or self.spec.checkpoint.init, key, self.mesh, self.device)
        self.frozen[REFERENCE] = model
        return model.forward


def trainer_class(spec: RunSpec) -> type[Trainer]:
    """The trainer of a run: pretraining, or post-training where the spec has a method."""
    if not spec.align.method:
        return Trainer
    if spec.align.online:
        beyond = int(os.environ.get("RANK") or 0) >= spec.parallel.world
        if spec.align.rollout_ranks and beyond:  # whatever it is called: it is run in the same way
            from .rollout_worker import RolloutWorker

            return cast(type[Trainer], RolloutWorker)
        from .online_trainer import OnlineTrainer  # with the engine, which takes a second to load

        return OnlineTrainer
    return PostTrainer
