"""Arrivals made from a seed, in the three shapes that matter to a fleet.

- diurnal: Poisson whose rate swings around its mean over a day (a sine of 80 %).
- bursty: gaps drawn from a gamma distribution with a coefficient of variation of 3, as BurstGPT fits its own.
- heavy_tailed: sessions come as in a Poisson process; their turns are Pareto-distributed, and each turn's prompt is all
  that was said before, so prompts share prefixes and a few sessions make most of the load.

Lengths are lognormal with the means that are asked for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..spec import SpecError
from ..spec.errors import did_you_mean
from .trace import Arrival, Trace, from_zero

DAY = 86_400.0
SWING = 0.8  # of the mean rate, up and down over a day
BURST_CV = 3.0  # standard deviation of the gaps over their mean
SPREAD = 0.8  # sigma of the logarithm of a length
TURNS_TAIL = 1.5  # exponent of the Pareto distribution of turns: P(turns ≥ n) = n^-1.5, whose variance is infinite
MOST_TURNS = 40
PAUSE_S = 20.0  # mean time between an answer and the next turn
BLOCK = 16  # tokens of an id of a prefix


@dataclass(frozen=True)
class Traffic:
    rate: float  # requests a second, on average
    prompt: float  # tokens, on average; of a session, what one turn adds
    answer: float
    seconds: float
    longest: int = 2**31  # tokens of prompt and answer together
    day: float = DAY  # seconds of a period of `diurnal`

    def __post_init__(self) -> None:
        if not (0 < self.rate < math.inf and 0 < self.seconds < math.inf):
            raise SpecError(f"traffic of {self.rate:g} requests a second for {self.seconds:g} s: both must be above 0")
        if min(self.prompt, self.answer) < 1:
            raise SpecError(f"traffic of {self.prompt:g} tokens in and {self.answer:g} out: a request has at least 1")


def generate(shape: str, traffic: Traffic, seed: int) -> Trace:
    if shape not in SHAPES:
        raise SpecError(f"--generate {shape!r} is unknown{did_you_mean(shape, SHAPES)}")
    arrivals = list(SHAPES[shape](traffic, random.Random(seed)))
    if not arrivals:
        raise SpecError(f"no request comes in {traffic.seconds:g} s at {traffic.rate:g} a second")
    return from_zero(arrivals, BLOCK)


def diurnal(traffic: Traffic, rng: random.Random) -> Iterator[Arrival]:
    """Thinning: candidates at the highest rate, of which each is kept with the chance of its hour."""
    now, highest = 0.0, traffic.rate * (1 + SWING)
    while (now := now + rng.expovariate(highest)) < traffic.seconds:
        if rng.random() * highest < traffic.rate * (1 + SWING * math.sin(2 * math.pi * now / traffic.day)):
            yield request(traffic, rng, now)


def bursty(traffic: Traffic, rng: random.Random) -> Iterator[Arrival]:
    shape = 1 / BURST_CV**2
    now = 0.0
    while (now := now + rng.gammavariate(shape, 1 / (traffic.rate * shape))) < traffic.seconds:
        yield request(traffic, rng, now)


def heavy_tailed(traffic: Traffic, rng: random.Random) -> Iterator[Arrival]:
    mean_turns = sum(min(MOST_TURNS, turns) ** -TURNS_TAIL for turns in range(1, MOST_TURNS + 1))  # Σ P(turns ≥ n)
    now, number = 0.0, 0
    while (now := now + rng.expovariate(traffic.rate / mean_turns)) < traffic.seconds:
        turns = min(MOST_TURNS, int(rng.paretovariate(TURNS_TAIL)))
        at, context = now, 0
        for _ in range(turns):
            one = request(traffic, rng, at)
            prompt, answer = context + one.prompt, one.answer
            if prompt + answer > traffic.longest or at >= traffic.seconds:
                break
            # Of a session every block has its own id: number and place.
            ids = tuple((number << 24) + place for place in range((prompt + answer) // BLOCK))
            yield Arrival(at, prompt, answer, ids)
            context = prompt + answer
            at += rng.expovariate(1 / PAUSE_S)
        number += 1


def request(traffic: Traffic, rng: random.Random, at: float) -> Arrival:
    prompt, answer = (
        max(1, round(rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)))
        for mean in (traffic.prompt, traffic.answer)
    )
    excess = traffic.longest / max(prompt + answer, traffic.longest)
    return Arrival(at, max(1, int(prompt * excess)), max(1, int(answer * excess)))


SHAPES: dict[str, Callable[[Traffic, random.Random], Iterator[Arrival]]] = {
    "diurnal": diurnal,
    "bursty": bursty,
    "heavy_tailed": heavy_tailed,
}
