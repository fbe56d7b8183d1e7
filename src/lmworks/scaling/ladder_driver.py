"""Runs a ladder as a sweep: trunks pause where others branch off them, and the holdout is predicted before it starts.

All that it knows is in the folder of the sweep, so that a driver that was killed goes on where it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..spec import LMWorksError, RunSpec, SpecError
from ..spec.files import read_json_object, write_whole
from ..sweep.folder import Sweep, Trial
from .fitting import fit_law
from .ladder import Ladder, LadderRun, models, runs_of_shape
from .points import read_points

LARGER = 4.0  # times the ladder's largest size: an optimum beyond is taken there, one below at its smallest
PREDICTION = "holdout.json"  # in the sweep: what was predicted of the last run, written before it started


@dataclass
class LadderDriver:
    sweep: Sweep
    runs: Sequence[LadderRun]

    def __post_init__(self) -> None:
        self.branches: dict[int, list[LadderRun]] = {}
        for run in self.runs:
            if run.parent is not None:
                self.branches.setdefault(run.parent, []).append(run)
        for branches in self.branches.values():
            branches.sort(key=lambda run: run.fork)

    def start(self) -> None:
        """Queue all runs that begin by themselves. Those that exist already stay as they are."""
        for run in self.runs:
            if run.parent is None:
                self.propose(run, until=self.next_fork(run.number, 0))

    def propose(self, run: LadderRun, **more: Any) -> None:
        self.sweep.propose(run.overrides, number=run.number, notes={"label": run.label}, **more)

    def next_fork(self, trunk: int, after: int) -> int | None:
        return next((run.fork for run in self.branches.get(trunk, ()) if run.fork > after), None)

    def advance(self, trials: Sequence[Trial]) -> bool:
        """Let runs branch off trunks that have paused for them. True when nothing is left to run."""
        paused = [trial for trial in trials if trial.state == "paused"]
        for trial in paused:
            for run in self.branches.get(trial.number, ()):
                if run.fork == trial.step:
                    self.propose(run, parent=(trial.number, trial.step))
            self.sweep.run_until(trial.number, self.next_fork(trial.number, trial.step))
        return not paused and all(trial.settled for trial in trials)

    def start_holdout(self, ladder: Ladder, spec: RunSpec, tokens: int) -> Prediction:
        """Queue it, once its prediction is written: by an earlier driver, or now by the runs that have finished."""
        found = Prediction.read(self.sweep)
        if found is None:
            found = predict_holdout(self.sweep, ladder, spec, tokens, len(self.runs))
            found.write(self.sweep)
        self.sweep.propose(found.overrides, number=found.number, notes={"label": "holdout"})
        return found


# --- the holdout -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Of the holdout's loss, by a fit of the other runs."""

    number: int
    overrides: dict[str, Any]
    n: int
    n_no_embed: int
    d: int
    flops: float
    law: str
    params: dict[str, float]
    points: int
    loss: float
    low: float | None  # of one more run; None where too few runs are independent
    high: float | None
    level: float

    def write(self, sweep: Sweep) -> None:
        write_whole(sweep.path / PREDICTION, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, sweep: Sweep) -> Prediction | None:
        path = sweep.path / PREDICTION
        return cls(**read_json_object(path, LMWorksError)) if path.exists() else None


def predict_holdout(sweep: Sweep, ladder: Ladder, spec: RunSpec, tokens: int, number: int) -> Prediction:
    """The run that the ladder's own law chooses for the budget (or of the size that is asked for), and its loss.

    An optimum that would see the text, of so many `tokens`, more than max_epochs times is replaced by a larger model.
    """
    assert ladder.holdout is not None
    points = read_points(sweep.path, convention=ladder.count)
    fit = fit_law(points, "chinchilla")
    optimum = float(fit.fitted.optimum(ladder.holdout.flops)["n"])
    params = ladder.holdout.params or min(max(optimum, min(ladder.params)), LARGER * max(ladder.params))
    run = holdout_run(ladder, spec, params)
    while run.d > ladder.max_epochs * tokens:
        params *= 1.1
        run = holdout_run(ladder, spec, params)
    size = run.n if ladder.count == "total" else run.n_no_embed
    found = fit.fitted.predict(n=size, d=run.d)
    low, high = found.get("run_interval") or (None, None)
    return Prediction(
        number, dict(run.overrides), run.n, run.n_no_embed, run.d, run.flops, "chinchilla", fit.fitted.params,
        len(points), found["loss"], low, high, fit.fitted.level,
    )  # fmt: skip


def holdout_run(ladder: Ladder, spec: RunSpec, params: float) -> LadderRun:
    assert ladder.holdout is not None
    flops = ladder.holdout.flops
    seq = max(ladder.seq or (spec.data.seq,))
    alone = replace(
        ladder, params=(params,), flops=(flops,), tokens=(), seq=(seq,), tokens_per_param=(0.0, math.inf),
    )  # fmt: skip
    (model,) = models(alone, spec.model, seq)
    (run,) = runs_of_shape(alone, spec, model, seq)
    return run


# --- checks before anything runs -------------------------------------------------------------------------


def check_epochs(ladder: Ladder, runs: Sequence[LadderRun], tokens: int, where: str) -> None:
    """Refuse runs that would see the same text more than ladder.max_epochs times."""
    worst = max(runs, key=lambda run: run.d)
    if worst.d > ladder.max_epochs * tokens:
        raise SpecError(
            f"{where} has {tokens:,} tokens: a run of {worst.d:,} would see them {worst.d / tokens:.1f} times; "
            f"max_epochs = {ladder.max_epochs:g}. Take more text, smaller budgets, or larger sizes only"
        )


def ladder_base(path: Path, ladder: Ladder) -> str:
    """The spec that the ladder names: a file beside it, or a preset."""
    beside = path.parent / ladder.spec
    return str(beside) if beside.exists() else ladder.spec
