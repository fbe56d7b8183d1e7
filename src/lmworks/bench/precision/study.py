"""The study: one real run for each precision, one after another, and what is read from their folders."""

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
from ...report.sections import open_folder
from ...spec import RunSpec, SpecError, TrainingError, dump_toml
from ...spec.errors import STOPPED
from ...spec.files import write_whole
from ...spec.paths import with_absolute_paths
from ...train.device import pick_device
from .instrumented_run import LOOKED
from .variants import BASE, SEED, PassCost, choose, spec_of, spots
from .verdict import Figures, figures, noise_of, verdict

PROGRAM = ("-m", "lmworks.bench.precision")


@dataclass(frozen=True)
class Training:
    """What one run left behind."""

    way: PassCost
    spec: RunSpec
    error: str = ""  # why it did not come to its end
    facts: dict[str, Any] = field(default_factory=dict)  # NAME.json
    steps: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl
    looked: list[dict[str, Any]] = field(default_factory=list)  # looked.jsonl
    overflows: list[int] = field(default_factory=list)  # steps left out because of the loss scale

    def curve(self, key: str) -> list[tuple[float, float]]:
        return [(step["step"], step[key]) for step in self.steps if step.get(key) is not None]

    @property
    def memory(self) -> int | None:
        """The highest before the first close look, which needs memory of its own."""
        first = spots(self.spec.optim.steps)[0]
        return max((step["memory_bytes"] for step in self.steps if step["step"] < first), default=None)

    @property
    def tokens_per_s(self) -> float | None:
        return median(speeds) if (speeds := [value for _, value in self.curve("tokens_per_s")]) else None

    @property
    def speed(self) -> float | None:
        """To fp32's: the median over rounds in which both took a step. An emulated format has none."""
        seconds = self.facts.get("seconds") or {}
        if self.way == BASE:
            return 1.0
        if self.facts.get("emulated") or not seconds:
            return None
        return median(base / own for base, own in zip(seconds[BASE.name], seconds[self.way.name], strict=True))


@dataclass(frozen=True)
class Outcome:
    training: Training
    figures: Figures
    verdict: str

    @property
    def name(self) -> str:
        return self.training.way.name


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
    """For programs: the figures, and the curves that they follow from."""
    training = outcome.training
    keys = ("loss", "val_loss", "grad_norm", "loss_scale")
    return {
        "name": outcome.name,
        "what": training.way.what,
        "run": training.spec.name,
        "verdict": outcome.verdict,
        "error": training.error,
        **asdict(outcome.figures),
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
    say: Callable[[str], None] = lambda _: None,
    force: bool = False,
) -> Study:
    """Train in each of `names` (none: all) under `folder`. What is finished there is not trained again.

    `force`: even where they do not fit into memory.
    """
    ways = choose(names)
    specs = {way: spec_of(spec, way) for way in ways}
    refuse_missing_gpu(spec.cluster)
    if not force:
        refuse_pair(specs[BASE])
    for way, one in specs.items():
        refuse_another(folder / way.name, one)
    open_folder(folder)
    for number, (way, one) in enumerate(specs.items(), 1):
        head = f"{way.name} ({number} of {len(ways)})"
        if finished(folder, way.name):
            say(f"{head}: finished before")
            continue
        say(f"{head}: {way.what}")
        write_whole(folder / f"{way.name}.toml", dump_toml(with_absolute_paths(one).to_dict()))
        train_apart(folder, way.name, force)
    return judge(spec, folder, [read(folder, way, one) for way, one in specs.items()])


def refuse_pair(base: RunSpec) -> None:
    """A precision takes steps in turns with fp32, which needs the most, in one process. (Each asks its GPU itself.)"""

    def beside(changed: RunSpec, rank: int) -> list[Row]:
        return [Row("another precision", memory(changed, rank=rank).total, "whose steps are taken in turns with it")]

    refuse_oversized(base, pick_device(base.cluster), starting=True, beside=beside, own_layout=False)


def refuse_another(folder: Path, spec: RunSpec) -> None:
    """A run that is there is gone on with only if it is the same one."""
    run = RunFolder(folder)
    if run.spec_path.exists() and run.spec() != with_absolute_paths(spec):
        raise SpecError(f"{folder} holds a run of another spec: give --out a new folder, or remove that one")


def finished(folder: Path, name: str) -> bool:
    return "error" not in result_of(folder, name, {"error": ""})


def result_of(folder: Path, name: str, otherwise: dict[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there yet, or cut off: trained on
        return otherwise
    return found if isinstance(found, dict) else otherwise


def train_apart(folder: Path, name: str, force: bool = False) -> None:
    """In a process of its own, which goes on where it was stopped, and talks on standard error alone."""
    (folder / f"{name}.json").unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, *PROGRAM, str(folder), name, *(["--force"] if force else [])], stdout=2)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:  # which the terminal sent to the training too: it saves, and ends
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
        super().__init__("stopped; the same command goes on where it stopped")
        self.exit_code = code


# --- what they left -------------------------------------------------------------------------------------


def read(folder: Path, way: PassCost, spec: RunSpec) -> Training:
    run, facts = RunFolder(folder / way.name), result_of(folder, way.name, {})
    overflows = [event["step"] for event in run.events() if event["kind"] == "overflow"]
    return Training(
        way=way,
        spec=spec,
        error=facts.get("error", ""),
        facts=facts,
        steps=read_metrics(run.metrics_path),
        looked=read_metrics(run.path / LOOKED),
        overflows=sorted(set(overflows)),  # a step that was repeated after a stop is there twice
    )


def judge(spec: RunSpec, folder: Path, trainings: list[Training]) -> Study:
    found = {training.way: training for training in trainings}
    base, noise = found[BASE], noise_of(found[BASE].steps, found[SEED].steps)
    outcomes = []
    for training in trainings:
        numbers = figures(training.steps, training.looked, base.steps, training.error)
        said = verdict(training.way, numbers, noise, training.error, training.overflows)
        outcomes.append(Outcome(training, numbers, said))
    return Study(spec, folder, noise, outcomes)
