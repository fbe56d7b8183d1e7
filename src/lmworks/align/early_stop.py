"""When an online run ends before its last step: answers too far from the reference, or a reward that only rises on the
prompts that are trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

KL, HELD_OUT = "kl", "held_out"  # reasons


@dataclass
class StopState:
    """Saved in checkpoints: a resumed run ends where one that never stopped does, and one that has ended stays so."""

    kl: float = 0.0  # of an answer of the last round
    rewards: list[float] = field(default_factory=list)  # means of training rounds since the last evaluation
    training: float = 0.0  # their mean at the last evaluation that had any
    best: float | None = None  # the highest held-out reward
    training_at_best: float = 0.0
    stale: int = 0  # evaluations since then


class EarlyStop:
    def __init__(self, kl_limit: float, patience: int) -> None:
        """`kl_limit`: in nats, 0 for none. `patience`: evaluations without a higher held-out reward, 0 for no end."""
        self.kl_limit, self.patience = kl_limit, patience
        self.state = StopState()

    def record_step(self, values: Mapping[str, Any]) -> None:
        """The metrics of a step; the first one of a round has those of the round."""
        self.state.kl = values.get("kl_answer", self.state.kl)
        reward = values.get("reward/mean", math.nan)
        if self.patience and math.isfinite(reward):
            self.state.rewards.append(reward)

    def record_evaluation(self, reward: float) -> None:
        """The mean reward of held-out prompts; NaN, where no function has an opinion, says nothing."""
        state = self.state
        if state.rewards:
            state.training = math.fsum(state.rewards) / len(state.rewards)
            state.rewards = []
        if math.isnan(reward):
            return
        if state.best is None or reward > state.best:
            state.best, state.training_at_best, state.stale = reward, state.training, 0
        else:
            state.stale += 1

    @property
    def reason(self) -> str:
        """Why the run ends here; empty where it goes on."""
        if self.kl_limit and self.state.kl > self.kl_limit:
            return KL
        risen = self.state.training > self.state.training_at_best
        return HELD_OUT if self.patience and self.state.stale >= self.patience and risen else ""

    @property
    def facts(self) -> dict[str, Any]:
        """Of the event that says why."""
        state = self.state
        if self.reason == KL:
            return {"reason": KL, "kl": state.kl, "limit": self.kl_limit}
        training = {"training": state.training, "training_at_best": state.training_at_best}
        return {"reason": HELD_OUT, "best": state.best, "evaluations": state.stale, **training}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = StopState(**{one.name: state[one.name] for one in fields(StopState)})
