"""Replay: a search over a table of trainings that were run before, to compare samplers and stoppers.

The table is a full grid with the loss of every point at every rung, so each suggestion is looked up and no surrogate
model stands between. Time is compute: a whole training costs 1, as all of them see the same number of tokens.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..spec.errors import DataError
from ..sweep.space import Dimension, Point, Space
from .early_stop import reason_to_stop
from .stoppers import Results, Stopper, order
from .storage import IN_MEMORY
from .suggest import Suggestions

LOSS = "loss_"  # column loss_N: after 1/N of the tokens


@dataclass(frozen=True)
class Table:
    """`values`: those of each key, in order; `losses`: by the index of each key's value, at each rung."""

    values: dict[str, tuple[float, ...]]
    rungs: tuple[int, ...]  # in parts of the last one, which is a whole training
    losses: dict[tuple[int, ...], tuple[float, ...]]

    @classmethod
    def read(cls, path: Path) -> Table:
        with gzip.open(path, "rt", newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            raise DataError(f"{path} has no rows")
        return cls.of(rows)

    @classmethod
    def of(cls, rows: Iterable[dict[str, str]]) -> Table:
        """Rows with a column for each key, `trial`, and a loss for each rung (not a number: it diverged)."""
        rows = list(rows)
        divisors = sorted((int(name.removeprefix(LOSS)) for name in rows[0] if name.startswith(LOSS)), reverse=True)
        keys = [name for name in rows[0] if not name.startswith(LOSS) and name != "trial"]
        values = {key: tuple(sorted({float(row[key]) for row in rows})) for key in keys}
        values = {key: each for key, each in values.items() if len(each) > 1}
        losses = {
            tuple(each.index(float(row[key])) for key, each in values.items()): tuple(
                loss if math.isfinite(loss := float(row[f"{LOSS}{divisor}"])) else math.inf for divisor in divisors
            )
            for row in rows
        }
        expected = math.prod(map(len, values.values()))
        if len(losses) != expected:
            raise DataError(f"the table has {len(losses):,} of the {expected:,} points of its grid")
        return cls(values, tuple(divisors[0] // divisor for divisor in divisors), losses)

    @property
    def space(self) -> Space:
        """Indices of the values: neighbours in the table are neighbours for a sampler."""
        return Space(tuple(Dimension(key, range=(0, len(each) - 1)) for key, each in self.values.items()))

    def curve(self, point: Point) -> tuple[float, ...]:
        return self.losses[tuple(point[key] for key in self.values)]

    def loss(self, point: Point, step: int) -> float:
        return self.curve(point)[self.rungs.index(step)]

    @cached_property
    def best(self) -> float:
        return min(curve[-1] for curve in self.losses.values())

    def subset(self, first: int, eta: int) -> tuple[int, ...]:
        """Rungs of a stopper that the table has: first, first·η … and the last one."""
        wanted = [first * eta**power for power in range(32)]
        return tuple(step for step in self.rungs if step in wanted or step == self.rungs[-1])


@dataclass(frozen=True)
class Moment:
    """After a report: what was spent, trials started, and how much worse the incumbent is than the table's best, as
    whole trainings. The incumbent is what a user would take: the lowest loss among those that came furthest."""

    compute: float
    trials: int
    regret: float


def replay(
    table: Table,
    algorithm: str,
    stopper: Stopper,
    trials: int,
    seed: int,
    workers: int = 1,
    rules: Sequence[str] = (),
    budget: float = math.inf,
) -> list[Moment]:
    """Our search, with simulated workers. `budget`: of compute, after which nothing is started."""
    suggestions = Suggestions("replay", table.space, algorithm, seed, IN_MEMORY, None)
    results, points, moments = Results(), dict[int, Point](), list[Moment]()
    running: list[tuple[float, int, int]] = []  # when, trial, the rung that it reaches
    now = spent = 0.0
    last = table.rungs[-1]

    def start(trial: int) -> None:
        nonlocal spent
        rung = stopper.next_rung(trial, results.latest(trial))
        cost = (rung - results.latest(trial)) / last
        spent += cost
        results.running.add(trial)
        suggestions.pause(trial, False)
        heapq.heappush(running, (now + cost, trial, rung))

    while True:
        while len(running) < workers and spent < budget:
            promoted = stopper.promotion(results, all_started=len(points) == trials)
            if promoted is None and len(points) == trials:
                break
            if promoted is None:
                promoted = len(points)
                points[promoted] = suggestions.ask().point
            start(promoted)
        if not running:
            return moments
        now, trial, rung = heapq.heappop(running)
        results.running.discard(trial)
        loss = table.loss(points[trial], rung)
        results.report(trial, rung, loss)
        if math.isfinite(loss):
            suggestions.report(trial, rung, loss)
        moments.append(Moment(spent, len(points), incumbent_regret(table, results, points)))
        if rung == last:
            results.finished.add(trial)
            suggestions.finish(trial, loss) if math.isfinite(loss) else suggestions.stop(trial)
            continue
        verdict = "stop" if reason_to_stop(rules, results, trial, last) else stopper.verdict(results, trial)
        if verdict == "continue" and spent < budget:
            start(trial)
        elif verdict != "stop":
            suggestions.pause(trial)
        else:
            results.stopped.add(trial)
            suggestions.stop(trial)


def incumbent_regret(table: Table, results: Results, points: dict[int, Point]) -> float:
    best = min(results.losses, key=lambda trial: order(results, trial))
    return table.curve(points[best])[-1] - table.best


def regret_at(moments: Sequence[Moment], compute: float) -> float | None:
    """Of the last moment within that compute; None before the first."""
    within = [moment.regret for moment in moments if moment.compute <= compute + 1e-9]
    return within[-1] if within else None


def regret_after(moments: Sequence[Moment], trials: int) -> float | None:
    """When that many trials were started and judged."""
    within = [moment.regret for moment in moments if moment.trials <= trials]
    return within[-1] if within else None
