"""The driver of population-based training: generations of equal length, with an exchange after each.

A member that gives up ends its trial; a new trial forks the checkpoint of a better member and goes on under this
member's seed, so with its own order of the data. Decisions follow from the folder and the seed alone: a driver that was
killed makes them again, whatever the number of workers.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from ..spec.errors import LMWorksError, SpecError
from ..spec.resumed import refused_changes
from ..sweep.folder import ENDS, Sweep, Trial
from ..sweep.space import Point
from .bandit import Interval, bandit_dimensions, choose
from .driver import OnPoll, WorkerPool, losses_of
from .population import explore, quantiles
from .storage import IN_MEMORY
from .suggest import Suggestions


@dataclass
class PopulationDriver:
    sweep: Sweep
    algorithm: str  # pbt or pb2
    members: int
    interval: int  # steps between exchanges
    last: int

    def run(self, workers: WorkerPool, on_poll: OnPoll | None = None) -> None:
        self.check()
        self.start()
        for generation, step in enumerate(self.exchanges(), 1):
            trials = self.current(generation)
            self.run_to(trials, step, workers, on_poll)
            if step < self.last:
                self.exchange(generation, step)

    def exchanges(self) -> list[int]:
        """Steps at which members are compared; the last is the end."""
        return [*range(self.interval, self.last, self.interval), self.last]

    # --- members ----------------------------------------------------------------------------------------

    def first_points(self) -> list[Point]:
        asked = Suggestions("start", self.sweep.space, "random", self.sweep.seed, IN_MEMORY, None)
        return [{**asked.ask().point, "seed": self.member_seed(member)} for member in range(self.members)]

    def member_seed(self, member: int) -> int:
        return self.sweep.spec({}).seed + member

    def check(self) -> None:
        """Whether keys of the space may change within a run."""
        if self.algorithm == "pb2":
            bandit_dimensions(self.sweep.space)
        first, *others = self.first_points()
        before = self.sweep.spec(first).to_dict()
        for point in others:
            refused = [one for one in refused_changes(before, self.sweep.spec(point)) if not one.startswith("seed = ")]
            if refused:
                raise SpecError(f"{self.algorithm} changes keys within a run, and a run cannot change {refused[0]}")

    def start(self) -> None:
        for member, point in enumerate(self.first_points()):
            notes = {"member": member, "generation": 1}
            self.sweep.propose(point, self.until(self.exchanges()[0]), notes=notes, number=member)

    def current(self, generation: int) -> dict[int, Trial]:
        """Member → its trial in that generation: the latest that had begun by then."""
        trials = sorted(self.sweep.trials(), key=lambda trial: trial.number)
        return {trial.notes["member"]: trial for trial in trials if trial.notes["generation"] <= generation}

    def until(self, step: int) -> int | None:
        return None if step >= self.last else step

    def run_to(self, trials: dict[int, Trial], step: int, workers: WorkerPool, on_poll: OnPoll | None) -> None:
        """Until every member has come to `step` or has ended."""
        waiting = set()
        for trial in trials.values():
            if trial.state == "paused" and trial.step < step:
                self.sweep.run_until(trial.number, self.until(step))
                waiting.add(trial.number)
            elif trial.state == "queued":
                waiting.add(trial.number)
        while waiting:
            waiting.discard(workers.wait_any(sorted(waiting), on_poll).number)

    # --- exchanges --------------------------------------------------------------------------------------

    def exchange(self, generation: int, step: int) -> None:
        """After a generation: the worst members fork checkpoints of the best."""
        trials = self.current(generation)
        losses = {member: losses_of(self.sweep, trial).get(step, math.inf) for member, trial in trials.items()}
        worst, best = quantiles(losses)
        if not best:
            raise LMWorksError(f"no member of the population has a finite loss at step {step:,}")
        number = self.members + sum(trial.notes.get("generation", 1) <= generation for trial in self.forks())
        given: list[Point] = []
        for index, member in enumerate(worst):
            rng = random.Random(f"{self.sweep.seed}/{generation}/{member}")
            parent = trials[rng.choice(best)]
            point = self.explored(parent, generation, step, given, rng)
            given.append(point)
            notes = {"member": member, "generation": generation + 1}
            overrides = {**point, "seed": self.member_seed(member)}
            until = self.until(self.exchanges()[generation])
            self.sweep.propose(overrides, until, (parent.number, step), notes, number + index)
            self.end(trials[member], f"forked trial {parent.number} at step {step:,}")

    def forks(self) -> list[Trial]:
        return [trial for trial in self.sweep.trials() if trial.number >= self.members]

    def explored(self, parent: Trial, generation: int, step: int, given: list[Point], rng: random.Random) -> Point:
        keys = self.sweep.space.keys
        before = {key: value for key, value in parent.overrides.items() if key in keys}
        if self.algorithm == "pb2":
            reward = -losses_of(self.sweep, parent)[step]
            history = self.intervals(generation)
            chosen = choose(self.sweep.space, history, step, reward, given, rng.randrange(2**31))
            if chosen is not None:
                return chosen
        return explore(self.sweep.space, before, rng)

    def intervals(self, generation: int) -> list[Interval]:
        """What every member gained in each generation so far; the first has no loss to start from."""
        found = []
        steps = self.exchanges()
        for index in range(1, generation):
            for _, trial in sorted(self.current(index + 1).items()):
                curve = losses_of(self.sweep, trial)
                before, after = curve.get(steps[index - 1], math.inf), curve.get(steps[index], math.inf)
                if math.isfinite(before) and math.isfinite(after):
                    point = {key: trial.overrides[key] for key in self.sweep.space.keys}
                    gain = (before - after) / (steps[index] - steps[index - 1])
                    found.append(Interval(steps[index], -before, gain, point))
        return found

    def end(self, trial: Trial, why: str) -> None:
        now = self.sweep.trial(trial.number)
        if now.state not in ENDS:
            with self.sweep.claimed(trial.number):
                self.sweep.write(replace(now, state="stopped", notes={**now.notes, "stopped": why}))
