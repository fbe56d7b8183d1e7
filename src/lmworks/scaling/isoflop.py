"""Iso-FLOP parabolas (Hoffmann et al.'s second approach): of every budget the size of least loss, then N* = k·C^a.

The loss along a budget is no parabola in log N, so sizes that are far from the minimum, or more on one side of it, move
it. How much is computed: a law is fitted to the same runs, and its own losses, without noise, are given to the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import SpecError
from .bootstrap import LEVEL, REPLICATES, correction, interval
from .fitting import fit_law
from .huber import Array
from .laws import law_of
from .optimum import FlopRule, exponents, optimum
from .points import Points, budgets

LEAST = 3  # sizes of a budget
BIASED = 0.05  # of N*: more than that is said


@dataclass(frozen=True)
class Budget:
    flops: float
    rows: NDArray[np.intp]
    n: float  # of least loss
    loss: float


@dataclass(frozen=True)
class IsoFlop:
    """log N* = log k + a·log C."""

    points: Points
    budgets: tuple[Budget, ...]
    k: float
    a: float
    draws: Array  # (replicates, 2): log k, a
    level: float
    rule: FlopRule  # what a token costs
    bias: Mapping[str, float] | None  # of N* at the largest budget (relative) and of a, without noise
    holdout_error: float | None
    warnings: tuple[str, ...]

    def optimum(self, flops: float) -> dict[str, Any]:
        n = np.asarray(self.k * flops**self.a)
        d = flops / self.rule.per_token(n)
        found: dict[str, Any] = {"flops": flops, "n": float(n), "d": float(d), "tokens_per_param": float(d / n)}
        found |= {"loss": None, "n_exponent": self.a, "d_exponent": self.b}
        if len(self.draws):
            each = np.exp(self.draws[:, 0] + self.draws[:, 1] * np.log(flops))
            tokens = flops / self.rule.per_token(each)
            spread = {"n": each, "d": tokens, "tokens_per_param": tokens / each}
            spread |= {"n_exponent": self.draws[:, 1], "d_exponent": 1 - self.rule.exponent * self.draws[:, 1]}
            found["interval"] = {name: interval(draws, self.level) for name, draws in spread.items()}
        return found

    @property
    def b(self) -> float:
        """D* grows as C^b."""
        return 1 - self.rule.exponent * self.a


def fit_isoflop(points: Points, *, replicates: int = REPLICATES, seed: int = 0, level: float = LEVEL) -> IsoFlop:
    n, flops = points.need("n", "--law isoflop"), points.need("flops", "--law isoflop")
    warnings: list[str] = []
    groups = usable_budgets(points, warnings)
    if len(groups) < 2:
        why = warnings[0] if warnings else "runs of one budget agree in flops to 5 %"
        raise SpecError(
            f"{points.source}: {len(groups)} iso-FLOP budgets have {LEAST} sizes and a minimum between them, "
            f"N* = k·C^a needs two; {why}"
        )
    spare = sum(map(len, groups)) > LEAST * len(groups)  # a parabola through 3 points leaves nothing to resample
    losses = np.concatenate([points.loss[None], resampled(points, groups, replicates if spare else 0, seed)])
    log_k, a, minima = allocate(np.log(n), losses, flops, groups)
    held = None
    if len(groups) > 2:
        small_k, small_a, _ = allocate(np.log(n), losses[:1], flops, groups[:-1])
        last = groups[-1]
        held = float(abs(np.expm1(small_k[0] + small_a[0] * np.log(mean_flops(flops, last)) - minima[0, -1])))
    found = tuple(
        Budget(mean_flops(flops, rows), rows, float(np.exp(at)), float(points.loss[rows].min()))
        for rows, at in zip(groups, minima[0], strict=True)
    )
    each = np.stack([log_k, a], 1)
    draws = each[1:][np.isfinite(each[1:]).all(1)]
    bias = noiseless_bias(points, groups)
    if bias and (abs(bias["n"]) > BIASED or abs(bias["a"]) > BIASED / 2):
        warnings.append(
            f"parabolas are biased at these sizes: on losses of the fitted law, without noise, they place N* of the "
            f"largest budget {bias['n']:+.0%} and the exponent {bias['a']:+.3f} off; --law chinchilla is not"
        )
    if not bias:
        warnings.append("the bias of parabolas cannot be estimated: too few runs for --law chinchilla")
    if any(len(np.unique(n[rows])) == LEAST for rows in groups):
        without = "" if spare else "; there are no intervals"
        warnings.append(f"a budget has 3 sizes: a parabola through 3 points shows no error of its own{without}")
    rule = FlopRule.of(points, law_of("chinchilla"))
    k = float(np.exp(log_k[0]))
    return IsoFlop(points, found, k, float(a[0]), draws, level, rule, bias, held, tuple(warnings))


def usable_budgets(points: Points, warnings: list[str]) -> list[NDArray[np.intp]]:
    """Rows of every budget with enough sizes and a minimum between the smallest and the largest, least FLOPs first."""
    n, flops = points.need("n", ""), points.need("flops", "")
    number, found = budgets(flops), []
    for one in np.unique(number):
        rows = np.flatnonzero(number == one)
        if len(np.unique(n[rows])) < LEAST:
            continue
        log_n = np.log(n[rows])
        at, opens = vertex(log_n[None], points.loss[rows][None], np.ones((1, len(rows))))
        budget = f"the budget of {mean_flops(flops, rows):.3g} FLOP"
        if not opens[0]:
            warnings.append(f"{budget} is left out: its parabola has no minimum")
        elif not log_n.min() <= at[0] <= log_n.max():
            warnings.append(f"{budget} is left out: its minimum, N = {np.exp(at[0]):.3g}, lies outside its sizes")
        else:
            found.append(rows)
    return found


def mean_flops(flops: Array, rows: NDArray[np.intp]) -> float:
    return float(np.exp(np.log(flops[rows]).mean()))


def vertex(log_n: Array, loss: Array, weights: Array) -> tuple[Array, NDArray[np.bool_]]:
    """log N of the minimum of weighted parabolas (replicates, rows), and whether they open upwards."""
    centre = log_n.mean(1, keepdims=True)
    powers = np.stack([np.ones_like(log_n), log_n - centre, (log_n - centre) ** 2], -1)  # (k, i, 3)
    normal = np.einsum("kip,ki,kiq->kpq", powers, weights, powers)
    right = np.einsum("kip,ki->kp", powers, weights * loss)
    solved = np.linalg.solve(normal + 1e-12 * np.eye(3), right[..., None])[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        return centre[:, 0] - solved[:, 1] / (2 * solved[:, 2]), solved[:, 2] > 0


def resampled(points: Points, groups: list[NDArray[np.intp]], replicates: int, seed: int) -> Array:
    """Losses (replicates, rows): the parabolas, with relative residuals drawn from those of all budgets.

    A parabola of few points shrinks its residuals by √((m − 3) / m). Runs of one trunk keep theirs, with one sign.
    """
    log_n, fitted = np.log(points.need("n", "")), points.loss.copy()
    for rows in groups:
        fitted[rows] = np.polynomial.Polynomial.fit(log_n[rows], points.loss[rows], 2)(log_n[rows])
    used = np.concatenate(groups)
    off = (points.loss / fitted - 1) * correction(len(used), 3 * len(groups))
    rng = np.random.default_rng(seed)
    if points.trunk is None:
        drawn = rng.choice(off[used], (replicates, len(points)))
    else:
        drawn = off * rng.choice([-1.0, 1.0], (replicates, int(points.trunk.max()) + 1))[:, points.trunk]
    return fitted * (1 + drawn)


def allocate(log_n: Array, losses: Array, flops: Array, groups: list[NDArray[np.intp]]) -> tuple[Array, Array, Array]:
    """log k and a of every row of losses, and the minima (replicates, budgets)."""
    columns = []
    for rows in groups:
        inner = losses[:, rows]
        at, opens = vertex(np.broadcast_to(log_n[rows], inner.shape), inner, np.ones_like(inner))
        columns.append(np.where(opens, at, np.nan))
    minima = np.stack(columns, 1)
    x = np.log([mean_flops(flops, rows) for rows in groups])
    centred = x - x.mean()
    a = (minima * centred).sum(1) / (centred**2).sum()
    return minima.mean(1) - a * x.mean(), a, minima


def noiseless_bias(points: Points, groups: list[NDArray[np.intp]]) -> dict[str, float] | None:
    try:
        fitted = fit_law(points, "chinchilla", replicates=0, hold_out=False).fitted
    except SpecError:
        return None
    n, d, flops = points.need("n", ""), points.need("d", ""), points.need("flops", "")
    clean = np.exp(fitted.law.log_loss(fitted.theta, {"n": n, "d": d}))
    log_k, a, _ = allocate(np.log(n), clean[None], flops, groups)
    largest = mean_flops(flops, groups[-1])
    truth = optimum(fitted.law, fitted.theta[None], largest, fitted.rule)
    guess = float(log_k[0] + a[0] * np.log(largest))
    slope, _ = exponents(fitted.law, fitted.theta[None], largest, fitted.rule)
    return {"n": float(np.expm1(guess - np.log(truth.n[0]))), "a": float(a[0] - slope[0])}
