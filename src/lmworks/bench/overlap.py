"""Settings of data parallelism against step time and exposed communication, measured on real ranks.

Every setting is timed in turns with the spec as it is and with its passes without communication (DDP under `no_sync`),
on the same ranks: other load on the machine meets all three. What communication costs is the difference between passes
with and without it, which also counts compute that messages slow down; what of it is exposed and what is hidden comes
from a trace of the same step (`trace/breakdown.py`). Settings that gain more than their spread are tried together; what
the last measurement confirms is the recommendation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from ..data.progress import Progress, silent
from ..parallel.ddp import DDP
from ..parallel.profiler import recorder
from ..parallel.world import all_gather_object
from ..plan.memory.sheet import memory
from ..spec import RunSpec, SpecError
from ..trace.breakdown import Activity
from ..trace.kineto import read_trace
from ..train import Trainer
from ..train.rank_memory import train_one_step
from .kernel_timing import device_name
from .train import synchronize, tolerate_bad_steps, with_default_data, without_async_saves

BUCKETS_MB = (1.0, 5.0, 25.0, 100.0, 400.0)
PREFETCHES = (1, 2, 4)
WARM_UP = 2  # steps
TRACED = 2  # steps of each setting
WORTH = 0.01  # of a step: a smaller gain is not recommended
SPEC, NO_MESSAGES = "as the spec says", "no communication"


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(middle, low, high)


@dataclass(frozen=True)
class Setting:
    """One setting beside the spec as it is, round by round."""

    name: str  # as overrides of the spec
    overrides: dict[str, Any]  # keys of `parallel`
    step_s: float
    gain: Spread  # share of the spec's step that it saves
    comm_cost_s: Spread  # passes over those without communication
    exposed_s: float  # from a trace
    hidden_s: float
    planned_bytes: int  # peak memory of rank 0

    @property
    def pays(self) -> bool:
        """More than its spread."""
        return self.gain.low > 0 and self.gain.median >= WORTH


@dataclass(frozen=True)
class OverlapStudy:
    spec: RunSpec
    ranks: int
    rounds: int
    device: str
    backend: str
    compute_s: float  # passes without communication
    baseline: Setting
    settings: list[Setting]
    together: Setting | None  # those that pay, measured together
    not_measured: dict[str, str] = field(default_factory=dict)  # key → why

    @property
    def recommended(self) -> Setting | None:
        return self.together if self.together and self.together.pays else None

    def to_dict(self) -> dict[str, Any]:
        best = self.recommended
        return {
            "spec": self.spec.to_dict(),
            **{name: getattr(self, name) for name in ("ranks", "rounds", "device", "backend", "compute_s")},
            "accumulation": self.spec.accumulation,
            "baseline": asdict(self.baseline),
            "settings": [asdict(one) for one in self.settings],
            "together": asdict(self.together) if self.together else None,
            "recommended": [] if best is None else override_words(best.overrides),
            "gain": None if best is None else asdict(best.gain),
            "not_measured": self.not_measured,
        }


def override_words(overrides: dict[str, Any]) -> list[str]:
    """As they are typed."""
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value).lower() for key, value in overrides.items()}
    return [f"parallel.{key}={text}" for key, text in texts.items()]


# --- what is varied --------------------------------------------------------------------------------------


def check_study(spec: RunSpec) -> None:
    layout = spec.parallel
    others = [
        f"parallel.{axis} = {getattr(layout, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(layout, axis) > 1
    ]
    if layout.engine == "deepspeed":
        others.append("parallel.engine = 'deepspeed'")
    if layout.offload != "none":
        others.append(f"parallel.offload = '{layout.offload}'")
    if others:
        raise SpecError(f"this study varies native data parallelism alone, without {', '.join(others)}")
    if layout.dp < 2:
        raise SpecError("this study needs at least 2 data-parallel ranks: --ranks 2, or parallel.dp in the spec")


def variations(spec: RunSpec, device: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Changes to `parallel`, one key at a time; and which keys are left out, with the reason."""
    layout = spec.parallel
    found: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    if layout.strategy in ("ddp", "zero"):
        sizes = list(bucket_sizes(spec))
        found += [{"bucket_mb": size} for size in sizes]
        if not sizes:
            left_out["bucket_mb"] = "one bucket holds all gradients, of whichever size"
    if layout.strategy in ("fsdp1", "fsdp2"):
        found.append({"reshard": not layout.reshard})
    if layout.strategy == "fsdp2":
        blocks = [n for n in PREFETCHES if n != layout.prefetch and n < spec.model.layers]
        found += [{"prefetch": n} for n in blocks]
        if not blocks:
            left_out["prefetch"] = f"model.layers = {spec.model.layers}: there is no other block to gather ahead"
    if layout.strategy in ("ddp", "fsdp2") and spec.accumulation > 1:
        found.append({"sync_each_pass": not layout.sync_each_pass})
    elif layout.strategy in ("ddp", "fsdp2"):
        left_out["sync_each_pass"] = "one micro-batch a rank; a larger data.global_batch has several"
    if device == "cuda":
        found.append({"comm_priority": "high" if layout.comm_priority == "normal" else "normal"})
    else:
        left_out["comm_priority"] = "gloo has no streams"
    return found, left_out


