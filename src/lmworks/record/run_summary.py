"""Summary of a run: the same numbers in the report, in the list of runs and in a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from . import RunFolder, read_metrics

Steps = Sequence[dict[str, Any]]
ENDINGS = {"finish": "finished", "interrupt": "interrupted", "fail": "failed"}


@dataclass(frozen=True)
class Summary:
    """None is "not known". Medians and sums are over the steps that count: each once, its last attempt."""

    name: str
    path: str
    status: str  # new, running, finished, interrupted, failed
    started: str  # ISO 8601, UTC
    params: int
    steps: int
    total_steps: int
    loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    best_val_step: int | None
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
    evaluated = [step for step in steps if step.get("val_loss") is not None]
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
        tokens=sum(column(steps, "tokens")),
        tokens_per_s=median(steps, "tokens_per_s"),
        step_s=median(steps, "step_s"),
        mfu=median(steps, "mfu"),
        memory_bytes=max(column(steps, "memory_bytes"), default=None),
        train_s=sum(column(steps, "step_s")),
        wall_s=wall_seconds(events),
        attempts=folder.next_attempt(),
    )


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
