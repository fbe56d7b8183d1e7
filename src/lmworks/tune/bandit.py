"""PB2's bandit: keys for the next interval by a Gaussian process over what past intervals gained.

Parker-Holder et al. 2020. A row is one member's interval: time, reward before it, keys; its target is the reward gained
per step. The kernel forgets (TV-GP-UCB, Bogunovic et al. 2016):

    k((t, z), (t', z')) = σ² · exp(−|z − z'|²/ℓ) · (1 − ε)^(|t − t'|/2)

Keys maximise mean + κ · variance, κ² = 0.2 + max(0, ln(0.4 n)), given the time and the reward of the checkpoint that
they start from. Members that were given keys in the same round lower the variance where those are. All constants are
those of Ray Tune's PB2; here keys with a log range are taken by their logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import SpecError
from ..sweep.space import Dimension, Point, Space
from .population import within

Array = NDArray[np.float64]
JITTER = 1e-10
STARTS = 10
MOST_ROWS = 1000
FIXED = 2  # columns that are given: time and reward


@dataclass(frozen=True)
class Interval:
    """What a member gained from one exchange to the next."""

    time: float  # at its end
    before: float  # the reward at its start
    gain: float  # of reward per step
    point: Point


@dataclass(frozen=True)
class Kernel:
    variance: float = 1.0
    length: float = 1.0
    epsilon: float = 0.1

    def __call__(self, first: Array, second: Array) -> Array:
        """Rows (time, z…), as above."""
        apart = np.abs(first[:, :1] - second[:, 0])
        squares = ((first[:, None, 1:] - second[None, :, 1:]) ** 2).sum(-1)
        decay = (1 - min(max(self.epsilon, 1e-5), 0.5)) ** (0.5 * apart)
        return self.variance * np.exp(-squares / self.length) * decay


@dataclass(frozen=True)
class Posterior:
    """A Gaussian process without noise, after its data."""

    kernel: Kernel
    x: Array
    factor: Array  # Cholesky of the kernel matrix
    weights: Array

    @classmethod
    def of(cls, kernel: Kernel, x: Array, y: Array) -> Posterior:
        matrix = kernel(x, x)
        jitter = JITTER
        while True:
            try:
                factor: Array = np.linalg.cholesky(matrix + jitter * np.eye(len(x))).astype(np.float64)
                break
            except np.linalg.LinAlgError:  # rows that are almost alike
                jitter *= 100
        return cls(kernel, x, factor, np.linalg.solve(factor.T, np.linalg.solve(factor, y)))

    def mean(self, at: Array) -> Array:
        return self.kernel(at, self.x) @ self.weights

    def variance(self, at: Array) -> Array:
        half = np.linalg.solve(self.factor, self.kernel(self.x, at))
        return np.maximum(self.kernel.variance - (half**2).sum(0), 0.0)

    def log_likelihood(self, y: Array) -> float:
        fit = -0.5 * float(y @ self.weights) - float(np.log(np.diag(self.factor)).sum())
        return fit - 0.5 * len(y) * math.log(2 * math.pi)


def fitted(x: Array, y: Array) -> Posterior:
    """Hyper-parameters of the kernel by maximum likelihood, from (1, 1, 0.1)."""
    minimize = scipy_minimize()
    bounds = [(math.log(low), math.log(high)) for low, high in ((1e-5, 1e5), (1e-5, 1e5), (1e-5, 0.5))]

    def loss(theta: Array) -> float:
        return -Posterior.of(Kernel(*np.exp(theta)), x, y).log_likelihood(y)

    found = minimize(loss, np.log([1.0, 1.0, 0.1]), method="L-BFGS-B", bounds=bounds)
    return Posterior.of(Kernel(*np.exp(found.x)), x, y)


def ucb(gains: Posterior, spread: Posterior, at: Array) -> Array:
    """Of rows; `spread` knows the points of this round too, whose gains are not known yet."""
    kappa = math.sqrt(0.2 + max(0.0, math.log(0.4 * len(gains.x))))
    return gains.mean(at) + kappa * spread.variance(at)


def choose(
    space: Space, history: Sequence[Interval], time: float, reward: float, pending: Sequence[Point], seed: int
) -> Point | None:
    """Keys for a fork of a checkpoint with that time and reward; None before anything is known.

    `pending`: keys that other members were given in this round.
    """
    if not history:
        return None
    dimensions = bandit_dimensions(space)
    rows = list(history)[-MOST_ROWS:]
    given = np.array([[row.time, row.before] for row in rows])
    keys = np.array([[share(one, row.point[one.key]) for one in dimensions] for row in rows])
    low, span = given.min(0), given.max(0) - given.min(0) + 1e-8
    x = np.hstack([(given - low) / span, keys])
    gains = np.array([row.gain for row in rows])
    y = np.clip((gains - gains.mean()) / (gains.std() + 1e-8), -2, 2)
    here = (np.array([time, reward]) - low) / span
    model = fitted(x, y)
    spread = model
    if pending:
        others = np.array([[*here, *(share(one, point[one.key]) for one in dimensions)] for point in pending])
        both = np.vstack([x, others])
        spread = fitted(both, np.concatenate([y, np.zeros(len(pending))]))
    best = maximised(model, spread, here, len(dimensions), seed)
    return {one.key: value(one, part) for one, part in zip(dimensions, best, strict=True)}


def maximised(model: Posterior, spread: Posterior, here: Array, keys: int, seed: int) -> Array:
    """The highest of ten searches from random starts."""
    minimize, rng = scipy_minimize(), np.random.default_rng(seed)

    def loss(part: Array) -> float:
        return -float(ucb(model, spread, np.concatenate([here, part])[None])[0])

    found = [
        minimize(loss, rng.uniform(0, 1, keys), method="L-BFGS-B", bounds=[(0, 1)] * keys, options={"maxfun": 200})
        for _ in range(STARTS)
    ]
    return np.clip(min(found, key=lambda one: one.fun).x, 0, 1)


def bandit_dimensions(space: Space) -> tuple[Dimension, ...]:
    for dimension in space.dimensions:
        if dimension.range is None or dimension.when:
            raise SpecError(f"{dimension.key}: pb2 needs ranges without conditions; --algorithm pbt takes others too")
    return space.dimensions


def share(dimension: Dimension, value: float) -> float:
    """0 at the lower end of the range, 1 at the upper one."""
    assert dimension.range is not None
    low, high = dimension.range
    return math.log(value / low) / math.log(high / low) if dimension.log else (value - low) / (high - low)


def value(dimension: Dimension, part: float) -> float:
    assert dimension.range is not None
    low, high = dimension.range
    return within(dimension, low * (high / low) ** part if dimension.log else low + (high - low) * part)


def scipy_minimize() -> Any:
    try:
        from scipy.optimize import minimize
    except ImportError:
        raise SpecError('pb2 needs scipy, which is not installed: pip install "lmworks[tune]"') from None
    return minimize
