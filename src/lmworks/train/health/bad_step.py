"""What is wrong with a step, and what is to be done about it: decided alike by every rank.

All of it follows from figures that the ranks have exchanged anyway and from the state kept here, which is saved with
every checkpoint: a run that was killed and resumed decides as the one that never stopped.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ...spec import HealthSpec
from ...spec.health import ACTIONS
from .spikes import height, limit

STEP_KINDS = {"spike_loss": "loss", "spike_grad": "gradient norm"}


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong."""

    kind: str  # spike_loss, spike_grad, nonfinite or corruption
    action: str
    what: str  # in words
    where: str = ""  # it began, in words that go on from those
    facts: dict[str, Any] = field(default_factory=dict)  # for the event
    taken: bool = False  # its step was, before it was found


class NotTaken(Exception):
    """A step whose update was not made, or must not stand: the loop moves the data on, or goes back."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.what)
        self.trouble = trouble


@dataclass
class Memory:
    """What decisions depend on; a checkpoint's meta holds it."""

    losses: list[float] = field(default_factory=list)  # of the steps taken, at most a window of them
    norms: list[float] = field(default_factory=list)
    acted: list[int] = field(default_factory=list)  # the cursors at which something other than logging was done
    lr_factor: float = 1.0
    lr_until: int = 0  # the step from which the factor no longer holds; 0: it holds to the end
    rewound_to: int = 0  # the step that was last gone back to
    overflows: int = 0  # fp16: steps left out because the loss scale was too high
    suspects: dict[str, Any] = field(default_factory=dict)  # replicas that differed: step and digests, until replayed


class Health:
    def __init__(self, spec: HealthSpec) -> None:
        self.spec = spec
        self.memory = Memory()

    # --- what is wrong ----------------------------------------------------------------------------------

    def judge(self, loss: float, norm: float, scaled: bool) -> list[Trouble]:
        """The troubles of a step, the strongest action first. `scaled`: an infinite norm may be fp16's scale."""
        if not math.isfinite(loss) or not (math.isfinite(norm) or scaled):
            what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
            return [Trouble("nonfinite", self.spec.nonfinite, what, facts={"loss": loss, "grad_norm": norm})]
        found = []
        for kind, value, before in (
            ("spike_loss", loss, self.memory.losses),
            ("spike_grad", norm, self.memory.norms),
        ):
            if len(before) < self.spec.warmup or not math.isfinite(value):
                continue
            seen = height(value, before)
            if seen.z > self.spec.z:
                what = f"{STEP_KINDS[kind]} {value:.4g} is {seen.z:.0f} robust deviations above {seen.median:.4g}"
                facts = {"loss": loss, "grad_norm": norm, "median": seen.median, "z": round(seen.z, 2)}
                where = f", the median of {len(before)} steps"
                found.append(Trouble(kind, getattr(self.spec, kind), what, where, facts))
        return sorted(found, key=lambda trouble: ACTIONS.index(trouble.action), reverse=True)

    def limits(self) -> tuple[float, float]:
        """The largest loss and norm of the next step in which `judge` surely finds nothing; an infinite one allows
        all that is finite. Known when its update is launched, so the device can compare by itself.
        """
        loss, norm = (
            limit(self.spec.z, before) if len(before) >= self.spec.warmup else math.inf
            for before in (self.memory.losses, self.memory.norms)
        )
        return loss, norm

    def accept(self, loss: float, norm: float) -> None:
        """The step was taken: the next ones are judged against it too."""
        if not math.isfinite(norm):
            self.memory.overflows += 1
            return
        for values, value in ((self.memory.losses, loss), (self.memory.norms, norm)):
            values.append(value)
            del values[: -self.spec.window]

    # --- what is done about it --------------------------------------------------------------------------

    def exhausted(self, cursor: int) -> bool:
        """Whether enough was tried within a window: what does not help must not go on for ever."""
        recent = [at for at in self.memory.acted if at > cursor - self.spec.window]
        return len(recent) >= self.spec.max_actions

    def note(self, cursor: int) -> None:
        self.memory.acted = [at for at in self.memory.acted if at > cursor - self.spec.window] + [cursor]

    def lower(self, step: int) -> None:
        self.memory.lr_factor = self.factor(step) * self.spec.lr_factor
        self.memory.lr_until = step + self.spec.lr_steps if self.spec.lr_steps else 0

    def factor(self, step: int) -> float:
        """What the schedule's rate is multiplied by in the step after `step`."""
        over = self.memory.lr_until and step >= self.memory.lr_until
        return 1.0 if over else self.memory.lr_factor

    # --- what is kept -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.memory)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checkpoints of before there was any are empty here."""
        self.memory = Memory(**{one.name: state[one.name] for one in fields(Memory) if one.name in state})

    def remember(self, now: Memory) -> None:
        """After an earlier checkpoint was loaded: what was done since then stays known, or it would never end."""
        self.memory.acted, self.memory.suspects, self.memory.rewound_to = now.acted, now.suspects, now.rewound_to
        self.memory.lr_factor, self.memory.lr_until = now.lr_factor, now.lr_until
