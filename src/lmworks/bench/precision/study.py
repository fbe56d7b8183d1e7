"""The precision study: one real run per variant, one after another, the results from their folders, and the verdict on
each precision from the figures of its run. The thresholds are also in the report.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ...parallel.preflight import check_fits_memory, check_gpu_available
from ...plan.memory.peak_memory import Row
from ...plan.memory.sheet import memory
from ...record import RunFolder, read_metrics
from ...report.html_page import check_output_folder
from ...spec import RunSpec, SpecError, TrainingError, dump_toml
from ...spec.errors import STOPPED
from ...spec.files import with_absolute_paths, write_whole
from ...train.device import pick_device
from .single_run import INSPECTION_FILE
from .variants import BASE, SEED, Variant, inspected_steps, select_variants, variant_spec

Steps = Sequence[dict[str, Any]]

LOST_UPDATES = 0.05  # share of the update rounded away, from which it is reported
FLUSHED = 0.01  # share of gradient elements flushed to zero, from which it is reported
THRESHOLDS = (
    "The gap is the mean over the evaluations of the run's second half of the loss on held-out data less fp32's; the "
    "noise is the root mean square of the same difference between two seeds of fp32. A gap of at most the noise is "
    f"'as fp32 within the noise'. Lost updates are reported above {LOST_UPDATES:.0%} of the update, gradients flushed "
    f"to zero above {FLUSHED:.0%} of their elements, both at the worst inspected step; all overflows are reported."
)


@dataclass(frozen=True)
class RunMetrics:
    """None: not measured, or the run ended before."""

    loss: float | None  # of training, the mean over the last tenth of the steps
    loss_gap: float | None  # to fp32's, over the same steps and batches
    val_loss: float | None  # at the last evaluation
    gap: float | None  # of the loss on held-out data, see THRESHOLDS
    norm: float | None  # of the gradient, the median
    norm_ratio: float | None  # to fp32's, the median over steps
    flushed: float | None  # share of gradient elements that are 0 and in fp32 are not, worst inspected step
    nonfinite: float | None  # share that is infinite or NaN, worst inspected step
    gradient_error: float | None  # ‖g − g of fp32‖ / ‖g of fp32‖, the median over inspected steps
    unmoved: float | None  # share of weights that should have moved and did not, worst inspected step
    kept: float | None  # of the update, worst inspected step


def run_metrics(steps: Steps, looked: Steps, base: Steps, error: str) -> RunMetrics:
    gradients = [totals(line["gradients"]) for line in looked if line.get("gradients")]
    updates = [line["update"] for line in looked if line.get("update")]
    losses, theirs = by_step(steps, "loss"), by_step(base, "loss")
    last = sorted(losses)[-max(1, len(base) // 10) :] if losses and not error else []
    norms, their_norms = by_step(steps, "grad_norm"), by_step(base, "grad_norm")
    ratios = [norm / their_norms[step] for step, norm in norms.items() if their_norms.get(step)]
    evaluated = by_step(steps, "val_loss")
    return RunMetrics(
        loss=mean([losses[step] for step in last]),
        loss_gap=mean([losses[step] - theirs[step] for step in last if step in theirs]),
        val_loss=evaluated[max(evaluated)] if evaluated else None,
        gap=mean(differences(steps, base)),
        norm=median(norms.values()) if norms else None,
        norm_ratio=median(ratios) if ratios else None,
        flushed=max((one[1] / one[0] for one in gradients), default=None),
        nonfinite=max((one[2] / one[0] for one in gradients), default=None),
        gradient_error=median(math.sqrt(one[3] / one[4]) for one in gradients) if gradients else None,
        unmoved=max((one["unmoved"] for one in updates), default=None),
        kept=min((one["kept"] for one in updates), default=None),
    )


def seed_noise(base: Steps, seed: Steps) -> float | None:
    off = differences(seed, base)
    return math.sqrt(sum(one * one for one in off) / len(off)) if off else None


def differences(steps: Steps, base: Steps) -> list[float]:
    """Differences of validation losses, at the evaluations of the second half that both runs reached."""
    own, theirs = by_step(steps, "val_loss"), by_step(base, "val_loss")
    half = max(theirs, default=0) / 2
    return [own[step] - theirs[step] for step in sorted(own.keys() & theirs.keys()) if step > half]


def by_step(steps: Steps, key: str) -> dict[int, float]:
    return {step["step"]: step[key] for step in steps if step.get(key) is not None}


def totals(parts: dict[str, list[float]]) -> list[float]:
    return [sum(column) for column in zip(*parts.values(), strict=True)]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --- text -----------------------------------------------------------------------------------------------


def verdict(variant: Variant, found: RunMetrics, noise: float | None, error: str, overflows: Sequence[int]) -> str:
    if error:
        return f"failed: {error}"
    if variant == BASE:
        return "the baseline"
    if variant == SEED:
        return "the noise" if noise is None else f"the noise: {noise:.4f}"
    return "; ".join([by_loss(found.gap, noise), *side_effects(found, overflows)])


def by_loss(gap: float | None, noise: float | None) -> str:
    if gap is None or noise is None:
        return "no fp32 baseline"
    if abs(gap) <= noise:
        return f"as fp32 within the noise (gap {gap:+.4f})"
    times = f"{abs(gap) / noise:.1f} × the noise" if noise else "without any noise"
    return f"{'worse' if gap > 0 else 'better'} than fp32 by {abs(gap):.4f}, {times}"


def side_effects(found: RunMetrics, overflows: Sequence[int]) -> list[str]:
    """Lost updates, flushed gradients and overflows."""
    effects = []
    if found.kept is not None and 1 - found.kept > LOST_UPDATES:
        effects.append(
            f"lost updates: {1 - found.kept:.0%} rounded away, {found.unmoved:.0%} of the weights did not change"
        )
    if found.flushed is not None and found.flushed > FLUSHED:
        effects.append(f"{found.flushed:.1%} of the gradient's elements became 0")
    if overflows:
        effects.append(f"{len(overflows)} steps skipped by overflow, the last at {overflows[-1]}")
    return effects


# --- study -----------------------------------------------------------------------------------------------


PROGRAM = ("-m", "lmworks.bench.precision.single_run")


@dataclass(frozen=True)
class Training:
    """The records of one run."""

    variant: Variant
    spec: RunSpec
    error: str = ""  # why it did not finish
    facts: dict[str, Any] = field(default_factory=dict)  # NAME.json
    steps: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl
    looked: list[dict[str, Any]] = field(default_factory=list)  # looked.jsonl
    overflows: list[int] = field(default_factory=list)  # steps skipped by loss scale overflow

    def curve(self, key: str) -> list[tuple[float, float]]:
        return [(step["step"], step[key]) for step in self.steps if step.get(key) is not None]

    @property
    def memory(self) -> int | None:
        """Peak before the first inspected step: inspections need memory too."""
        first = inspected_steps(self.spec.optim.steps)[0]
        return max((step["memory_bytes"] for step in self.steps if step["step"] < first), default=None)

    @property
    def tokens_per_s(self) -> float | None:
        return median(speeds) if (speeds := [value for _, value in self.curve("tokens_per_s")]) else None

    @property
    def speed(self) -> float | None:
        """Relative to fp32: the median over interleaved rounds. None for an emulated format."""
        seconds = self.facts.get("seconds") or {}
        if self.variant == BASE:
            return 1.0
        if self.facts.get("emulated") or not seconds:
            return None
        return median(base / own for base, own in zip(seconds[BASE.name], seconds[self.variant.name], strict=True))


@dataclass(frozen=True)
class Outcome:
    training: Training
    metrics: RunMetrics
    verdict: str

    @property
    def name(self) -> str:
        return self.training.variant.name


@dataclass(frozen=True)
class Study:
    spec: RunSpec
    folder: Path
    noise: float | None  # of the loss, between two seeds of fp32
    outcomes: list[Outcome]

    def __getitem__(self, name: str) -> Outcome:
        return next(one for one in self.outcomes if one.name == name)

    @property
    def device(self) -> str:
        found = [one.training.facts["device"] for one in self.outcomes if "device" in one.training.facts]
        return found[0] if found else "an unknown device"

    def to_dict(self) -> dict[str, Any]:
        facts = {"device": self.device, "folder": str(self.folder), "noise": self.noise, "spec": self.spec.to_dict()}
        return {**facts, "precisions": [row(one) for one in self.outcomes]}


def row(outcome: Outcome) -> dict[str, Any]:
    """For JSON: the figures and the curves behind them."""
    training = outcome.training
    keys = ("loss", "val_loss", "grad_norm", "loss_scale")
    return {
        "name": outcome.name,
        "what": training.variant.what,
        "run": training.spec.name,
        "verdict": outcome.verdict,
        "error": training.error,
        **asdict(outcome.metrics),
        "tokens_per_s": training.tokens_per_s,
        "speed": training.speed,
        "memory_bytes": training.memory,
        "overflows": training.overflows,
        "facts": training.facts,
        "curves": {key: training.curve(key) for key in keys if training.curve(key)},
        "looked": training.looked,
    }


# --- the runs -------------------------------------------------------------------------------------------


def study(
    spec: RunSpec,
    folder: Path,
    names: Iterable[str] = (),
    report_progress: Callable[[str], None] = lambda _: None,
    force: bool = False,
) -> Study:
    """Train each of `names` (none: all) under `folder`. Finished runs are not repeated.

    `force`: skip the check of memory.
    """
    variants = select_variants(names)
    specs = {variant: variant_spec(spec, variant) for variant in variants}
    check_gpu_available(spec.cluster)
    if not force:
        check_memory(specs[BASE])
    for variant, one in specs.items():
        check_same_spec(folder / variant.name, one)
    check_output_folder(folder)
    for number, (variant, one) in enumerate(specs.items(), 1):
        head = f"{variant.name} ({number} of {len(variants)})"
        if finished(folder, variant.name):
            report_progress(f"{head}: finished before")
            continue
        report_progress(f"{head}: {variant.what}")
        write_whole(folder / f"{variant.name}.toml", dump_toml(with_absolute_paths(one).to_dict()))
        train_in_subprocess(folder, variant.name, force)
    return evaluate(spec, folder, [read(folder, variant, one) for variant, one in specs.items()])


def check_memory(base: RunSpec) -> None:
    """Interleaved steps hold a variant and fp32, the largest, in one process. (Each run checks its GPU itself.)"""

    def beside(changed: RunSpec, rank: int) -> list[Row]:
        return [Row("another precision", memory(changed, rank=rank).total, "whose steps are interleaved with it")]

    check_fits_memory(base, pick_device(base.cluster), starting=True, beside=beside, own_layout=False)


def check_same_spec(folder: Path, spec: RunSpec) -> None:
    """An existing run is resumed only if its spec is the same."""
    run = RunFolder(folder)
    if run.spec_path.exists() and run.spec() != with_absolute_paths(spec):
        raise SpecError(f"{folder} holds a run of another spec: give --out a new folder, or remove that one")


def finished(folder: Path, name: str) -> bool:
    return "error" not in result_of(folder, name, {"error": ""})


def result_of(folder: Path, name: str, otherwise: dict[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing or truncated: train again
        return otherwise
    return found if isinstance(found, dict) else otherwise


def train_in_subprocess(folder: Path, name: str, force: bool = False) -> None:
    """Train in a subprocess, which resumes where it was stopped and prints to stderr only."""
    (folder / f"{name}.json").unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, *PROGRAM, str(folder), name, *(["--force"] if force else [])], stdout=2)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal also sent it to the subprocess, which saves and exits
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.kill()
            process.wait()
    if code in STOPPED:
        raise Stopped(code)
    if not (folder / f"{name}.json").exists():
        write_whole(folder / f"{name}.json", json.dumps({"error": f"its process ended with exit code {code}"}))


class Stopped(TrainingError):
    def __init__(self, code: int) -> None:
        super().__init__("stopped; the same command continues where it stopped")
        self.exit_code = code


# --- results of the runs -------------------------------------------------------------------------------------


def read(folder: Path, variant: Variant, spec: RunSpec) -> Training:
    run, facts = RunFolder(folder / variant.name), result_of(folder, variant.name, {})
    overflows = [event["step"] for event in run.events() if event["kind"] == "overflow"]
    return Training(
        variant=variant,
        spec=spec,
        error=facts.get("error", ""),
        facts=facts,
        steps=read_metrics(run.metrics_path),
        looked=read_metrics(run.path / INSPECTION_FILE),
        overflows=sorted(set(overflows)),  # steps repeated after a stop occur twice
    )


def evaluate(spec: RunSpec, folder: Path, trainings: list[Training]) -> Study:
    found = {training.variant: training for training in trainings}
    base, noise = found[BASE], seed_noise(found[BASE].steps, found[SEED].steps)
    outcomes = []
    for training in trainings:
        numbers = run_metrics(training.steps, training.looked, base.steps, training.error)
        text = verdict(training.variant, numbers, noise, training.error, training.overflows)
        outcomes.append(Outcome(training, numbers, text))
    return Study(spec, folder, noise, outcomes)
