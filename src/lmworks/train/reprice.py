"""Prices a run again after its first steps, and keeps that beside what was predicted before them (prediction.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ..plan.reprice import STEPS, WARM_UP, Progress, SecondPrice, second_price
from ..record import RunFolder, read_metrics
from ..record.formatting import clock, duration
from ..spec import RunSpec
from ..spec.files import write_whole
from .watch import Watchdog

MIN_SAMPLES = 20  # of the watchdog, for a share of time that is worth something


@dataclass
class Repricer:
    """`add` after every step of an attempt, on rank 0; once, after STEPS of them, there is a second price."""

    whole: RunSpec  # all stages
    folder: RunFolder
    attempt: int
    evaluation_passes: int
    watchdog: Watchdog | None = None  # with more than one rank
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    sampled: tuple[int, int] = (0, 0)  # when the warm-up ended

    def add(self, step: int, values: Mapping[str, Any]) -> str:
        """`values`: the line of metrics.jsonl. Returns the second price as a line, once."""
        if self.whole.align.online or len(self.steps) == STEPS:  # steps of a round are not alike
            return ""
        self.steps.append(values)
        if len(self.steps) == WARM_UP and self.watchdog is not None:
            self.sampled = self.watchdog.sampled, self.watchdog.waited
        if len(self.steps) < STEPS:
            return ""
        lines = read_metrics(self.folder.metrics_path) if self.attempt else self.steps
        taken_s = sum(float(line["step_s"]) for line in lines)
        now = Progress(step, taken_s, self.waiting_share(), self.evaluation_passes)
        predicted = self.read()
        found = second_price(self.whole, predicted, self.steps[WARM_UP:], now)
        ends = datetime.now(UTC) + timedelta(seconds=found.run_s - taken_s + found.evaluations_s)
        self.write(predicted, found, step, ends)
        return describe(predicted, found, ends)

    def waiting_share(self) -> float | None:
        if self.watchdog is None:
            return 0.0
        sampled, waited = self.watchdog.sampled - self.sampled[0], self.watchdog.waited - self.sampled[1]
        return waited / sampled if sampled >= MIN_SAMPLES else None

    def read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            found = json.loads(self.folder.prediction_path.read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    def write(self, predicted: dict[str, Any], found: SecondPrice, step: int, ends: datetime) -> None:
        entry = {"attempt": self.attempt, "step": step, "steps": STEPS - WARM_UP, **found.to_dict()}
        entry |= {"ends": ends.isoformat(timespec="seconds")}
        again = [*predicted.get("after_steps", []), entry]
        with suppress(OSError):  # a full disk: the next checkpoint says so
            write_whole(self.folder.prediction_path, json.dumps({**predicted, "after_steps": again}, indent=2))


def describe(predicted: Mapping[str, Any], found: SecondPrice, ends: datetime) -> str:
    before = predicted.get("step_s")
    said = f", {duration(before)} predicted before" if isinstance(before, float) else ""
    waits = f", {duration(found.communication_s)} for other ranks" if found.communication_s else ""
    cost = f", ${found.dollars:,.2f}" if found.dollars else ""
    return (
        f"after {STEPS} steps: {duration(found.step_s)} a step{said}; of it {duration(found.data_s)} waiting for data"
        f"{waits}; all steps take {clock(found.run_s)}{cost}, to {ends:%Y-%m-%d %H:%M} UTC"
    )