def bucket_sizes(spec: RunSpec) -> Iterator[float]:
    """Those that make different buckets: of what holds all gradients, the first."""
    whole = spec.model.params * (2 if spec.precision.weights == "bf16" else 4) / 2**20
    for size, before in zip(BUCKETS_MB, (0.0, *BUCKETS_MB), strict=False):
        if before < whole and min(size, whole) != min(spec.parallel.bucket_mb, whole):
            yield size


# --- timing ----------------------------------------------------------------------------------------------


class TimedTrainer:
    """A trainer whose steps are timed, and the passes in them apart. `silent_passes`: no gradient is sent."""

    def __init__(self, spec: RunSpec, folder: Path, silent_passes: bool = False) -> None:
        self.trainer = trainer = Trainer(spec, folder, quiet=True, force=True)
        trainer.build()
        self.steps: list[float] = []
        self.passes: list[float] = []
        run_passes: Callable[..., Any] = trainer.forward_backward

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            sums = run_passes(*arguments)
            if trainer.device.type == "cuda":
                torch.cuda.synchronize(trainer.device)
            self.passes.append(time.perf_counter() - began)
            return sums

        vars(trainer)["forward_backward"] = timed
        if silent_passes:
            (strategy,) = trainer.parallel_model.strategies.values()
            assert isinstance(strategy, DDP)
            vars(strategy)["micro_batch"] = lambda last: strategy.ddp.no_sync()

    def step(self) -> None:
        synchronize(self.trainer.device)
        began = time.perf_counter()
        train_one_step(self.trainer)
        synchronize(self.trainer.device)
        self.steps.append(time.perf_counter() - began)

    def restart_clock(self) -> None:
        self.steps.clear()
        self.passes.clear()

    def slowest(self) -> tuple[list[float], list[float]]:
        """Seconds of steps and of passes, each of the slowest rank, the same on all ranks."""
        every = all_gather_object((self.steps, self.passes))
        steps, passes = ([max(round_) for round_ in zip(*kind, strict=True)] for kind in zip(*every, strict=True))
        return steps, passes

    def traced(self, folder: Path) -> tuple[float, float]:
        """Exposed and hidden communication of a step: the median of some, the mean over ranks."""
        found = []
        for number in range(TRACED):
            synchronize(self.trainer.device)
            with recorder(self.trainer.device) as recorded:
                train_one_step(self.trainer)
                if self.trainer.device.type == "cuda":
                    torch.cuda.synchronize(self.trainer.device)
            file = folder / f"rank{dist.get_rank()}-{number}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(file))
            parts = [part for _, part in Activity(read_trace(file)).of_steps]
            file.unlink()
            found.append(
                (sum(part.exposed_comm for part in parts) / 1e9, sum(part.hidden_comm for part in parts) / 1e9)
            )
        mine = [median(values) for values in zip(*found, strict=True)]
        exposed, hidden = (sum(values) / len(values) for values in zip(*all_gather_object(mine), strict=True))
        return exposed, hidden


