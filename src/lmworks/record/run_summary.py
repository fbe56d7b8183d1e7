"""The summary of a run, with the same numbers in reports, lists and comparisons; runs found, listed and compared."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..spec import LMWorksError, SpecError
from . import RunFolder, read_metrics

Steps = Sequence[dict[str, Any]]
VAL_REWARD = "val_reward/mean"
ENDINGS = {"finish": "finished", "interrupt": "interrupted", "pause": "paused", "fail": "failed"}


@dataclass(frozen=True)
class Summary:
    """None is "not known". Medians and sums are over the steps that count: each once, its last attempt."""

    name: str
    path: str
    status: str  # new, running, finished, interrupted, paused, failed
    started: str  # ISO 8601, UTC
    params: int
    steps: int
    total_steps: int
    loss: float | None
    val_loss: float | None  # None where rewards are measured
    best_val_loss: float | None
    best_val_step: int | None
    reward: float | None  # mean of the last round
    val_reward: float | None  # of answers to held-out prompts, at the last evaluation
    tokens: int
    tokens_per_s: float | None
    step_s: float | None
    mfu: float | None
    memory_bytes: int | None
    train_s: float  # inside steps
    wall_s: float | None  # from start to end by the events, pauses between attempts left out
    attempts: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(folder: RunFolder) -> Summary:
    spec, steps, events = folder.spec(), read_metrics(folder.metrics_path), folder.events()
    evaluated = [] if measures_reward(steps) else [step for step in steps if step.get("val_loss") is not None]
    reward, val_reward = (next(iter(reversed(column(steps, key))), None) for key in ("reward/mean", VAL_REWARD))
    best = min(evaluated, key=lambda step: step["val_loss"], default=None)
    return Summary(
        name=spec.name,
        path=str(folder.path),
        status=status(folder, events, bool(steps)),
        started=events[0]["time"] if events else file_time(folder),
        params=spec.model.params,
        steps=steps[-1]["step"] if steps else 0,
        total_steps=spec.optim.steps,
        loss=steps[-1].get("loss") if steps else None,
        val_loss=evaluated[-1]["val_loss"] if evaluated else None,
        best_val_loss=best["val_loss"] if best else None,
        best_val_step=best["step"] if best else None,
        reward=reward,
        val_reward=val_reward,
        tokens=sum(column(steps, "tokens")),
        tokens_per_s=median(steps, "tokens_per_s"),
        step_s=median(steps, "step_s"),
        mfu=median(steps, "mfu"),
        memory_bytes=max(column(steps, "memory_bytes"), default=None),
        train_s=sum(column(steps, "step_s")),
        wall_s=wall_seconds(events),
        attempts=folder.next_attempt(),
    )


def measures_reward(steps: Steps) -> bool:
    """Whether evaluations measure the reward of held-out prompts: its negative is then val_loss."""
    return any(VAL_REWARD in step for step in steps)


def column(steps: Steps, key: str) -> list[Any]:
    """The values of one key, the steps without one left out."""
    return [step[key] for step in steps if step.get(key) is not None]


def median(steps: Steps, key: str) -> float | None:
    """Robust against the first steps, which compile and fill caches."""
    values = column(steps, key)
    return statistics.median(values) if values else None


def status(folder: RunFolder, events: Steps, has_steps: bool) -> str:
    """Of the latest attempt. A killed process writes no event, but its lock is gone."""
    if folder.is_locked():
        return "running"
    last = next((e["kind"] for e in reversed(events) if e["kind"] in ("start", "resume", *ENDINGS)), None)
    if last is None and not has_steps:
        return "new"
    return ENDINGS.get(last or "", "interrupted")


def wall_seconds(events: Steps) -> float | None:
    """Time between events, without the time before a (re)start in which no process ran."""
    if len(events) < 2:
        return None
    times = [datetime.fromisoformat(event["time"]) for event in events]
    spans = zip(times, times[1:], events[1:], strict=False)
    return sum((end - begin).total_seconds() for begin, end, event in spans if event["kind"] not in ("start", "resume"))


def file_time(folder: RunFolder) -> str:
    return datetime.fromtimestamp(folder.spec_path.stat().st_mtime, UTC).isoformat(timespec="milliseconds")


# --- find, list, compare ---------------------------------------------------------------------------------


RUNS_DIR = Path("runs")  # the default folder of `lmworks train`


def find_runs(roots: Sequence[Path]) -> list[RunFolder]:
    """The run folders at or below each place. The default place may be missing: then there are no runs yet."""
    for root in roots:
        if not root.is_dir():
            raise SpecError(f"no runs at {root}: " + ("it is a file" if root.exists() else "it does not exist"))
    return [run for root in roots or ([RUNS_DIR] if RUNS_DIR.is_dir() else []) for run in walk(root)]


def walk(root: Path) -> Iterator[RunFolder]:
    for path, below, files in os.walk(root):
        if "spec.toml" in files:
            below.clear()  # runs are not nested; skip checkpoints
            yield RunFolder(Path(path))
        below.sort()


def locate(run: Path) -> RunFolder:
    """A run by its folder, or by its name below runs/."""
    return RunFolder.open(RUNS_DIR / run if not run.exists() and (RUNS_DIR / run).exists() else run)


def list_runs(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """A summary of each, newest first. An unreadable run is listed with its error."""
    rows = []
    for folder in folders:
        try:
            rows.append(summarize(folder).to_dict())
        except LMWorksError as error:
            row = {"name": folder.path.name, "path": str(folder.path), "status": "unreadable", "error": str(error)}
            rows.append(row)
    return sorted(rows, key=lambda row: row.get("started", ""), reverse=True)


def compare_runs(folders: Sequence[RunFolder]) -> dict[str, Any]:
    """`runs`: summaries in the given order; `differs`: spec keys with different values."""
    specs = [dict(flatten(folder.spec().to_dict())) for folder in folders]
    keys = list(dict.fromkeys(key for spec in specs for key in spec if key != "name"))
    columns = {key: [spec.get(key) for spec in specs] for key in keys}
    return {
        "runs": [summarize(folder).to_dict() for folder in folders],
        "differs": {key: values for key, values in columns.items() if any(value != values[0] for value in values)},
    }


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys, as in overrides."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
