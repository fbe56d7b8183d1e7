"""A downstream metric as a function of loss: metric = ε − k·exp(−γ·L) (Gadre et al. 2024, equation 5).

For a given γ the other two are a straight line, so γ alone is searched: on a grid, for all replicates at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spec.errors import SpecError
from .bootstrap import LEVEL, REPLICATES, interval, row_weights
from .huber import Array
from .points import Points

PARAMETERS = 3
GAMMAS = np.geomspace(0.05, 20.0, 600)


@dataclass(frozen=True)
class Downstream:
    column: str
    epsilon: float
    k: float
    gamma: float
    draws: Array  # (replicates, 3)
    rms: float
    losses: tuple[float, float]  # of the runs
    warnings: tuple[str, ...]
    level: float = LEVEL

    def at(self, loss: float, losses: Array) -> dict[str, Any]:
        """The metric at a loss; `losses`: that of the law's replicates, each paired with one of the metric's own."""
        found: dict[str, Any] = {"value": float(metric(np.array([self.epsilon, self.k, self.gamma]), loss))}
        if count := min(len(losses), len(self.draws)):
            found["interval"] = interval(metric(self.draws[:count], losses[:count]), self.level)
        return found

    def to_dict(self) -> dict[str, Any]:
        names = ("epsilon", "k", "gamma")
        spread = {name: interval(self.draws[:, index], self.level) for index, name in enumerate(names)}
        return {
            "metric": self.column,
            "formula": "metric = epsilon - k·exp(-gamma·L)",
            "params": {"epsilon": self.epsilon, "k": self.k, "gamma": self.gamma},
            "interval": spread if len(self.draws) else {},
            "rms": self.rms,
        }


def metric(parameters: Array, loss: Array | float) -> Array:
    epsilon, k, gamma = np.moveaxis(parameters, -1, 0)
    result: Array = epsilon - k * np.exp(-gamma * np.asarray(loss))
    return result


def fit_downstream(
    points: Points, column: str, *, replicates: int = REPLICATES, seed: int = 0, level: float = LEVEL
) -> Downstream:
    values = points.number(column)
    if len(points) <= PARAMETERS:
        raise SpecError(f"{points.source}: {len(points)} points for the 3 parameters of --score {column}; 4 are needed")
    if points.loss.max() < 1.001 * points.loss.min():
        raise SpecError(f"{points.source}: all losses are {points.loss[0]:.4g}; --score needs runs that differ")
    weights = np.concatenate([np.ones((1, len(points))), row_weights(len(points), replicates, seed, points.trunk)])
    found = project(points.loss, values, weights)
    epsilon, k, gamma = (float(value) for value in found[0])
    rms = float(np.sqrt(np.mean((metric(found[0], points.loss) - values) ** 2)))
    warnings = []
    if gamma <= GAMMAS[1] or gamma >= GAMMAS[-2]:
        warnings.append(f"{column}: its curve against loss is not determined (gamma at the edge, {gamma:.3g})")
    losses = (float(points.loss.min()), float(points.loss.max()))
    return Downstream(column, epsilon, k, gamma, found[1:], rms, losses, tuple(warnings), level)


def project(loss: Array, values: Array, weights: Array) -> Array:
    """(replicates, 3): least squares over ε and k for every γ of the grid; the best γ."""
    low = loss.min()
    basis = np.exp(-np.outer(loss - low, GAMMAS))  # (points, gammas), at most 1
    total = weights.sum(1, keepdims=True)
    x, y = weights @ basis / total, weights @ values[:, None] / total
    xx, xy = weights @ basis**2 / total - x**2, (weights * values) @ basis / total - x * y
    yy = weights @ (values**2)[:, None] / total - y**2
    slope = xy / np.maximum(xx, 1e-30)
    best = np.argmin(yy - slope * xy, axis=1)
    rows = np.arange(len(weights))
    slope, gamma = slope[rows, best], GAMMAS[best]
    epsilon = y[:, 0] - slope * x[rows, best]
    return np.stack([epsilon, -slope * np.exp(gamma * low), gamma], 1)