def study(spec: RunSpec, rounds: int, progress: Progress = silent) -> OverlapStudy | None:
    """Called on every rank; rank 0 gets the result."""
    spec = with_default_data(without_async_saves(tolerate_bad_steps(spec)))
    check_study(spec)
    with TemporaryDirectory(prefix="lmworks-overlap-") as scratch:
        folder = Path(str(all_gather_object(scratch)[0]))
        own = TimedTrainer(spec, folder / "own")
        plain = spec.parallel.replace(strategy="ddp", zero=0, dp_replicate=spec.parallel.dp, dp_shard=1)
        alone = TimedTrainer(spec.replace(parallel=plain), folder / "alone", silent_passes=True)
        device = own.trainer.device
        changes, not_measured = variations(spec, device.type)
        total = len(changes) + 2
        progress(SPEC, 0, total)
        baseline, compute_s = measure({}, spec, own, alone, own, rounds, folder)
        settings = []
        for number, change in enumerate(changes, 1):
            progress(" ".join(override_words(change)), number, total)
            settings.append(measure_change(change, spec, own, alone, rounds, folder / str(number)))
        together = None
        if chosen := best_of_each_key(settings):
            progress("together", total - 1, total)
            together = measure_change(chosen, spec, own, alone, 2 * rounds, folder / "together")
        backend = str(dist.get_backend(own.trainer.dp_group))
        rank_zero = own.trainer.is_rank_zero
        dist.barrier()
    if not rank_zero:
        return None
    ranks = spec.parallel.world
    return OverlapStudy(
        spec, ranks, rounds, device_name(device), backend, compute_s, baseline, settings, together, not_measured
    )


def measure_change(
    change: dict[str, Any], spec: RunSpec, own: TimedTrainer, alone: TimedTrainer, rounds: int, folder: Path
) -> Setting:
    changed = spec.replace(parallel=spec.parallel.replace(**change))
    setting, _ = measure(change, changed, TimedTrainer(changed, folder / "run"), alone, own, rounds, folder)
    gc.collect()
    return setting


def measure(
    change: dict[str, Any],
    spec: RunSpec,
    mine: TimedTrainer,
    alone: TimedTrainer,
    own: TimedTrainer,
    rounds: int,
    folder: Path,
) -> tuple[Setting, float]:
    """A setting in turns with the spec's `own` and with passes `alone`; and the seconds of the latter."""
    several = list(dict.fromkeys([own, alone, mine]))
    for one in several:
        one.restart_clock()
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            for one in several:
                one.restart_clock()
        first = number % len(several)  # none always follows the same one
        for one in several[first:] + several[:first]:
            one.step()
    (base, _), (_, compute), (steps, passes) = own.slowest(), alone.slowest(), mine.slowest()
    exposed, hidden = mine.traced(folder / "traces")
    gains = [1 - step / before for step, before in zip(steps, base, strict=True)]
    cost = [with_ - without for with_, without in zip(passes, compute, strict=True)]
    name = " ".join(override_words(change)) or SPEC
    planned = round(float(memory(spec, rank=0).total))
    return (
        Setting(name, change, median(steps), Spread.of(gains), Spread.of(cost), exposed, hidden, planned),
        median(compute),
    )


def best_of_each_key(settings: Sequence[Setting]) -> dict[str, Any]:
    """The overrides that pay, the best of each key."""
    chosen: dict[str, Setting] = {}
    for one in settings:
        (key,) = one.overrides
        if one.pays and (key not in chosen or one.gain.median > chosen[key].gain.median):
            chosen[key] = one
    return {key: one.overrides[key] for key, one in chosen.items()}
