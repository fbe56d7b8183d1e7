"""Learning curves: the loss of a trial at its last step, predicted from its first steps, with an interval.

L(t) = L∞ + a·t^−b. For a given b the other two are linear, so b is searched on a grid and the fit needs no start
(variable projection). The interval is a bootstrap of the residuals. A power law does not know of a learning-rate decay
to come: `predicted_end` corrects it by how far the same forecast was off for trials that have finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EXPONENTS = np.geomspace(0.03, 3.0, 160)
LEAST_POINTS = 4  # three parameters, and one to see a residual
DRAWS = 200


@dataclass(frozen=True)
class Forecast:
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class PowerLaw:
    """Of one curve or of many: each field has an entry a curve."""

    floor: Array  # L∞
    scale: Array  # a
    exponent: Array  # b

    def __call__(self, step: Array | float) -> Array:
        return self.floor + self.scale * np.asarray(step, dtype=float)[..., None] ** -self.exponent


def fit(steps: Array, losses: Array) -> PowerLaw:
    """Least squares, of each column of `losses` (steps, curves). L∞ ≥ 0 and a ≥ 0: the loss neither becomes negative
    nor rises; where the optimum would, it lies on that bound."""
    x = steps ** -EXPONENTS[:, None]  # (exponents, steps)
    mean_x, mean_y = x.mean(1, keepdims=True), losses.mean(0)
    spread = ((x - mean_x) ** 2).sum(1, keepdims=True)
    scale = (x - mean_x) @ (losses - mean_y) / spread  # (exponents, curves)
    floor = mean_y - scale * mean_x
    error = ((losses - mean_y) ** 2).sum(0) - scale**2 * spread
    through_zero = x @ losses / (x**2).sum(1, keepdims=True)  # L∞ = 0
    error_zero = (losses**2).sum(0) - through_zero**2 * (x**2).sum(1, keepdims=True)
    below, rising = floor < 0, scale < 0
    error = np.where(below, error_zero, np.where(rising, ((losses - mean_y) ** 2).sum(0), error))
    floor = np.where(below, 0.0, np.where(rising, mean_y, floor))
    scale = np.where(below, through_zero, np.where(rising, 0.0, scale))
    best, curve = error.argmin(0), np.arange(losses.shape[1])
    return PowerLaw(floor[best, curve], scale[best, curve], EXPONENTS[best])


def forecast(curve: Mapping[int, float], last: int, level: float = 0.9, seed: int = 0) -> Forecast | None:
    """The loss at step `last`, and the interval that holds it with probability `level` if the curve is a power law
    with independent noise. None of fewer than four points or of a loss that is not finite."""
    steps = np.array(sorted(curve), dtype=float)
    losses = np.array([curve[int(step)] for step in steps])
    if len(steps) < LEAST_POINTS or not np.isfinite(losses).all():
        return None
    law = fit(steps, losses[:, None])
    fitted = law(steps)[:, 0]
    residuals = (losses - fitted) * np.sqrt(len(steps) / (len(steps) - 3))  # three parameters were fitted
    rng = np.random.default_rng(seed)
    drawn = fitted[:, None] + rng.choice(residuals, (len(steps), DRAWS))
    ends = fit(steps, drawn)(float(last)) + rng.choice(residuals, DRAWS)
    low, high = np.quantile(ends, [(1 - level) / 2, (1 + level) / 2])
    centre = float(law(float(last))[0])
    return Forecast(centre, min(float(low), centre), max(float(high), centre))


def predicted_end(
    curve: Mapping[int, float], finished: Sequence[Mapping[int, float]], last: int, level: float = 0.9
) -> Forecast | None:
    """`forecast`, shifted and widened by its errors for finished trials that were cut at the same step."""
    mine = forecast(curve, last, level)
    if mine is None:
        return None
    errors = []
    for other in finished:
        cut = {step: loss for step, loss in other.items() if step <= max(curve)}
        guess = forecast(cut, last, level) if last in other else None
        if guess is not None:
            errors.append(other[last] - guess.loss)
    if not errors:
        return mine
    low, high = np.quantile(errors, [(1 - level) / 2, (1 + level) / 2])
    shift = float(np.median(errors))
    return Forecast(mine.loss + shift, mine.low + float(low), mine.high + float(high))
