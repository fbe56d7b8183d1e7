"""What a budget of FLOPs is best spent on, for every replicate of a law at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .huber import Array
from .laws import Law
from .points import Points

# Causal attention, forward and backward: 6·S·layers·width. N = 12·layers·width² and width = 128·layers make it so much
# times S·N^(2/3).
ATTENTION = 6 / (12 * (128 / 12) ** (1 / 3))
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class FlopRule:
    """Training FLOPs of a token: coefficient·N^exponent (6N, or as the runs had it) + attention·S·N^(2/3)."""

    coefficient: float = 6.0
    exponent: float = 1.0
    attention: float = 0.0

    def per_token(self, n: Array, seq: Array | float = 0.0) -> Array:
        return self.coefficient * n**self.exponent + self.attention * np.asarray(seq) * n ** (2 / 3)

    @classmethod
    def of(cls, points: Points, law: Law) -> FlopRule:
        """As the runs' own FLOPs have it, where they are not 6ND; attention where the law has a context length."""
        if points.n is None or points.d is None or points.flops is None:
            return cls()
        per_token = points.flops / points.d
        plain = np.allclose(per_token, 6 * points.n, rtol=0.01) or len(np.unique(points.n)) < 3
        if "seq" in law.variables and points.seq is not None:
            if plain:
                return cls(attention=ATTENTION)
            columns = np.stack([points.n, points.seq * points.n ** (2 / 3)], 1) / per_token[:, None]
            linear, attention = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
            return cls(float(linear), 1.0, max(0.0, float(attention)))
        if plain:
            return cls()
        slope, level = np.polyfit(np.log(points.n), np.log(per_token), 1)
        return cls(float(np.exp(level)), float(slope))


@dataclass(frozen=True)
class Optimum:
    """Arrays, one element a replicate."""

    n: Array
    d: Array
    log_loss: Array


def optimum(law: Law, theta: Array, flops: float, rule: FlopRule, seq: float = 0.0) -> Optimum:
    """The minimum of the loss over N, with the tokens that the budget leaves."""

    def at(log_n: Array) -> tuple[Array, Array]:
        n = np.exp(log_n)
        d = flops / rule.per_token(n, seq)
        return law.log_loss(theta, {"n": n, "d": d, "seq": np.full_like(n, seq or 1.0)}), d

    shape = theta.shape[:-1]
    log_n = golden(lambda x: at(x)[0], np.full(shape, np.log(10.0)), np.full(shape, np.log(flops / 60)))
    log_loss, d = at(log_n)
    return Optimum(np.exp(log_n), d, log_loss)


def golden(of: Callable[[Array], Array], low: Array, high: Array, steps: int = 80) -> Array:
    """Golden-section search of many convex functions; 80 steps leave 1e-15 of the range."""
    low, high = low.copy(), high.copy()
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = of(left), of(right)
    for _ in range(steps):
        less = at_left < at_right
        high, low = np.where(less, right, high), np.where(less, low, left)
        fresh = np.where(less, high - GOLDEN * (high - low), low + GOLDEN * (high - low))
        value = of(fresh)
        left, right = np.where(less, fresh, right), np.where(less, left, fresh)
        at_left, at_right = np.where(less, value, at_right), np.where(less, at_left, value)
    return (low + high) / 2


def exponents(law: Law, theta: Array, flops: float, rule: FlopRule, seq: float = 0.0) -> tuple[Array, Array]:
    """d log N* / d log C and d log D* / d log C at the budget."""
    step = 0.5
    low, high = (optimum(law, theta, flops * np.exp(by), rule, seq) for by in (-step, step))
    return np.log(high.n / low.n) / (2 * step), np.log(high.d / low.d) / (2 * step)
