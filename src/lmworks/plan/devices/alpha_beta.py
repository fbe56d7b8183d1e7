"""The α–β model of a collective: seconds = α + β · bytes, in one regime of message sizes or in several.

α is the latency of an empty message, β the seconds that each byte adds; 1/β is the algorithm bandwidth (algbw) that
large messages approach. Libraries change protocol or algorithm with the size, so a fit may have up to three regimes,
each with its own α and β, where the data pay for the further parameters (Bayesian information criterion).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

MAX_REGIMES = 3
MIN_SIZES = 3  # of a regime, where there are several
NOISE_FLOOR = 0.05  # relative: differences below it do not justify a further regime
OUTLIER = 0.1  # relative: what lies farther off counts less (Huber): a point that other work on the machine disturbed
STUDENT_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # by degrees of freedom, from 1
COLUMNS = ("above", "alpha_us", "alpha_us_low", "alpha_us_high", "beta_ns", "beta_ns_low", "beta_ns_high")


@dataclass(frozen=True)
class Regime:
    """From messages of `above` bytes on; ranges are 95 % intervals, (nan, nan) of two points."""

    above: float
    alpha: float  # seconds
    beta: float  # seconds per byte
    alpha_range: tuple[float, float]
    beta_range: tuple[float, float]

    def seconds(self, nbytes: Any) -> Any:
        return self.alpha + self.beta * nbytes


@dataclass(frozen=True)
class AlphaBeta:
    regimes: tuple[Regime, ...]  # in order of size; the first counts from 0 on

    def seconds(self, nbytes: Any) -> NDArray[Any]:
        """Of messages of these sizes, each by the line of its regime."""
        nbytes = np.asarray(nbytes, dtype=float)
        took = self.regimes[0].seconds(nbytes)
        for regime in self.regimes[1:]:
            took = np.where(nbytes >= regime.above, regime.seconds(nbytes), took)
        return took

    @property
    def latency(self) -> float:
        """α of the smallest messages."""
        return self.regimes[0].alpha

    @property
    def last(self) -> Regime:
        """Of the largest messages."""
        return self.regimes[-1]

    def to_dict(self) -> dict[str, list[float]]:
        """Columns, for TOML and JSON; an interval that is not known is left as the value itself."""
        rows = []
        for regime in self.regimes:
            alpha, beta = (
                (value, *(end if np.isfinite(end) else value for end in ends))
                for value, ends in ((regime.alpha, regime.alpha_range), (regime.beta, regime.beta_range))
            )
            rows.append([regime.above, *(1e6 * value for value in alpha), *(1e9 * value for value in beta)])
        return {
            name: [float(f"{value:.5g}") for value in column]
            for name, column in zip(COLUMNS, zip(*rows, strict=True), strict=True)
        }

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        return cls(
            tuple(
                Regime(above, 1e-6 * a, 1e-9 * b, (1e-6 * a_low, 1e-6 * a_high), (1e-9 * b_low, 1e-9 * b_high))
                for above, a, a_low, a_high, b, b_low, b_high in zip(*(table[name] for name in COLUMNS), strict=True)
            )
        )


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """To the median time of each size, sizes in order; residuals are relative, as noise is, and outliers count less.

    Regimes need not join: a change of protocol is a jump.
    """
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    if len(x) < 2:
        raise ValueError("a line needs messages of two sizes")
    errors: dict[tuple[int, int], float] = {}

    def error(first: int, end: int) -> float:
        if (first, end) not in errors:
            alpha, beta = line(x[first:end], y[first:end])
            errors[first, end] = huber_loss((alpha + beta * x[first:end]) / y[first:end] - 1)
        return errors[first, end]

    def score(cuts: tuple[int, ...]) -> float:
        ends = (0, *cuts, len(x))
        total = sum(error(first, end) for first, end in pairwise(ends))
        parameters = 3 * len(cuts) + 2
        return float(len(x) * np.log(total / len(x) + NOISE_FLOOR**2) + parameters * np.log(len(x)))

    cuts = min(possible_cuts(len(x)), key=score)
    ends, regimes = (0, *cuts, len(x)), []
    for first, end in pairwise(ends):
        alpha, beta = line(x[first:end], y[first:end])
        above = float(np.sqrt(x[first - 1] * x[first])) if first else 0.0
        regimes.append(Regime(above, alpha, beta, *intervals(x[first:end], y[first:end], alpha, beta)))
    return AlphaBeta(tuple(regimes))


def possible_cuts(sizes: int) -> list[tuple[int, ...]]:
    """Where regimes may begin, each with at least MIN_SIZES sizes."""
    found: list[tuple[int, ...]] = [()]
    for cuts in found:  # grows while it is read
        if len(cuts) + 1 < MAX_REGIMES:
            first = cuts[-1] if cuts else 0
            found += [(*cuts, cut) for cut in range(first + MIN_SIZES, sizes - MIN_SIZES + 1)]
    return found


def line(x: NDArray[Any], y: NDArray[Any]) -> tuple[float, float]:
    """Huber's estimate of (α + βx)/y = 1 with α, β ≥ 0."""
    design, weights = np.stack([1 / y, x / y], axis=1), np.ones_like(y)
    for _ in range(20):
        alpha, beta = least_squares(design, np.sqrt(weights))
        weights = huber_weights(design @ (alpha, beta) - 1)
    return alpha, beta


def least_squares(design: NDArray[Any], root: NDArray[Any]) -> tuple[float, float]:
    """`root`: of the weights."""
    columns = design * root[:, np.newaxis]
    (alpha, beta), *_ = np.linalg.lstsq(columns, root, rcond=None)
    if alpha < 0 or beta < 0:  # then one of them is 0: the better of the two
        only = [float(column @ root / (column @ column)) for column in columns.T]
        left = [float(np.sum((value * column - root) ** 2)) for value, column in zip(only, columns.T, strict=True)]
        alpha, beta = (only[0], 0.0) if left[0] < left[1] else (0.0, only[1])
    return float(alpha), float(beta)


def huber_weights(residuals: NDArray[Any]) -> NDArray[Any]:
    return np.minimum(1.0, OUTLIER / np.maximum(np.abs(residuals), 1e-12))


def huber_loss(residuals: NDArray[Any]) -> float:
    """Squares up to OUTLIER, straight from there on."""
    size = np.abs(residuals)
    return float(np.sum(np.where(size <= OUTLIER, size**2, OUTLIER * (2 * size - OUTLIER))))


def intervals(
    x: NDArray[Any], y: NDArray[Any], alpha: float, beta: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """95 % intervals from the residuals of the line, by Student's t."""
    free = len(x) - 2
    if free < 1:
        return (np.nan, np.nan), (np.nan, np.nan)
    design = np.stack([1 / y, x / y], axis=1)
    residuals = design @ (alpha, beta) - 1
    weighted = design * huber_weights(residuals)[:, np.newaxis]
    spread = np.sqrt(huber_loss(residuals) / free * np.diag(np.linalg.pinv(weighted.T @ design)))
    a, b = (float(each) * (STUDENT_95[free - 1] if free <= len(STUDENT_95) else 2.1) for each in spread)
    return (max(0.0, alpha - a), alpha + a), (max(0.0, beta - b), beta + b)
