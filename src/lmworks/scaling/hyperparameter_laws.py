"""Laws of the learning rate and the batch size: the best value of every (N, D), then a power law through them.

Of runs that differ in the setting alone, the minimum of a parabola of loss over log setting is taken; then
log setting = log c + p·log N + q·log D by least squares (Bjorck et al. 2024, Li et al. 2025: arXiv 2503.04715).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import SpecError
from .bootstrap import LEVEL, REPLICATES, correction, interval, row_weights
from .huber import Array
from .isoflop import vertex
from .points import NAMES, Points, spelt

SAME = 0.02  # sizes and tokens that differ by less are one place


@dataclass(frozen=True)
class HyperparameterLaw:
    """setting = c · N^p · D^q; an exponent that the runs do not determine is left out (0)."""

    setting: str
    params: Mapping[str, float]
    draws: Mapping[str, Array]
    places: tuple[dict[str, float], ...]
    rms: float
    holdout_error: float | None
    warnings: tuple[str, ...]
    level: float = LEVEL

    def at(self, n: float, d: float) -> dict[str, Any]:
        value = self.params["c"] * n ** self.params["n_exponent"] * d ** self.params["d_exponent"]
        found: dict[str, Any] = {self.setting: value}
        if len(self.draws["c"]):
            each = self.draws["c"] * n ** self.draws["n_exponent"] * d ** self.draws["d_exponent"]
            found["interval"] = interval(each, self.level)
        return found

    @property
    def interval(self) -> dict[str, list[float]]:
        return {name: interval(values, self.level) for name, values in self.draws.items() if len(values)}


def fit_hyperparameter_law(
    points: Points, setting: str, *, replicates: int = REPLICATES, seed: int = 0, level: float = LEVEL
) -> HyperparameterLaw:
    n, d = points.need("n", f"--law {setting}"), points.need("d", f"--law {setting}")
    weights = np.concatenate([np.ones((1, len(points))), row_weights(len(points), replicates, seed, points.trunk)])
    kept, minima, warnings = best_settings(points, setting, weights)
    first = np.array([rows[0] for rows in kept], dtype=np.intp)
    logs = {"n": np.log(n[first]), "d": np.log(d[first])}
    names = identified(logs)
    if len(kept) <= len(names) + 1:
        edge = f" ({warnings[0]})" if warnings else ""
        raise SpecError(
            f"{points.source}: the best {setting} is known at {len(kept)} pairs of n and d; a law of "
            f"{' and '.join(names) or 'n'} needs {max(1, len(names)) + 2}{edge}"
        )
    x = np.stack([np.ones(len(kept)), *(logs[name] for name in names)], 1)
    between = np.concatenate([np.ones((1, len(kept))), row_weights(len(kept), replicates, seed + 1)])
    solved = np.stack([weighted(x, row, weight) for row, weight in zip(minima, between, strict=True)])
    solved[1:] = solved[0] + correction(len(kept), x.shape[1]) * (solved[1:] - solved[0])
    columns = dict(zip(["log_c", *names], solved.T, strict=True))
    zero = np.zeros(len(solved))
    values = {"c": np.exp(columns["log_c"]), "n_exponent": columns.get("n", zero), "d_exponent": columns.get("d", zero)}
    return HyperparameterLaw(
        setting,
        {name: float(found[0]) for name, found in values.items()},
        {name: found[1:] for name, found in values.items()},
        tuple(
            {"n": float(n[row]), "d": float(d[row]), setting: float(np.exp(at)), "runs": float(len(rows))}
            for row, at, rows in zip(first, minima[0], kept, strict=True)
        ),
        float(np.sqrt(np.mean((x @ solved[0] - minima[0]) ** 2))),
        largest_held_out(x, minima[0], n[first] * d[first]),
        tuple(warnings),
        level,
    )


def tuned_hyperparameter_law(points: Points, setting: str) -> HyperparameterLaw | None:
    """Its law, where the runs tried several values at enough sizes; None where they did not."""
    try:
        found = fit_hyperparameter_law(points, setting)
    except SpecError:
        return None
    return found if all(place["runs"] >= 3 for place in found.places) else None


def best_settings(points: Points, setting: str, weights: Array) -> tuple[list[NDArray[np.intp]], Array, list[str]]:
    """Rows of the pairs of N and D whose best setting is known; its logs (weights, pairs); what was left out."""
    found = spelt(points.columns, setting)
    if not found:
        names = ", ".join(NAMES[setting][1:])
        raise SpecError(f"{points.source}: --law {setting} needs a column `{setting}` (or {names})")
    values = np.log(points.number(found[0]))
    if len(np.unique(values)) == 1:
        raise SpecError(
            f"{points.source}: all runs have {setting} = {np.exp(values[0]):.4g}; runs with others give a law of it"
        )
    n, d = points.need("n", ""), points.need("d", "")
    kept, best, warnings = [], [], []
    for rows in places(n, d):
        at = best_setting(values[rows], points.loss[rows], weights[:, rows])
        if at is None:
            where = f"N = {n[rows[0]]:.3g}, D = {d[rows[0]]:.3g}"
            warnings.append(f"{where} is left out: the best {setting} lies at the edge of what was tried")
        else:
            kept.append(rows)
            best.append(at)
    if alone := sum(len(np.unique(values[rows])) == 1 for rows in kept):
        warnings.append(f"{alone} of {len(kept)} pairs of n and d have one {setting}: it is taken as tuned already")
    return kept, np.stack(best, 1) if best else np.zeros((len(weights), 0)), warnings


def largest_held_out(x: Array, logs: Array, work: Array) -> float | None:
    """Relative error of the pair of most N × D, predicted from the others."""
    if len(x) <= x.shape[1] + 1:
        return None
    last = int(np.argmax(work))
    rest = np.arange(len(x)) != last
    predicted = x[last] @ weighted(x[rest], logs[rest], np.ones(int(rest.sum())))
    return float(abs(np.expm1(predicted - logs[last])))


def places(n: Array, d: Array) -> list[NDArray[np.intp]]:
    """Rows of each pair of N and D."""
    keys = np.stack([np.round(np.log(n) / SAME), np.round(np.log(d) / SAME)], 1)
    number = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
    return [np.flatnonzero(number == one) for one in range(number.max() + 1)]


def best_setting(values: Array, loss: Array, weights: Array) -> Array | None:
    """Log of the best value for every row of weights; a place with one run is taken as tuned already."""
    tried = np.unique(values)
    if len(tried) == 1:
        return np.full(len(weights), values[0])
    if len(tried) < 3 or loss[values == tried[0]].min() <= loss.min() or loss[values == tried[-1]].min() <= loss.min():
        return None
    order = np.argsort(loss)
    near = np.abs(values - values[order[0]]) <= 2 * np.median(np.diff(tried)) + 1e-9  # where a parabola holds
    shape = (len(weights), int(near.sum()))
    at, opens = vertex(np.broadcast_to(values[near], shape), np.broadcast_to(loss[near], shape), weights[:, near])
    if not opens[0] or not tried[0] <= at[0] <= tried[-1]:
        return None
    return np.where(opens, np.clip(at, tried[0], tried[-1]), at[0])


def identified(logs: Mapping[str, Array]) -> list[str]:
    """Of n and d, what varies, and varies apart from the other."""
    names = [name for name, values in logs.items() if len(values) and np.ptp(values) > 0.1]
    if len(names) == 2:
        tied = abs(np.corrcoef(logs["n"], logs["d"])[0, 1]) > 0.99
        return ["n"] if tied or len(logs["n"]) < 4 else names
    return names


def weighted(x: Array, y: Array, weight: Array) -> Array:
    root = np.sqrt(weight)
    return np.asarray(np.linalg.lstsq(x * root[:, None], y * root, rcond=None)[0], dtype=float)
