"""Rungs of successive halving: after how many steps trials are compared, and how many go on.

Successive halving starts n trials with r steps each and gives the best n/η of them r·η steps, the best n/η² r·η² …
(Jamieson and Talwalkar 2016). ASHA does so without waiting (Li et al. 2020), Hyperband runs several such brackets from
many short trials to few long ones (Li et al. 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..spec.errors import SpecError


@dataclass(frozen=True)
class Rung:
    step: int
    trials: int  # that reach it when all are done


@dataclass(frozen=True)
class Bracket:
    """One run of successive halving."""

    rungs: tuple[Rung, ...]

    @property
    def trials(self) -> int:
        return self.rungs[0].trials

    @property
    def steps(self) -> int:
        """Steps of all trials together; a trial that goes on does not repeat what it has done."""
        before = 0
        total = 0
        for rung in self.rungs:
            total += rung.trials * (rung.step - before)
            before = rung.step
        return total


def rung_steps(first: int, last: int, eta: int) -> tuple[int, ...]:
    """r, r·η, r·η² …; the last rung is `last`, so that a trial that passes them all is a whole run."""
    check(first, last, eta)
    steps = [first]
    while steps[-1] * eta <= last:
        steps.append(steps[-1] * eta)
    return (*steps[:-1], last) if len(steps) > 1 else ((first, last) if first < last else (last,))


def check(first: int, last: int, eta: int) -> None:
    if eta < 2:
        raise SpecError(f"--eta must be 2 or more, got {eta}")
    if not 1 <= first <= last:
        raise SpecError(f"--min-steps must be from 1 to the steps of a whole run ({last:,}), got {first:,}")


def halving(trials: int, steps: Sequence[int], eta: int) -> Bracket:
    """n, ⌊n/η⌋, ⌊n/η²⌋ …, at least one."""
    return Bracket(tuple(Rung(step, max(1, trials // eta**index)) for index, step in enumerate(steps)))


def hyperband_brackets(first: int, last: int, eta: int) -> list[Bracket]:
    """From the bracket with the shortest first rung to the one that stops nothing: s = s_max … 0,
    n = ⌈(s_max + 1)/(s + 1) · η^s⌉ trials from R·η^−s steps on (Algorithm 1 of Li et al. 2018)."""
    steps = rung_steps(first, last, eta)
    largest = len(steps) - 1
    return [
        halving(math.ceil((largest + 1) * eta**s / (s + 1)), steps[largest - s :], eta) for s in range(largest, -1, -1)
    ]


def hyperband_plan(trials: int, brackets: Sequence[Bracket], eta: int) -> Iterator[tuple[range, Bracket]]:
    """Which trials each bracket has: brackets in turn, over and over; the last has what is left of the trials."""
    start, turn = 0, 0
    while start < trials:
        bracket = brackets[turn % len(brackets)]
        count = min(bracket.trials, trials - start)
        yield range(start, start + count), halving(count, [rung.step for rung in bracket.rungs], eta)
        start, turn = start + count, turn + 1
