"""Sections of a spec about failures: checkpoints, what follows a failure, hang detection, health of the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .errors import SpecError
from .schema import Section, opt

if TYPE_CHECKING:
    from .run import RunSpec


@dataclass(frozen=True)
class CheckpointSpec(Section):
    section: ClassVar[str] = "checkpoint"

    every: int = opt(100, "steps between checkpoints; the last step is always saved (0: only that)", ge=0)
    keep: int = opt(3, "newest checkpoints to keep (0: all)", ge=0)
    keep_every: int = opt(0, "steps of which every multiple is kept for ever (0: none)", ge=0)
    asynchronous: bool = opt(False, "train on while a process per rank writes what was copied in memory")
    hash: str = opt(
        "sha256",
        "what vouches for the bytes: xxh3 is faster and finds damage as surely, but needs the package xxhash",
        choices=("sha256", "xxh3"),
    )
    remote: str = opt(
        "", "an address of fsspec (s3://…) to which every checkpoint is copied, and loaded from if need be"
    )
    init: str = opt("", "a run folder or Hugging Face folder whose weights the run starts from")


# --- fault -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FaultSpec(Section):
    section: ClassVar[str] = "fault"

    max_restarts: int = opt(0, "times that ranks which failed are started again", ge=0)
    elastic: bool = opt(False, "go on with fewer data-parallel ranks, the global batch kept by accumulation")
    deadline_s: float = opt(120.0, "seconds after SIGTERM in which the step and its save must end", gt=0)
    crash_loop: str = opt("stop", "where the same step fails twice: end, or pass its batch", choices=("stop", "skip"))


# --- watch -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WatchSpec(Section):
    section: ClassVar[str] = "watch"

    timeout_s: float = opt(1800.0, "seconds that a collective may take before the run is stopped", gt=0)
    straggler: float = opt(1.5, "times the busy time of the median rank at which a rank is called slow", gt=1)
    straggler_steps: int = opt(20, "steps in a row that a rank is slow before it is named", ge=1)


# --- health ----------------------------------------------------------------------------------------------


ACTIONS = ("log", "lower_lr", "skip", "rewind", "stop")  # from the mildest to the strongest


@dataclass(frozen=True)
class HealthSpec(Section):
    section: ClassVar[str] = "health"

    spike_loss: str = opt("log", "what follows a loss far above the recent ones", choices=ACTIONS)
    spike_grad: str = opt("log", "what follows a gradient norm far above the recent ones", choices=ACTIONS)
    nonfinite: str = opt("stop", "what follows a NaN or Inf; its step is never taken", choices=ACTIONS[1:])
    corruption: str = opt("stop", "what follows copies of a weight that differ", choices=("log", "rewind", "stop"))
    window: int = opt(128, "steps before this one that a spike is judged against", ge=8)
    warmup: int = opt(-1, "steps to have seen before anything is a spike (-1: a quarter of the window)", ge=-1)
    z: float = opt(8.0, "robust standard deviations above the median that make a spike", gt=0)
    max_actions: int = opt(3, "times within a window that skip, rewind or lower_lr may help before the run stops", ge=1)
    rewind_steps: int = opt(10, "rewind: go back at least so many steps", ge=1)
    lr_factor: float = opt(0.5, "lower_lr: what the learning rate is multiplied by", gt=0, lt=1)
    lr_steps: int = opt(0, "lower_lr: for how many steps (0: to the end of the run)", ge=0)
    rerun: bool = opt(False, "compute a bad step again: one that is then good was a fault of the machine, and is taken")
    hash_every: int = opt(0, "steps between comparisons of the copies of weights and optimizer states (0: never)", ge=0)
    stats_every: int = opt(0, "steps between statistics of every block's activations and gradients (0: never)", ge=0)

    def check(self) -> None:
        if self.warmup < 0:
            self.derive("warmup", max(4, self.window // 4))
        if self.warmup > self.window:
            raise SpecError(
                f"health.warmup = {self.warmup} is longer than health.window = {self.window}: nothing would be a spike"
            )

    @property
    def actions(self) -> dict[str, str]:
        names = ("spike_loss", "spike_grad", "nonfinite", "corruption")
        return {self.key(name): getattr(self, name) for name in names}


def check_health(run: RunSpec) -> None:
    """What the rest of a run must allow."""
    health, layout = run.health, run.parallel
    for key, action in health.actions.items():
        if action == "rewind" and not run.checkpoint.every:
            raise SpecError(f"{key} = 'rewind' needs checkpoint.every > 0: there would be nothing to go back to")
        if action not in ("log", "stop") and layout.engine == "deepspeed":
            raise SpecError(f"{key} = '{action}' needs parallel.engine = 'native': DeepSpeed takes its steps itself")
    extras = {"rerun": health.rerun, "hash_every": health.hash_every, "stats_every": health.stats_every}
    for name, value in extras.items():
        if value and layout.engine == "deepspeed":
            raise SpecError(f"{health.key(name)} needs parallel.engine = 'native': DeepSpeed keeps its gradients")
    copies = layout.dp_replicate * layout.tp * (layout.cp if layout.strategy == "ddp" else 1)
    if health.hash_every and copies == 1:
        raise SpecError(
            f"health.hash_every = {health.hash_every} compares copies, and this layout has none: every number lies on "
            "one rank; parallel.dp_replicate > 1 has copies"
        )
