"""What a tuning sweep has found: the best trial, all trials, and what to look at before believing them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..sweep.folder import Sweep, Trial
from ..sweep.space import Dimension, Point, Space
from .driver import losses_of
from .stoppers import Results, best_first, last_loss

EDGE = 0.1  # a best value in that outer part of its range is at its edge


@dataclass(frozen=True)
class Outcome:
    """Of the folder of a sweep, at any time."""

    sweep: Sweep
    trials: list[Trial]
    results: Results

    @property
    def best(self) -> Trial | None:
        """The lowest loss among the trials that came furthest: losses at different steps are not compared."""
        order = [
            n for n in best_first(self.results, [trial.number for trial in self.trials]) if self.loss(n) is not None
        ]
        return next((trial for trial in self.trials if order and trial.number == order[0]), None)

    def loss(self, number: int) -> float | None:
        """At the last step that it was evaluated; None where that is not finite."""
        loss = last_loss(self.results, number)
        return loss if math.isfinite(loss) else None

    def losses(self, number: int) -> dict[int, float | None]:
        curve = self.results.losses.get(number, {})
        return {step: curve[step] if math.isfinite(curve[step]) else None for step in sorted(curve)}

    def to_dict(self) -> dict[str, Any]:
        best = self.best
        return {
            "sweep": str(self.sweep.path),
            "seed": self.sweep.seed,
            **self.sweep.settings,
            "best": self.row(best) if best else None,
            "trials": [self.row(trial) for trial in self.trials],
            "warnings": self.warnings(),
        }

    def row(self, trial: Trial) -> dict[str, Any]:
        curve = self.results.losses.get(trial.number, {})
        return {
            "trial": trial.number,
            "overrides": trial.overrides,
            "state": trial.state,
            "step": trial.step,
            "loss": self.loss(trial.number),
            "loss_step": max(curve, default=None),
            "losses": {str(step): loss for step, loss in self.losses(trial.number).items()},
            "train_s": (trial.result or {}).get("train_s"),
            "tokens": (trial.result or {}).get("tokens"),
            "parent": trial.parent,
            "stopped": trial.notes.get("stopped") or trial.error or None,
            "run": str(self.sweep.folder(trial.number).path),
        }

    def warnings(self) -> list[str]:
        best = self.best
        if best is None:
            return ["no trial has a finite loss"] if self.trials else []
        found = edge_warnings(self.sweep.space, best.overrides)
        spread = self.noise_warning(best)
        return [*found, *([spread] if spread else [])]

    def noise_warning(self, best: Trial) -> str | None:
        """Whether the two best finished trials differ by less than seeds usually make."""
        ends = sorted(self.results.losses[n][max(self.results.losses[n])] for n in self.results.finished)
        if best.number not in self.results.finished or len(ends) < 2 or ends[1] - ends[0] >= 0.005 * ends[0]:
            return None
        return (
            f"the two best differ by {ends[1] / ends[0] - 1:.2%}; `lmworks tune seeds` says how many seeds tell such "
            "trials apart"
        )


def outcome_of(sweep: Sweep) -> Outcome:
    trials, results = sweep.trials(), Results()
    for trial in trials:
        for step, loss in losses_of(sweep, trial).items():
            results.report(trial.number, step, loss)
        if trial.state == "finished" and trial.number in results.losses:
            results.finished.add(trial.number)
        elif trial.state in ("failed", "stopped"):
            results.stopped.add(trial.number)
    return Outcome(sweep, trials, results)


# --- edges of the space ----------------------------------------------------------------------------------


def edge_warnings(space: Space, best: Point) -> list[str]:
    """Keys whose best value lies at an end of its range: the optimum may be outside."""
    found = []
    for dimension in space.dimensions:
        place = position(dimension, best.get(dimension.key))
        if place is None or EDGE < place < 1 - EDGE:
            continue
        end, beyond = ("lower", "below") if place <= EDGE else ("upper", "above")
        found.append(
            f"{dimension.key} = {best[dimension.key]:.4g} is at the {end} end of its range: search {beyond} "
            f"{ends(dimension)[0 if place <= EDGE else 1]:.4g} too"
        )
    return found


def position(dimension: Dimension, value: Any) -> float | None:
    """0 at the lower end, 1 at the upper one; None of a key without an order, or with fewer than three values."""
    if not is_number(value):
        return None
    if dimension.range is None:
        if len(dimension.values) < 3 or not all(map(is_number, dimension.values)):
            return None
        order = sorted(dimension.values)
        return order.index(value) / (len(order) - 1)
    low, high = dimension.range
    if dimension.log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def ends(dimension: Dimension) -> Sequence[float]:
    return dimension.range or (min(dimension.values), max(dimension.values))


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
