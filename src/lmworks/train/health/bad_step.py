"""Detection of bad steps and the choice of an action: the same on every rank.

Both depend only on the all-reduced scalars of the step and on the state here, which is saved with every checkpoint: a
resumed run decides like one that never stopped.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ...spec import HealthSpec
from ...spec.fault_tolerance import ACTIONS
from .spikes import DIVERGED_STEPS, START, divergence_threshold, spike_score, spike_threshold

STEP_KINDS = {"spike_loss": "loss", "spike_grad": "gradient norm"}


@dataclass(frozen=True)
class HealthIssue:
    """One problem of a step."""

    kind: str  # spike_loss, spike_grad, nonfinite or corruption
    action: str
    what: str  # as text
    where: str = ""  # text that continues `what`: where it began
    facts: dict[str, Any] = field(default_factory=dict)  # for the event
    taken: bool = False  # the step was taken before it was found


class StepRejected(Exception):
    """A step whose update was not made, or must be undone: the loop skips its data, or rewinds."""

    def __init__(self, issue: HealthIssue) -> None:
        super().__init__(issue.what)
        self.issue = issue


@dataclass
class HealthState:
    """What decisions depend on; saved in the metadata of a checkpoint."""

    losses: list[float] = field(default_factory=list)  # of the steps taken, at most a window of them
    norms: list[float] = field(default_factory=list)
    acted: list[int] = field(default_factory=list)  # cursors at which an action other than logging was taken
    lr_factor: float = 1.0
    lr_until: int = 0  # the step at which the factor expires; 0: never
    rewound_to: int = 0  # target of the last rewind
    overflows: int = 0  # fp16: steps skipped because the loss scale was too high
    suspects: dict[str, Any] = field(default_factory=dict)  # replicas that differed: step and digests, until the replay


class Health:
    def __init__(self, spec: HealthSpec) -> None:
        self.spec = spec
        self.state = HealthState()

    # --- detection --------------------------------------------------------------------------------------

    def check_step(self, loss: float, norm: float, scaled: bool) -> list[HealthIssue]:
        """The issues of a step, strongest action first. `scaled`: an infinite norm may be an fp16 overflow."""
        if not math.isfinite(loss) or not (math.isfinite(norm) or scaled):
            what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
            return [HealthIssue("nonfinite", self.spec.nonfinite, what, facts={"loss": loss, "grad_norm": norm})]
        found = []
        for kind, value, before in (
            ("spike_loss", loss, self.state.losses),
            ("spike_grad", norm, self.state.norms),
        ):
            if not math.isfinite(value):
                continue
            if len(before) < self.spec.warmup:
                if kind == "spike_loss" and value > divergence_threshold(before):
                    found.append(self.divergence(loss, norm))
                continue
            seen = spike_score(value, before)
            if seen.z > self.spec.z:
                what = f"{STEP_KINDS[kind]} {value:.4g} is {seen.z:.0f} robust deviations above {seen.median:.4g}"
                facts = {"loss": loss, "grad_norm": norm, "median": seen.median, "z": round(seen.z, 2)}
                where = f", the median of {len(before)} steps"
                found.append(HealthIssue(kind, getattr(self.spec, kind), what, where, facts))
        return sorted(found, key=lambda issue: ACTIONS.index(issue.action), reverse=True)

    def divergence(self, loss: float, norm: float) -> HealthIssue:
        """Beside `check_step`'s spikes, where too few steps were seen to tell those."""
        start = max(self.state.losses[:START])
        what = (
            f"loss {loss:.4g} and the {DIVERGED_STEPS - 1} before it are more than twice the first ones ({start:.4g})"
        )
        facts = {"loss": loss, "grad_norm": norm, "start": start, "diverged": True}
        return HealthIssue("spike_loss", self.spec.spike_loss, what, "", facts)

    def limits(self) -> tuple[float, float]:
        """The largest loss and norm of the next step in which `check_step` surely finds nothing; an infinite one allows
        all that is finite. Known when its update is launched, so the device can compare by itself.
        """
        if len(self.state.losses) < self.spec.warmup:
            return divergence_threshold(self.state.losses), math.inf
        loss, norm = (spike_threshold(self.spec.z, before) for before in (self.state.losses, self.state.norms))
        return loss, norm

    def record_step(self, loss: float, norm: float) -> None:
        """The step was taken: later steps are compared with it."""
        if not math.isfinite(norm):
            self.state.overflows += 1
            return
        for values, value in ((self.state.losses, loss), (self.state.norms, norm)):
            values.append(value)
            del values[: -self.spec.window]

    # --- actions ----------------------------------------------------------------------------------------

    def actions_exhausted(self, cursor: int) -> bool:
        """Whether max_actions were taken within the window: actions that do not help must end."""
        recent = [at for at in self.state.acted if at > cursor - self.spec.window]
        return len(recent) >= self.spec.max_actions

    def record_action(self, cursor: int) -> None:
        self.state.acted = [at for at in self.state.acted if at > cursor - self.spec.window] + [cursor]

    def lower_lr(self, step: int) -> None:
        self.state.lr_factor = self.lr_multiplier(step) * self.spec.lr_factor
        self.state.lr_until = step + self.spec.lr_steps if self.spec.lr_steps else 0

    def lr_multiplier(self, step: int) -> float:
        """Multiplier of the scheduled learning rate in the step after `step`."""
        expired = self.state.lr_until and step >= self.state.lr_until
        return 1.0 if expired else self.state.lr_factor

    # --- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Empty in checkpoints of old versions."""
        self.state = HealthState(**{one.name: state[one.name] for one in fields(HealthState) if one.name in state})

    def carry_over(self, now: HealthState) -> None:
        """After a rewind: keep the record of actions, or rewinds would never end."""
        self.state.acted, self.state.suspects, self.state.rewound_to = now.acted, now.suspects, now.rewound_to
        self.state.lr_factor, self.state.lr_until = now.lr_factor, now.lr_until
