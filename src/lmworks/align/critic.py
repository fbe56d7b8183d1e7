"""PPO's critic: a value model that is trained beside the policy, by steps of the same kind.

It is a model of its own, or an adapter over the policy's base (`scalar_adapters.py`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import Batch
from ..parallel.adapter_model import trained_adapter
from ..parallel.initial_weights import Source, is_hf, source_of
from ..parallel.parallel_model import ParallelModel
from ..parallel.parallelize import parallelize
from ..parallel.precision import LossScale
from ..parallel.world import run_on_all_ranks
from ..plan.passes import critic_adapter, critic_run
from ..spec import RunSpec
from ..spec.components import SCORE
from ..spec.lora import CRITIC_ADAPTER
from ..train.async_step import PassLauncher
from ..train.health.bad_step import Health
from ..train.health.bad_step_recovery import BadStepRecovery
from ..train.objective import Forward
from ..train.optim import make_optimizer
from ..train.step import Stepper
from ..train.step_scalars import ScalarReader
from ..train.train_state import TrainState
from ..train.trainer import Trainer
from .frozen_model import load_run_weights, model_of
from .objectives import SUM, AnswerObjective
from .policy_losses import ppo_value_loss
from .rollouts import by_answer


class ValueObjective(AnswerObjective):
    """The clipped value loss over the tokens of answers."""

    unit = "token"

    def loss(self, forward: Forward, batch: Batch) -> Tensor:
        values = by_answer(forward(batch), batch)
        old, returns, mask = (batch.extras[name].to(values.device) for name in ("values", "returns", "mask"))
        loss, metrics = ppo_value_loss(values, old, returns, mask, self.spec.value_clip or None, denominator=SUM)
        self.add_metrics(metrics, batch.count())
        return loss


class Critic(Stepper):
    def __init__(self, trainer: Trainer) -> None:
        align = trainer.spec.align
        self.spec = critic_spec(trainer.spec)
        self.device, self.mesh, self.folder = trainer.device, trainer.mesh, trainer.folder
        self.is_rank_zero, self.memory, self.batches = trainer.is_rank_zero, trainer.memory, trainer.batches
        if self.spec.adapters:
            self.parallel_model: ParallelModel = trained_adapter(trainer.parallel_model, CRITIC_ADAPTER, self.spec)
        else:
            self.parallel_model = self.whole_model(align.critic_head)
        self.optimizer = make_optimizer(
            self.parallel_model.shards, self.spec.model, self.spec.optim, self.spec.precision, self.spec.seed
        )
        self.engine = None
        self.objective = ValueObjective(align)
        self.loss_scale, self.health = LossScale(self.spec.precision), Health(self.spec.health)
        self.reader = ScalarReader(self.device)
        self.launcher = PassLauncher(self.parallel_model, self.launch_passes)
        self.recorder = trainer.recorder
        self.recovery = BadStepRecovery(self.parallel_model, self.health, self.loss_scale, self.batches, self.recorder)
        self.step = self.cursor = self.stop_signal = 0
        self.state = TrainState(self.parallel_model, self.optimizer, None)

    def whole_model(self, head: str) -> ParallelModel:
        folder = self.spec.checkpoint.init
        model = parallelize(self.spec, self.mesh, self.device, self.initial_weights(head))
        if folder and not is_hf(Path(folder)):
            load_run_weights(model, folder, "align.critic")
        return model

    def initial_weights(self, head: str) -> Source:
        """Those of the folder; a new head is zero, so that the first values are, or drawn at random."""
        weights = run_on_all_ranks(lambda: source_of(self.spec))
        has_head = bool(self.spec.checkpoint.init) and model_of(self.spec.checkpoint.init, "align.critic").scalar_head
        if has_head or head == "normal":
            return weights
        return lambda name, shape: torch.zeros(shape) if name == SCORE else weights(name, shape)

    def update(self, batches: list[Batch], step: int, cursor: int) -> dict[str, float]:
        """One step on the batch that the policy trains on; its metrics."""
        began = time.perf_counter()
        self.step, self.cursor = step, cursor
        values = self.train_step(batches)
        found = {name: value for name, value in values.items() if name.startswith("value/")}
        found |= {"value/loss": values["loss"], "value/grad_norm": values["grad_norm"]}
        return found | {"critic_s": time.perf_counter() - began}

    def state_dict(self) -> dict[str, Any]:
        """What is no tensor: `state` has those."""
        return {"loss_scale": self.loss_scale.state_dict(), "health": self.health.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = self.health.state
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.health.load_state_dict(state["health"])
        if now.acted:  # a rewind: its record of actions goes on, or rewinds would never end
            self.health.carry_over(now)


def critic_spec(spec: RunSpec) -> RunSpec:
    align = spec.align
    if lora := run_on_all_ranks(lambda: critic_adapter(spec)):
        return critic_run(spec, spec.model, lora=lora)
    folder = align.critic or align.reward_model or spec.checkpoint.init
    model = run_on_all_ranks(lambda: model_of(folder, "align.critic")) if folder else spec.model
    return critic_run(spec, model, folder)
