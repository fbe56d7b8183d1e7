"""The driver of a tuning sweep: asks for points, starts trials, and judges each at its rungs.

What it knows is in the folder of the sweep (losses, states) and in Optuna's storage (suggestions), so a driver that was
killed goes on where it was. With one worker the same seed gives the same trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..spec.errors import LMWorksError, SpecError
from ..sweep.folder import ENDS, Sweep, Trial
from ..sweep.space import Point
from .constraints import Constraints
from .early_stop import reason_to_stop
from .stoppers import Results, Stopper
from .suggest import Suggestion, Suggestions

MOST_REFUSED = 100  # points in a row


OnPoll = Callable[[list[Trial]], None]


class WorkerPool(Protocol):
    count: int

    def wait_any(self, numbers: Sequence[int], on_poll: OnPoll | None = None) -> Trial: ...


@dataclass
class Driver:
    sweep: Sweep
    suggestions: Suggestions
    stopper: Stopper
    trials: int
    rules: Sequence[str] = ("divergence",)  # of early_stop
    constraints: Constraints = field(default_factory=Constraints)
    grid: bool = False  # its points are all there are
    results: Results = field(default_factory=Results)
    asked: dict[int, int] = field(default_factory=dict)  # our trial → Optuna's
    unused: list[Suggestion] = field(default_factory=list)  # of a driver that was killed

    @property
    def last(self) -> int:
        return self.stopper.rungs[-1]

    def run(self, workers: WorkerPool, on_poll: OnPoll | None = None) -> None:
        """Until nothing is left to start or to promote. `on_poll` sees the trials while they run."""
        self.read()
        while True:
            while len(self.results.running) < workers.count and self.start_next():
                pass
            if not self.results.running:
                return
            self.judge(workers.wait_any(sorted(self.results.running), on_poll))

    # --- what is known ----------------------------------------------------------------------------------

    def read(self) -> None:
        """From the folder, as an earlier driver left it."""
        self.results, self.asked = Results(), {}
        for trial in self.sweep.trials():
            self.asked[trial.number] = trial.notes["optuna"]
            self.results.running.add(trial.number)
        self.unused = self.suggestions.unused(self.asked.values())
        trials = [self.sweep.trial(number) for number in sorted(self.asked)]
        judged = [trial for trial in trials if trial.state in ENDS or trial.notes.get("judged") == trial.step]
        for trial in judged:
            self.take(trial)
        for trial in trials:
            if trial.state == "paused" and trial not in judged:
                self.judge(trial)

    def take(self, trial: Trial) -> None:
        """Its losses and its state."""
        self.results.running.discard(trial.number)
        for step, loss in losses_of(self.sweep, trial).items():
            self.results.report(trial.number, step, loss)
            if step in self.stopper.rungs and math.isfinite(loss):
                self.suggestions.report(self.asked[trial.number], step, loss)
        if trial.state == "finished":
            self.results.finished.add(trial.number)
            loss = self.results.losses.get(trial.number, {}).get(self.last, math.inf)
            if math.isfinite(loss):
                self.suggestions.finish(self.asked[trial.number], loss)
            else:
                self.suggestions.stop(self.asked[trial.number])
        elif trial.state in ("failed", "stopped"):
            self.results.stopped.add(trial.number)
            self.suggestions.stop(self.asked[trial.number])
        else:
            self.suggestions.pause(self.asked[trial.number])

    # --- decisions --------------------------------------------------------------------------------------

    def judge(self, trial: Trial) -> None:
        """Of a trial that has just paused or ended; that it was judged is kept, for a driver that comes after."""
        self.take(trial)
        if trial.state != "paused":
            return
        verdict, why = self.stopper.verdict(self.results, trial.number), "above the median"
        if reason := reason_to_stop(self.rules, self.results, trial.number, self.last):
            verdict, why = "stop", reason
        if verdict == "continue":
            self.resume(trial)
        elif verdict == "pause":
            self.write(trial, judged=trial.step)
        else:
            self.write(replace(trial, state="stopped"), stopped=why)
            self.results.stopped.add(trial.number)
            self.suggestions.stop(self.asked[trial.number])

    def write(self, trial: Trial, **notes: Any) -> None:
        with self.sweep.claimed(trial.number):
            self.sweep.write(replace(trial, notes={**trial.notes, **notes}))

    def resume(self, trial: Trial) -> None:
        until = self.until(self.stopper.next_rung(trial.number, self.results.latest(trial.number)))
        self.suggestions.pause(self.asked[trial.number], False)
        self.results.running.add(trial.number)
        self.sweep.run_until(trial.number, until)

    def until(self, rung: int) -> int | None:
        return None if rung == self.last else rung

    def start_next(self) -> bool:
        """A paused trial that is promoted, or a new one; false where there is neither."""
        left = self.trials - len(self.asked) if not (self.grid and self.suggestions.exhausted()) else 0
        promoted = self.stopper.promotion(self.results, all_started=left <= 0)
        if promoted is not None:
            self.resume(self.sweep.trial(promoted))
            return True
        return left > 0 and self.start_new()

    def start_new(self) -> bool:
        """False where a grid has no point left that may be started."""
        number = len(self.asked)
        suggestion = self.feasible(number)
        if suggestion is None:
            return False
        until = self.until(self.stopper.next_rung(number, 0))
        self.sweep.propose(suggestion.point, until, notes={"optuna": suggestion.number}, number=number)
        self.asked[number] = suggestion.number
        self.results.running.add(number)
        return True

    def feasible(self, number: int) -> Suggestion | None:
        """The next suggestion that is a valid spec and meets the constraints; None at the end of a grid."""
        why = ""
        for _ in range(MOST_REFUSED):
            if self.grid and not self.unused and self.suggestions.exhausted():
                if not self.asked:
                    raise LMWorksError(f"every point of the grid was refused, the last one because it {why}")
                return None
            suggestion = self.unused.pop(0) if self.unused else self.suggestions.ask()
            why = self.refusal(suggestion.point, number)
            if not why:
                return suggestion
            self.suggestions.refuse(suggestion.number, why)
        raise LMWorksError(f"{MOST_REFUSED} points in a row were refused, the last one because it {why}")

    def refusal(self, point: Point, number: int) -> str:
        try:
            spec = self.sweep.spec(point, number)
        except SpecError as error:
            return f"is no valid spec: {error}"
        return self.constraints.violation(spec) or ""


def losses_of(sweep: Sweep, trial: Trial) -> dict[int, float]:
    """Step → held-out loss at every evaluation; the training loss of its last step where nothing is held out. A trial
    that ended with a loss that is not finite has an infinite one."""
    lines = sweep.metrics(trial.number)
    found = {line["step"]: number_of(line["val_loss"]) for line in lines if line.get("val_loss") is not None}
    if lines and not found:
        found[lines[-1]["step"]] = number_of(lines[-1].get("loss"))
    if trial.parent and trial.parent["step"] not in found:
        found |= {step: loss for step, loss in parent_losses(sweep, trial).items() if step not in found}
    return found


def parent_losses(sweep: Sweep, trial: Trial) -> dict[int, float]:
    """Of the steps before it was forked."""
    assert trial.parent is not None
    before = losses_of(sweep, sweep.trial(trial.parent["trial"]))
    return {step: loss for step, loss in before.items() if step <= trial.parent["step"]}


def number_of(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.inf
