"""Bootstrap replicates of a fit and the intervals that are read off them.

Rows get random weights (Dirichlet: the Bayesian bootstrap), whole trunks where runs branch off one another. Unlike
resampling with replacement no replicate loses all runs of one size, and unlike residual or wild bootstraps it holds for
a Huber loss whose δ is far below the residuals: such a fit passes through some points, so its residuals are no picture
of the noise. Coverage of planted laws by each of them: docs/log.md.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .huber import Array, Terms, fit

REPLICATES = 200
LEVEL = 0.9
FEW_TRUNKS = 6
MOST_ROWS = 100_000  # of replicates that are fitted together: 100 MB


def row_weights(rows: int, replicates: int, seed: int, trunk: NDArray[np.intp] | None = None) -> Array:
    """(replicates, rows), with a mean of 1."""
    units = rows if trunk is None else int(trunk.max()) + 1
    weights = np.random.default_rng(seed).dirichlet(np.ones(units), replicates) * units
    return weights if trunk is None else weights[:, trunk]


def replicate(
    terms: Terms,
    targets: Array,
    theta: Array,
    delta: float,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
    trunk: NDArray[np.intp] | None = None,
) -> Array:
    """θ of every replicate (replicates, parameters)."""
    weights = row_weights(len(targets), replicates, seed, trunk)
    together = max(1, MOST_ROWS // len(targets))
    parts = [weights[first : first + together] for first in range(0, replicates, together)]
    fits = [fit(terms, targets, np.repeat(theta[None], len(part), 0), delta, part, widest=4 * delta) for part in parts]
    return np.concatenate([one.theta for one in fits])


def widened(value: Array, draws: Array, factor: float) -> Array:
    """Draws of a quantity, as far from its value as the correction says.

    Of each quantity in its own space, and not of θ: the fits of replicates lie along a curved valley, and a θ that is
    moved straight away from its middle leaves the valley for laws of larger losses.
    """
    return value + factor * (draws - value)


def correction(rows: int, parameters: int, quadratic: float = 1.0, trunk: NDArray[np.intp] | None = None) -> float:
    """By how much replicates of few rows are too close together.

    Least squares shrinks residuals by √((n − p) / n), and Student's t has n − p degrees; both as far as the Huber loss
    is quadratic (`quadratic`: the share of rows within δ). Trunks differ in size, so E, A and α rest on them: three
    degrees fewer than there are trunks.
    """
    if trunk is None:
        degrees = max(1, rows - parameters)
        return 1 + quadratic * (math.sqrt(rows / degrees) * student(degrees) - 1)
    trunks = int(trunk.max()) + 1
    degrees = max(1, trunks - 3)
    return math.sqrt(trunks / degrees) * student(degrees)


def student(degrees: int, z: float = 1.6449) -> float:
    """t over z at 90 %, by Cornish and Fisher's expansion."""
    return 1 + (z**2 + 1) / (4 * degrees) + (5 * z**4 + 16 * z**2 + 3) / (96 * degrees**2)


def interval(draws: Array, level: float = LEVEL) -> list[float]:
    """Percentiles; of one quantity's draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return [float(low), float(high)]
