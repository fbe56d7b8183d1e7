"""The precision study: one real run per variant, one after another, and the results from their folders."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ...parallel.memory_preflight import refuse_missing_gpu, refuse_oversized
from ...plan.memory.peak_memory import Row
from ...plan.memory.sheet import memory
from ...record import RunFolder, read_metrics
from ...report.sections import check_output_folder
from ...spec import RunSpec, SpecError, TrainingError, dump_toml
from ...spec.errors import STOPPED
from ...spec.files import write_whole
from ...spec.paths import with_absolute_paths
from ...train.device import pick_device
from .instrumented_run import INSPECTION_FILE
from .variants import BASE, SEED, Variant, inspected_steps, select_variants, variant_spec
from .verdict import RunMetrics, run_metrics, seed_noise, verdict

PROGRAM = ("-m", "lmworks.bench.precision")


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
        return found[0] if found else "a device that ran none of them"

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
    refuse_missing_gpu(spec.cluster)
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

    refuse_oversized(base, pick_device(base.cluster), starting=True, beside=beside, own_layout=False)


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


# --- what they left -------------------------------------------------------------------------------------


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
        said = verdict(training.variant, numbers, noise, training.error, training.overflows)
        outcomes.append(Outcome(training, numbers, said))
    return Study(spec, folder, noise, outcomes)
