"""How far a sweep is, and when it will be done.

The work of a trial is its steps times the seconds that the planner predicts for one (prediction.json of its run; for a
trial that has none yet, by its FLOPs beside those that have one). Predictions are right in proportion sooner than in
seconds, so the time that is left follows from the pace at which predicted seconds were worked off so far.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..plan.predict import step_flops
from .folder import Sweep, Trial
from .slots import Resources, missing_resources

TAIL_BYTES = 16_384  # of metrics.jsonl: its last lines
LEAST_SHARE = 0.02  # of the work, before which the pace says little


@dataclass(frozen=True)
class Row:
    """A trial as a list shows it."""

    trial: Trial
    state: str  # that of the trial, or running
    step: int
    total: int  # the step that it is to reach
    loss: float | None
    val_loss: float | None
    path: str

    def to_dict(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in ("state", "step", "loss", "val_loss", "path")}
        return {**asdict(self.trial), **shown}


@dataclass
class Progress:
    """Rows of all trials, and the time that is left; `update` is called every now and then."""

    sweep: Sweep
    workers: int
    resources: Resources | None = None  # of workers on this machine, which may have to wait for them

    def __post_init__(self) -> None:
        self.began: float | None = None  # since when trials run: workers take seconds to start
        self.ranks: dict[int, int] = {}
        self.flops: dict[int, float] = {}
        self.steps: dict[int, int] = {}
        self.predicted: dict[int, float] = {}
        self.at_start = 0.0  # work that was done before

    def update(self, trials: Sequence[Trial]) -> list[Row]:
        return [self.row(trial) for trial in trials]

    def row(self, trial: Trial) -> Row:
        folder = self.sweep.folder(trial.number)
        if trial.number not in self.flops:
            spec = self.sweep.spec(trial.overrides, trial.number)
            self.flops[trial.number], self.steps[trial.number] = step_flops(spec).hardware, spec.optim.steps
            self.ranks[trial.number] = spec.ranks
        running = not trial.settled and self.sweep.is_running(trial.number)
        result = trial.result or {}
        step, loss = trial.step, result.get("loss")
        if running and (line := last_line(folder.metrics_path)):
            step, loss = line["step"], line.get("loss")
        total = min(trial.until or self.steps[trial.number], self.steps[trial.number])
        state = "running" if running else trial.state
        return Row(trial, state, step, total, loss, result.get("val_loss"), str(folder.path))

    def waits_for(self, rows: Sequence[Row]) -> str:
        """Cores or GPUs that keep a worker from the smallest queued trial, and who has them."""
        queued = [self.ranks[row.trial.number] for row in rows if row.state == "queued"]
        if not self.resources or not queued or sum(row.state == "running" for row in rows) >= self.workers:
            return ""
        ranks = min(queued)
        gpus = ranks if self.resources.gpus else 0
        return missing_resources(self.resources, ranks * self.sweep.threads, gpus, self.sweep.path)

    # --- time -------------------------------------------------------------------------------------------

    def step_s(self, number: int) -> float | None:
        """Predicted seconds of a step; None before any trial has a prediction."""
        if number not in self.predicted:
            path = self.sweep.folder(number).prediction_path
            with suppress(OSError, ValueError, AttributeError):
                found = json.loads(path.read_text(encoding="utf-8")).get("step_s")
                if isinstance(found, float) and found > 0:
                    self.predicted[number] = found
        if number in self.predicted:
            return self.predicted[number]
        known = sum(self.flops[one] for one in self.predicted)
        return self.flops[number] * sum(self.predicted.values()) / known if known else None

    def eta_s(self, rows: Sequence[Row]) -> float | None:
        """Seconds until all trials are settled; None while nothing is known."""
        for row in rows:
            self.step_s(row.trial.number)  # predictions first: others are scaled by them
        each = {row.trial.number: self.step_s(row.trial.number) for row in rows}
        # Without a calibrated machine there is no prediction in seconds: FLOPs have the proportions.
        work_of = {number: self.flops[number] if step_s is None else step_s for number, step_s in each.items()}
        in_seconds = any(step_s is not None for step_s in each.values())
        done = sum(row.step * work_of[row.trial.number] for row in rows)
        left = [(row.total - row.step) * work_of[row.trial.number] for row in rows if not row.trial.settled]
        if self.began is None and any(row.state == "running" for row in rows):
            self.began, self.at_start = time.monotonic(), done
        worked = done - self.at_start
        if self.began is not None and worked > LEAST_SHARE * (sum(left) + done):
            pace = worked / (time.monotonic() - self.began)
            busy = max(1, sum(row.state == "running" for row in rows))
            # At the end the longest trial is alone.
            return max(sum(left) / pace, max(left, default=0.0) * busy / pace)
        return max(sum(left) / self.workers, max(left, default=0.0)) if in_seconds else None


def last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[:-1]):  # the last one ends with a line break, or is not whole
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("step"), int):
                return found
    return None


def best(rows: Sequence[Row]) -> Row | None:
    """The lowest held-out loss among finished trials."""
    ended = [row for row in rows if row.state == "finished" and row.val_loss is not None]
    return min(ended, key=lambda row: row.val_loss if row.val_loss is not None else float("inf"), default=None)


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """State → trials in it, in the order of a trial's life."""
    order = ("queued", "running", "paused", "finished", "failed", "stopped")
    return {state: count for state in order if (count := sum(row.state == state for row in rows))}
