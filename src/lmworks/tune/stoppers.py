"""Stoppers: which trials go on after a rung. Plain arithmetic over the losses that trials have reported.

A driver asks `verdict` after each report, and `promotion` whenever a worker is free: the paused trial that goes on, or
None for a new one. Lower is better; a loss that is not finite ranks last.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

from .rungs import Bracket, halving, hyperband_brackets, hyperband_plan, rung_steps

Verdict = Literal["continue", "pause", "stop"]
STOPPERS = ("none", "median", "asha", "hyperband")


@dataclass
class Results:
    """What is known of all trials: trial → step → loss, and which run or have ended."""

    losses: dict[int, dict[int, float]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)  # reached the last rung
    stopped: set[int] = field(default_factory=set)  # by a stopper or a failure

    def report(self, trial: int, step: int, loss: float) -> None:
        self.losses.setdefault(trial, {})[step] = loss if math.isfinite(loss) else math.inf

    def at(self, step: int) -> dict[int, float]:
        """Losses at a rung by trial, the best first; of equal ones the earlier trial."""
        here = {trial: curve[step] for trial, curve in self.losses.items() if step in curve}
        return dict(sorted(here.items(), key=lambda item: (item[1], item[0])))

    def latest(self, trial: int) -> int:
        """The last step that a trial has reported; 0 for none."""
        return max(self.losses.get(trial, {}), default=0)

    def paused(self, trial: int) -> bool:
        return not any(trial in state for state in (self.running, self.finished, self.stopped))


class Stopper(Protocol):
    @property
    def rungs(self) -> tuple[int, ...]: ...

    def next_rung(self, trial: int, step: int) -> int:
        """The step at which a trial that is at `step` reports next."""
        ...

    def verdict(self, results: Results, trial: int) -> Verdict:
        """Of the trial's latest report, which is not that of its last rung."""
        ...

    def promotion(self, results: Results, *, all_started: bool) -> int | None:
        """The paused trial that goes on next. `all_started`: no new trials are to come."""
        ...

    def table(self) -> list[Bracket]:
        """What successive halving does with its trials; empty where nothing is halved."""
        ...


@dataclass(frozen=True)
class NoStopper:
    """Every trial runs to its end; rungs are where its loss is read."""

    rungs: tuple[int, ...]

    def next_rung(self, trial: int, step: int) -> int:
        return next(rung for rung in self.rungs if rung > step)

    def verdict(self, results: Results, trial: int) -> Verdict:
        return "continue"

    def promotion(self, results: Results, *, all_started: bool) -> int | None:
        return None

    def table(self) -> list[Bracket]:
        return []


@dataclass(frozen=True)
class MedianStopper(NoStopper):
    """Stops a trial whose best loss so far is above the median of finished trials at the same step, as Optuna's
    MedianPruner does; the first `startup` trials to finish are not held to it."""

    startup: int = 5

    def verdict(self, results: Results, trial: int) -> Verdict:
        step = results.latest(trial)
        if len(results.finished) < self.startup:
            return "continue"
        others = [results.losses[other][step] for other in results.finished if step in results.losses[other]]
        if not others:
            return "continue"
        return "stop" if min(results.losses[trial].values()) > statistics.median(others) else "continue"


@dataclass(frozen=True)
class Asha:
    """Asynchronous successive halving (Algorithm 2 of Li et al. 2020). Every trial pauses at its rung. A free worker
    takes the best paused trial that is among the best 1/η of all that have reported there, from the highest rung
    down; where there is none, a new trial. Once all are started, each rung sends at least one on."""

    rungs: tuple[int, ...]
    eta: int
    trials: int

    def next_rung(self, trial: int, step: int) -> int:
        return next(rung for rung in self.rungs if rung > step)

    def verdict(self, results: Results, trial: int) -> Verdict:
        return "pause"

    def promotion(self, results: Results, *, all_started: bool) -> int | None:
        for rung in reversed(self.rungs[:-1]):
            here = results.at(rung)
            count = len(here) // self.eta
            if all_started and here:
                count = max(1, count)
            for trial in list(here)[:count]:
                if results.latest(trial) == rung and results.paused(trial) and math.isfinite(here[trial]):
                    return trial
        return None

    def table(self) -> list[Bracket]:
        return [halving(self.trials, self.rungs, self.eta)]


@dataclass(frozen=True)
class Hyperband:
    """Hyperband (Li et al. 2018): brackets of synchronous successive halving. A rung is judged once every trial of its
    bracket has reported there; meanwhile workers start trials of the next bracket."""

    rungs: tuple[int, ...]
    eta: int
    plan: tuple[tuple[range, Bracket], ...]

    def bracket(self, trial: int) -> tuple[range, Bracket]:
        return next((trials, bracket) for trials, bracket in self.plan if trial in trials)

    def next_rung(self, trial: int, step: int) -> int:
        return next(rung.step for rung in self.bracket(trial)[1].rungs if rung.step > step)

    def verdict(self, results: Results, trial: int) -> Verdict:
        return "pause"

    def promotion(self, results: Results, *, all_started: bool) -> int | None:
        for trials, bracket in self.plan:
            sent = list(trials)  # that a rung waits for
            for rung, above in pairwise(bracket.rungs):
                if any(results.latest(trial) < rung.step and trial not in results.stopped for trial in sent):
                    break
                here = results.at(rung.step)
                sent = [trial for trial, loss in here.items() if trial in sent and math.isfinite(loss)][: above.trials]
                for trial in sent:
                    if results.latest(trial) == rung.step and results.paused(trial):
                        return trial
        return None

    def table(self) -> list[Bracket]:
        return [bracket for _, bracket in self.plan]


def stopper_of(name: str, trials: int, first: int, last: int, eta: int) -> Stopper:
    if name == "asha":
        return Asha(rung_steps(first, last, eta), eta, trials)
    if name == "hyperband":
        plan = tuple(hyperband_plan(trials, hyperband_brackets(first, last, eta), eta))
        return Hyperband(rung_steps(first, last, eta), eta, plan)
    rungs = rung_steps(first, last, eta)
    return MedianStopper(rungs) if name == "median" else NoStopper(rungs)


def best_first(results: Results, trials: Sequence[int]) -> list[int]:
    """Finished trials by loss, then the others by how far they came, and by loss."""
    return sorted(trials, key=lambda trial: order(results, trial))


def order(results: Results, trial: int) -> tuple[int, float, int]:
    return -results.latest(trial), last_loss(results, trial), trial


def last_loss(results: Results, trial: int) -> float:
    """The loss at the last step that it has reported."""
    curve = results.losses.get(trial, {})
    return curve[max(curve)] if curve else math.inf
