"""Weights of a mixture: by size and temperature, and by a law fitted to small runs.

The law is that of Ye et al. (2024), "Data Mixing Laws": the loss on held-out text of one source is c + exp(a + t·w) in
the shares w of the mixture. It is convex, so the best mixture is found by descent on the simplex.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import DataError, SpecError

Vector = NDArray[np.float64]

DIGITS = 4  # of a weight that is printed
RIDGE = 1e-3
SPREAD = 1.5  # of mixtures to try: 1 with equal shares is uniform over all mixtures, more is nearer to the mean
DESCENT = 4000  # steps


def by_size(tokens: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Shares in proportion to tokens^(1/T): T = 1 is the natural mixture, a large one equal shares."""
    if temperature <= 0:
        raise SpecError(f"--temperature {temperature:g} is out of range: it must be more than 0")
    shares = np.array([float(count) for count in tokens.values()]) ** (1 / temperature)
    return rounded(dict(zip(tokens, shares / shares.sum(), strict=True)))


def rounded(weights: Mapping[str, float]) -> dict[str, float]:
    """To so many digits, none below the last of them: a source that is named takes part."""
    return {name: max(round(float(weight), DIGITS), 10**-DIGITS) for name, weight in weights.items()}


def mixtures_to_try(weights: Mapping[str, float], count: int, seed: int) -> list[dict[str, float]]:
    """The given mixture and random ones (RegMix, Liu et al. 2024): a Dirichlet distribution whose mean is half way to
    equal shares, so that small sources are tried with large shares too.
    """
    draw = np.random.default_rng(seed)
    shares = np.array(list(weights.values()))
    centre = (shares / shares.sum() + 1 / len(shares)) / 2
    others = [dict(zip(weights, row, strict=True)) for row in draw.dirichlet(SPREAD * len(shares) * centre, count - 1)]
    return [rounded(one) for one in [weights, *others]]


@dataclass(frozen=True)
class Law:
    """Loss of one held-out source: floor + exp(level + slopes · shares)."""

    floor: float
    level: float
    slopes: Vector

    def loss(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.floor + np.exp(self.level + shares @ self.slopes)

    def gradient(self, shares: Vector) -> Vector:
        return self.slopes * np.exp(self.level + shares @ self.slopes)


def fit_law(shares: NDArray[np.float64], losses: Vector) -> Law:
    """`shares`: (runs, sources). Given the floor the rest is linear; that of a grid with the least error is taken."""
    low, high = float(losses.min()), float(losses.max())
    floors = low - (high - low + 1e-6) * np.geomspace(0.02, 50, 120)
    laws = [linear_part(shares, losses, float(floor)) for floor in floors]
    return min(laws, key=lambda law: float(((law.loss(shares) - losses) ** 2).sum()))


def linear_part(shares: NDArray[np.float64], losses: Vector, floor: float) -> Law:
    """Least squares of log(loss − floor), weighted so that errors count as they do in the loss; centred slopes."""
    above = losses - floor
    rows = np.hstack([np.ones((len(shares), 1)), shares - shares.mean(axis=0)])
    weighted = rows * above[:, None] / above.mean()
    penalty = RIDGE * np.diag([0.0, *np.ones(shares.shape[1])])
    solution = np.linalg.solve(weighted.T @ weighted + penalty, weighted.T @ (np.log(above) * above / above.mean()))
    return Law(floor, float(solution[0] - shares.mean(axis=0) @ solution[1:]), solution[1:])


@dataclass(frozen=True)
class Fitted:
    weights: dict[str, float]
    predicted: dict[str, float]  # loss on each source under these weights
    left_out_error: float  # root mean square error of a run that the fit did not see
    spread: float  # standard deviation of the runs' losses: an error of this size says nothing


def fit(
    mixes: Sequence[Mapping[str, float]], losses: Sequence[Mapping[str, float]], target: Mapping[str, float]
) -> Fitted:
    """`losses`: of each run, by source. `target`: how much the loss on each source counts."""
    names = list(target)
    if len(mixes) < len(names) + 3:
        raise DataError(
            f"{len(mixes)} runs are too few for {len(names)} sources; try at least {2 * len(names) + 3} mixtures"
        )
    shares = np.array([[mix.get(name, 0.0) for name in names] for mix in mixes])
    shares /= shares.sum(axis=1, keepdims=True)
    table = np.array([[run[name] for name in names] for run in losses])
    importance = np.array([target[name] for name in names])
    importance = importance / importance.sum()
    laws = [fit_law(shares, column) for column in table.T]
    best = descend(laws, importance)
    errors = [row @ importance - left_out(shares, table, importance, at) for at, row in enumerate(table)]
    return Fitted(
        weights=rounded(dict(zip(names, best, strict=True))),
        predicted={name: float(law.loss(best)) for name, law in zip(names, laws, strict=True)},
        left_out_error=float(np.sqrt(np.mean(np.square(errors)))),
        spread=float((table @ importance).std()),
    )


def left_out(shares: NDArray[np.float64], table: NDArray[np.float64], importance: Vector, at: int) -> float:
    """The weighted loss that the other runs predict for this one."""
    laws = [fit_law(np.delete(shares, at, 0), np.delete(column, at)) for column in table.T]
    return float(sum(weight * law.loss(shares[at]) for weight, law in zip(importance, laws, strict=True)))


def descend(laws: Sequence[Law], importance: Vector) -> Vector:
    """Exponentiated gradient from equal shares."""
    shares = np.full(len(importance), 1 / len(importance))
    for step in range(DESCENT):
        slope = sum(weight * law.gradient(shares) for weight, law in zip(importance, laws, strict=True))
        slope = np.asarray(slope) - float(np.dot(slope, shares))
        scale = max(float(np.abs(slope).max()), 1e-12)
        shares = shares * np.exp(-slope / scale * 0.5 / np.sqrt(step + 1))
        shares /= shares.sum()
    return shares
