"""Trials whose losses are a formula of their overrides: sweeps of tuning without a process."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmworks.sweep.folder import Sweep, Trial, base_of
from lmworks.sweep.space import Point, Space
from lmworks.tune.driver import Driver
from lmworks.tune.stoppers import stopper_of
from lmworks.tune.suggest import Suggestions

SPACE = Space.of({"optim.lr": {"range": [1e-4, 1.0], "log": True}, "optim.clip": {"range": [0.1, 2.0]}})
STEPS = 90


class Killed(Exception):
    pass


class FormulaWorkers:
    """Runs a queued trial at once. `kill_after`: trials run before the driver is killed."""

    def __init__(self, sweep: Sweep, kill_after: float = math.inf, every: int = 0) -> None:
        """`every`: evaluations; by default at steps 10, 30 and 90."""
        self.sweep, self.count, self.left, self.every = sweep, 1, kill_after, every
        self.ran: list[tuple[int, int]] = []

    def wait_any(self, numbers: Sequence[int], on_poll: object = None) -> Trial:
        number = numbers[0]
        trial = self.sweep.trial(number)
        assert trial.state == "queued"
        if self.left <= 0:
            raise Killed
        self.left -= 1
        until = trial.until or STEPS
        with self.sweep.folder(number).metrics_path.open("a") as file:
            for step in range(trial.step + 1, until + 1):
                line: dict[str, Any] = {"step": step, "attempt": 0, "loss": 1.0, "step_s": 0.1, "tokens": 8}
                if step in (10, 30, 90) or (self.every and step % self.every == 0):
                    line["val_loss"] = self.loss(trial.overrides, step)
                file.write(json.dumps(line) + "\n")
        self.ran.append((number, until))
        state = "finished" if until == STEPS else "paused"
        with self.sweep.claimed(number):
            self.sweep.write(replace(trial, step=until, state=state))
        return self.sweep.trial(number)

    def loss(self, point: Point, step: int) -> float:
        return formula(point, step)


def formula(point: Point, step: int) -> float:
    """Lowest at a learning rate of 0.01; above 0.1 it diverges."""
    lr = point["optim.lr"]
    return math.inf if lr > 0.1 else 2.0 + (math.log10(lr) + 2) ** 2 + 5.0 / step


def driver(folder: Path, stopper: str = "asha", trials: int = 12, algorithm: str = "tpe", **more: Any) -> Driver:
    folder.mkdir(parents=True, exist_ok=True)
    base = base_of("configs/tiny.toml", [f"optim.steps={STEPS}"])
    settings = {"algorithm": algorithm, "stopper": stopper}
    sweep = Sweep.create(folder / "s", base, SPACE, kind="tune", seed=1, settings=settings)
    journal, state = str(sweep.path / "optuna.journal"), sweep.path / "sampler.pickle"
    suggestions = Suggestions("s", SPACE, algorithm, 1, journal, state)
    return Driver(sweep, suggestions, stopper_of(stopper, trials, 10, STEPS, 3), trials, **more)
