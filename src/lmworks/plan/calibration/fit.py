"""Fit of the factors to measured runs: which of them the runs tell, intervals, and the error on a run left out.

log(measured / predicted) is normal with a variance that nobody knows: its prior counts as NOISE_RUNS runs off by NOISE,
and integrated over it the likelihood is Student's. The logarithm of every factor is normal around 0 before a run was
seen. A constant is identified by the runs if they leave its logarithm less than IDENTIFIED of the width that it had,
whatever the others are; those keep their prior. What the runs tell of several together, the one with the largest share
takes, which is that of all kernels.

Intervals are 90 % profile likelihood with all constants free, so that what was not identified makes the rest less sure.
Around the fit a step's seconds are linear in the factor of each kind of work: exactly on a CPU, nearly where
communication overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...spec import LMWorksError
from ..tables.score import Score
from .factors import CONSTANTS, Factors
from .priced_run import PricedRun

Array = NDArray[np.float64]
# Logarithms of the factor of each kind of work (products, attention, passes …) from those of CONSTANTS.
KINDS = np.eye(len(CONSTANTS))
KINDS[1, 0] = KINDS[2, 0] = 1.0  # attention and passes are kernels, too
OF_KINDS = np.linalg.inv(KINDS)
# Standard deviations of these logarithms before a run was seen. A busy or capped machine may be several times slower,
# and is so in all of its kernels.
PRIOR = np.array([1.0, 0.3, 0.3, 0.5, 0.5, 0.5])
NOISE, NOISE_RUNS = 0.05, 4.0
IDENTIFIED = 0.5
MIN_SHARE = 0.005  # of a step: a constant with less is in no run
MIN_JOBS = 3
JOBS_PER_CONSTANT = 2
SAME_JOB = 1e-6  # relative difference of prices below which two runs are the same job, measured twice
REPEATS = 1.5  # the slowest over the fastest of them, at most
CONTRADICTION = 2.0  # what a run may be off after the fit
DIFFERENCE = 0.05  # relative, of the derivatives
ROUNDS = 6  # of linearisation
NORMAL_90 = 1.645


class TooFewRuns(LMWorksError):
    """They tell nothing that could be checked."""


class ContradictoryRuns(LMWorksError):
    """No constants make the planner agree with all of them."""


@dataclass(frozen=True)
class Constant:
    """A factor on seconds: as fitted, with its 90 % interval; or 1, and why it is not identified."""

    name: str
    factor: float
    low: float | None
    high: float | None
    share: float  # of the steps' time, in the mean
    kept: str = ""  # why it keeps its prior

    @property
    def identified(self) -> bool:
        return not self.kept


@dataclass(frozen=True)
class FittedRun:
    """Seconds of a step: measured, with the prior, with the fit, and with the fit of all other jobs."""

    label: str
    measured: float
    before: float
    after: float
    left_out: float


@dataclass(frozen=True)
class Fit:
    factors: Factors
    constants: tuple[Constant, ...]
    runs: tuple[FittedRun, ...]
    jobs: int

    def score(self, which: str) -> Score:
        """`which`: before, after or left_out."""
        errors = [getattr(run, which) / run.measured - 1 for run in self.runs]
        return Score.of(errors, [run.label for run in self.runs])

    def to_dict(self) -> dict[str, Any]:
        return {
            "jobs": self.jobs,
            "constants": [asdict(one) for one in self.constants],
            "errors": {which: asdict(self.score(which)) for which in ("before", "after", "left_out")},
            "runs": [asdict(run) for run in self.runs],
        }


@dataclass(frozen=True)
class Problem:
    """Seconds of every run, linear in the factors of kinds: rest + slopes · factors; and logarithms of the measured."""

    rest: Array  # (runs)
    slopes: Array  # (runs, kinds)
    measured: Array  # (runs), logarithms

    def seconds(self, logs: Array) -> Array:
        found: Array = self.rest + self.slopes @ np.exp(KINDS @ logs)
        return np.maximum(found, 1e-12)

    def of(self, rows: NDArray[np.bool_]) -> Problem:
        return Problem(self.rest[rows], self.slopes[rows], self.measured[rows])

    def objective(self, logs: Array) -> float:
        """Twice the negative logarithm of the posterior."""
        off = self.measured - np.log(self.seconds(logs))
        spread = NOISE_RUNS * NOISE**2 + off @ off
        return float((len(off) + NOISE_RUNS) * np.log(spread) + logs @ (logs / PRIOR**2))

    def normal_equations(self, logs: Array) -> tuple[Array, Array]:
        """Half of the Gauss-Newton Hessian of `objective`, and of its gradient."""
        off = self.measured - np.log(self.seconds(logs))
        variance = (NOISE_RUNS * NOISE**2 + off @ off) / (len(off) + NOISE_RUNS)
        jacobian = -self.shares(logs)
        hessian = jacobian.T @ jacobian / variance + np.diag(PRIOR**-2)
        return hessian, jacobian.T @ off / variance + logs / PRIOR**2

    def solve(self, free: Sequence[int], start: Array) -> Array:
        """The most probable logarithms; those that are not free stay as they start."""
        logs, place = start.copy(), np.array(free, dtype=int)
        if not len(place):
            return logs
        now = self.objective(logs)
        for _ in range(50):
            hessian, gradient = self.normal_equations(logs)
            move = np.clip(-np.linalg.solve(hessian[np.ix_(place, place)], gradient[place]), -0.5, 0.5)
            step = 1.0
            while step > 1e-4:
                tried = logs.copy()
                tried[place] += step * move
                if (then := self.objective(tried)) <= now:
                    break
                step /= 2
            else:
                break
            logs, before, now = tried, now, then
            if before - now < 1e-10:
                break
        return logs

    def shares(self, logs: Array) -> Array:
        """Of each constant, in the time of every run."""
        found: Array = (self.slopes * np.exp(KINDS @ logs)) @ KINDS / self.seconds(logs)[:, None]
        return found

    def best(self, free: Sequence[int]) -> Array:
        """Of two starts: the prior, and all as much slower as the runs are. Far from them a run looks like noise."""
        none = np.zeros(len(CONSTANTS))
        off = np.median(self.measured - np.log(self.seconds(none)))
        slower = np.where(np.isin(np.arange(len(none)), free), OF_KINDS @ np.full(len(none), off), 0.0)
        return min((self.solve(free, start) for start in (none, slower)), key=self.objective)


def fit(runs: Sequence[PricedRun]) -> Fit:
    before = [run.price(Factors()) for run in runs]
    jobs = jobs_of(before)
    check_runs(runs, jobs)
    logs = np.zeros(len(CONSTANTS))
    for _ in range(ROUNDS):
        problem, last = linearised(runs, logs), logs
        identified = identifiable(problem, jobs)
        logs = problem.best(identified)
        if np.abs(logs - last).max() < 1e-4:
            break
    factors = Factors.of_logs(logs)
    after = [run.price(factors) for run in runs]
    left_out = left_out_seconds(problem, jobs)
    found = tuple(
        FittedRun(run.label, run.measured, *seconds)
        for run, *seconds in zip(runs, before, after, left_out.tolist(), strict=True)
    )
    check_agreement(found)
    return Fit(factors, constants_of(problem, identified, logs), found, len(set(jobs)))


def jobs_of(seconds: Sequence[float]) -> list[int]:
    """By run, the first one that is the same job: what the planner prices alike it tells apart by nothing."""
    return [next(first for first, other in enumerate(seconds) if abs(other - one) <= SAME_JOB * one) for one in seconds]


def check_runs(runs: Sequence[PricedRun], jobs: Sequence[int]) -> None:
    if (count := len(set(jobs))) < MIN_JOBS:
        many = f"{len(runs)} runs of " if len(runs) > count else ""
        raise TooFewRuns(
            f"{many}{count} job{'s' * (count != 1)} cannot be fitted: at least {MIN_JOBS} are needed that differ in "
            "model, batch, sequence length or layout"
        )
    for job in dict.fromkeys(jobs):
        repeats = sorted((run for run, of in zip(runs, jobs, strict=True) if of == job), key=lambda run: run.measured)
        fast, slow = repeats[0], repeats[-1]
        if slow.measured > REPEATS * fast.measured:
            raise ContradictoryRuns(
                f"{fast.label} and {slow.label} are the same job to the planner, and a step took {fast.measured:.3g} "
                f"and {slow.measured:.3g} s: leave out the one that was disturbed, or give the column that differs"
            )


def check_agreement(runs: Sequence[FittedRun]) -> None:
    worst = max(runs, key=lambda run: abs(math.log(run.after / run.measured)))
    off = worst.measured / worst.after
    if max(off, 1 / off) > CONTRADICTION:
        raise ContradictoryRuns(
            f"no constants agree with all runs: with those that fit best, a step of {worst.label} should take "
            f"{worst.after:.3g} s and took {worst.measured:.3g} s; leave out runs that were disturbed"
        )


def linearised(runs: Sequence[PricedRun], logs: Array) -> Problem:
    base = np.array([run.price(Factors.of_logs(logs)) for run in runs])
    slopes = np.zeros((len(runs), len(CONSTANTS)))
    for place in range(len(CONSTANTS)):
        more = logs + OF_KINDS[:, place] * math.log(1 + DIFFERENCE)
        dearer = np.array([run.price(Factors.of_logs(more)) for run in runs])
        slopes[:, place] = (dearer - base) / (DIFFERENCE * math.exp(KINDS[place] @ logs))
    return Problem(base - slopes @ np.exp(KINDS @ logs), slopes, np.log([run.measured for run in runs]))


def identifiable(problem: Problem, jobs: Sequence[int]) -> list[int]:
    """Constants that the runs tell: no more than one for every two jobs, and the largest in any case.

    The largest is judged with the others at their prior, so that it takes what runs tell of several together.
    """
    none = np.zeros(len(CONSTANTS))
    shares, free = problem.shares(none).mean(axis=0), in_runs(problem, none)
    hessian, _ = problem.normal_equations(problem.best(free))
    left = np.sqrt(np.diag(np.linalg.inv(hessian[np.ix_(free, free)])))
    first = max(free, key=lambda place: shares[place])
    others = [place for place, sd in zip(free, left, strict=True) if sd < IDENTIFIED * PRIOR[place] and place != first]
    others.sort(key=lambda place: -shares[place])
    alone = 1 / math.sqrt(hessian[first, first])
    identified = [first, *others] if alone < IDENTIFIED * PRIOR[first] else others
    return identified[: max(1, len(set(jobs)) // JOBS_PER_CONSTANT)]


def in_runs(problem: Problem, logs: Array) -> list[int]:
    """Constants that some run spends time on."""
    return np.flatnonzero(problem.shares(logs).max(axis=0) >= MIN_SHARE).tolist()


def constants_of(problem: Problem, identified: Sequence[int], logs: Array) -> tuple[Constant, ...]:
    shares, free = problem.shares(logs), in_runs(problem, logs)
    best = problem.best(free)
    found = []
    for place, name in enumerate(CONSTANTS):
        share, most = float(shares[:, place].mean()), float(shares[:, place].max())
        if place in identified:
            low, high = (interval_end(problem, free, best, place, sign) for sign in (-1, 1))
            factor, low, high = (math.exp(log) for log in (logs[place], min(low, logs[place]), max(high, logs[place])))
            found.append(Constant(name, factor, low, high, share))
            continue
        why = f"at most {most:.0%} of a step" if place in free else f"less than {MIN_SHARE:.1%} of every step"
        if most > 0.1:
            why = f"not told apart from the others: {share:.0%} of a step in the mean, {most:.0%} at most"
        found.append(Constant(name, 1.0, None, None, share, why))
    return tuple(found)


def interval_end(problem: Problem, free: Sequence[int], best: Array, place: int, sign: int) -> float:
    """Where the profile of the objective is as much above its least as a 90 % interval allows."""
    runs, others = len(problem.measured), [one for one in free if one != place]
    degrees = runs + NOISE_RUNS - 1
    allowed = (runs + NOISE_RUNS) * math.log(1 + student_90(degrees) ** 2 / degrees)
    least = problem.objective(best)

    def above(log: float) -> float:
        start = best.copy()
        start[place] = log
        return problem.objective(problem.solve(others, start)) - least - allowed

    return crossing(above, float(best[place]), sign)


def crossing(function: Callable[[float], float], start: float, sign: int) -> float:
    """The zero of a function that grows from below it, on one side of `start`."""
    inside, width = start, 0.01
    while function(start + sign * width) < 0 and width < 8:
        inside, width = start + sign * width, 2 * width
    outside = start + sign * width
    for _ in range(12):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if function(middle) < 0 else (inside, middle)
    return outside


def student_90(degrees: float) -> float:
    """Two-sided 90 % quantile of Student's t (Abramowitz and Stegun 26.7.5), good to 1 % from 3 degrees on."""
    z = NORMAL_90
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def left_out_seconds(problem: Problem, jobs: Sequence[int]) -> Array:
    """Of every run, by the fit of all runs of other jobs."""
    found, of = np.zeros(len(jobs)), np.array(jobs)
    for job in set(jobs):
        others = of != job
        rest = problem.of(others)
        logs = rest.best(identifiable(rest, of[others].tolist()))
        found[~others] = problem.of(~others).seconds(logs)
    return found
