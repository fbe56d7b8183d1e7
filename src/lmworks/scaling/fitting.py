"""Fit a law to points: parameters with intervals, the optimum, the error on the largest runs, and what to doubt."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..spec.errors import SpecError
from .bootstrap import FEW_TRUNKS, LEVEL, REPLICATES, correction, interval, replicate, widened
from .huber import DELTA, Array, fit
from .laws import Law, law_of, variables_of
from .optimum import FlopRule, exponents, optimum
from .points import Points, budgets, spelt

LARGEST = 0.8  # of the most FLOPs: runs that the hold-out leaves out
FEW_SPARE = 3  # points beyond the parameters
FLAT = 1e-3  # an exponent below it: a hundred times the size changes that term by less than 0.5 %
FAR = 10.0  # times beyond the largest run: further than that is called far


@dataclass(frozen=True)
class FittedLaw:
    """A law and what is known of its error; enough to recommend a run, without the points."""

    law: Law
    theta: Array  # (parameters,)
    draws: Array  # (replicates, parameters); none where only the parameters were published
    spread: float  # of the replicates: what they must be apart to stand for intervals, over what they are
    residuals: Array  # of log-loss: what one run differs from the law
    ranges: Mapping[str, tuple[float, float]]  # n, d, flops, seq, lr of the runs
    rule: FlopRule = FlopRule()
    convention: str = "total"
    level: float = LEVEL
    source: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def params(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.law.natural(self.theta).items()}

    @property
    def interval(self) -> dict[str, list[float]]:
        if not len(self.draws):
            return {}
        apart = widened(self.theta, self.draws, self.spread)
        return {name: interval(values, self.level) for name, values in self.law.natural(apart).items()}

    def predict(self, **variables: float) -> dict[str, Any]:
        """Loss of a run; `interval` is of the law's value, `run_interval` of one more run with its own noise."""
        at = {name: np.asarray(float(value)) for name, value in variables.items()}
        found: dict[str, Any] = {"loss": float(np.exp(self.law.log_loss(self.theta, at)))}
        if len(self.draws):
            logs = self.log_losses(at)
            found |= {"interval": interval(np.exp(logs), self.level), "run_interval": self.run_interval(logs)}
        return found

    def losses(self, variables: Mapping[str, Any]) -> Array:
        """Of every replicate, at a run's n, d, flops and seq."""
        return np.exp(self.log_losses({name: np.asarray(float(variables[name])) for name in self.law.variables}))

    def log_losses(self, at: Mapping[str, Array]) -> Array:
        """Of every replicate, (replicates,); of runs in a column, (runs, replicates)."""
        return widened(self.law.log_loss(self.theta, at), self.law.log_loss(self.draws, at), self.spread)

    def run_interval(self, logs: Array) -> list[float] | None:
        if not len(self.residuals):
            return None
        noisy = (logs[:, None] + self.residuals[None, :]).ravel()
        return interval(np.exp(noisy), self.level)

    def optimum(self, flops: float, seq: float = 0.0) -> dict[str, Any]:
        """N, D and loss of the best run of a budget, with intervals."""
        if "n" not in self.law.variables:
            return {"flops": flops, "n": None, "d": None, **self.predict(flops=flops)}
        best = optimum(self.law, self.theta[None], flops, self.rule, seq)
        slope_n, slope_d = exponents(self.law, self.theta[None], flops, self.rule, seq)
        values = {
            "n": best.n,
            "d": best.d,
            "tokens_per_param": best.d / best.n,
            "loss": np.exp(best.log_loss),
            "n_exponent": slope_n,
            "d_exponent": slope_d,
        }
        found: dict[str, Any] = {"flops": flops, **{name: float(value[0]) for name, value in values.items()}}
        if seq:
            found["seq"] = seq
        if len(self.draws):
            each = optimum(self.law, self.draws, flops, self.rule, seq)
            slope_n, slope_d = exponents(self.law, self.draws, flops, self.rule, seq)
            sizes = {"n": each.n, "d": each.d, "tokens_per_param": each.d / each.n}
            logs = widened(best.log_loss, each.log_loss, self.spread)
            apart = {"loss": np.exp(logs)}
            for name, draws in sizes.items():
                apart[name] = np.exp(widened(np.log(values[name]), np.log(draws), self.spread))
            for name, slope in (("n_exponent", slope_n), ("d_exponent", slope_d)):
                apart[name] = widened(values[name], slope, self.spread)
            found["interval"] = {name: interval(draws, self.level) for name, draws in apart.items()}
            found["run_interval"] = self.run_interval(logs)
        return found

    def outside(self, best: Mapping[str, Any]) -> list[str]:
        """Warnings where an optimum lies beyond the runs."""
        return outside(best, self.ranges)


@dataclass(frozen=True)
class Fit:
    fitted: FittedLaw
    points: Points
    objective: float  # Σ huber
    delta: float
    holdout: Mapping[str, Any] | None
    starts_agreeing: int
    starts: int
    warnings: tuple[str, ...] = field(default=())


def fit_law(
    points: Points,
    law: Law | str,
    *,
    delta: float = DELTA,
    replicates: int = REPLICATES,
    seed: int = 0,
    level: float = LEVEL,
    hold_out: bool = True,
) -> Fit:
    law = law_of(law) if isinstance(law, str) else law
    if law.name == "compute":
        points = best_of_budgets(points)
    check(points, law)
    variables = variables_of(law, points)
    terms, targets = law.of(variables), np.log(points.loss)
    found = fit(terms, targets, law.starts(variables, points.loss), delta)
    theta = found.theta[np.argmin(found.objective)]
    objective = float(found.objective.min())
    residuals = targets - terms.log_loss(theta[None])[0]
    draws, spread = np.zeros((0, len(theta))), 1.0
    trunks = int(points.trunk.max()) + 1 if points.trunk is not None else len(points)
    if replicates and trunks > 2:
        draws = replicate(terms, targets, theta, delta, replicates=replicates, seed=seed, trunk=points.trunk)
        quadratic = float((np.abs(residuals) <= delta).mean())
        spread = correction(len(points), len(theta), quadratic, points.trunk)
    ranges = ranges_of(points)
    for column in spelt(points.columns, "lr")[:1]:
        with suppress(SpecError):  # some runs do not say theirs
            ranges["lr"] = (float(points.number(column).min()), float(points.number(column).max()))
    fitted = FittedLaw(
        law, theta, draws, spread, residuals, ranges, FlopRule.of(points, law), points.convention, level, points.source
    )
    return Fit(
        fitted,
        points,
        objective,
        delta,
        holdout(points, law, delta) if hold_out else None,
        int((found.objective < 1.001 * objective + 1e-15).sum()),
        len(found.objective),
        tuple(fit_warnings(points, fitted)),
    )


def ranges_of(points: Points) -> dict[str, tuple[float, float]]:
    return {
        name: (float(values.min()), float(values.max()))
        for name in ("n", "d", "flops", "seq")
        if (values := getattr(points, name)) is not None
    }


def outside(best: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> list[str]:
    """Warnings where an optimum lies beyond the runs."""
    found = []
    for name, word in (("n", "parameters"), ("d", "tokens"), ("flops", "FLOPs")):
        if best.get(name) is None or name not in ranges:
            continue
        low, high = ranges[name]
        value = best[name]
        if value > 1.01 * high or value < 0.99 * low:
            beyond = value / high if value > high else low / value
            far = "far " if beyond > FAR else ""
            found.append(
                f"the optimum lies {far}outside the data: {value:.3g} {word}, "
                f"the runs have {low:.3g} to {high:.3g} ({beyond:.3g} times beyond)"
            )
    return found


def check(points: Points, law: Law) -> None:
    """Refuses what no fit can answer."""
    count = len(law.parameters)
    if len(points) <= count:
        fewer = [name for name in ("tied", "compute") if len(law_of(name).parameters) < min(count, len(points))]
        hint = f", or --law {fewer[0]} ({len(law_of(fewer[0]).parameters)} parameters)" if fewer else ""
        raise SpecError(
            f"{points.source}: {len(points)} point{'s' * (len(points) != 1)} for the {count} parameters of --law "
            f"{law.name}; it needs at least {count + 1}{hint}"
        )
    words = {"n": "size (n)", "d": "token count (d)", "flops": "FLOP budget", "seq": "context length (seq)"}
    for name in law.variables:
        values = points.need(name, f"--law {law.name}")
        if values.max() < 1.001 * values.min():
            raise SpecError(
                f"{points.source}: all {len(points)} points have one {words[name]}, {values[0]:.4g}; "
                f"--law {law.name} needs runs that differ in it"
            )


def best_of_budgets(points: Points) -> Points:
    """L(C) is of the best run of every budget; where sizes are not known, of all runs."""
    flops = points.need("flops", "--law compute")
    if points.n is None:
        return points
    number = budgets(flops)
    best = [rows[np.argmin(points.loss[rows])] for rows in (np.flatnonzero(number == one) for one in np.unique(number))]
    return points.take(np.array(best))


def holdout(points: Points, law: Law, delta: float) -> dict[str, Any] | None:
    """The runs of most FLOPs, predicted from the others; None where the others are too few."""
    flops = points.need("flops", "a hold-out")
    kept = flops < LARGEST * flops.max()
    small, large = points.take(kept), points.take(~kept)
    try:
        check(small, law)
    except SpecError:
        return None
    variables = variables_of(law, small)
    found = fit(law.of(variables), np.log(small.loss), law.starts(variables, small.loss), delta)
    theta = found.theta[np.argmin(found.objective)]
    predicted = np.exp(law.log_loss(theta, variables_of(law, large)))
    errors = predicted / large.loss - 1
    return {
        "error": float(np.abs(errors).mean()),
        "bias": float(errors.mean()),
        "rows": len(large),
        "flops": [float(large.need("flops", "").min()), float(large.need("flops", "").max())],
        "beyond": float(flops.max() / small.need("flops", "").max()),
    }


def repeated(points: Points) -> int:
    """Rows that say nothing new: all numbers are those of an earlier row."""
    names = ("loss", "n", "d", "flops", "seq")
    rows = np.stack([values for name in names if (values := getattr(points, name)) is not None], 1)
    return len(rows) - len(np.unique(rows, axis=0))


def fit_warnings(points: Points, fitted: FittedLaw) -> list[str]:
    """What makes this fit less certain than its figures look."""
    found, law, draws = list(points.notes), fitted.law, fitted.draws
    for name, value in fitted.params.items():
        if name not in law.coefficients and name not in ("Nc", "Dc") and value < FLAT:
            found.append(
                f"{name} is {value:.3g}: the loss does not fall with more of what it is the exponent of, and the "
                "optimum means nothing; check the columns, and that runs ended at their best"
            )
    if copies := repeated(points):
        found.append(
            f"{copies} rows have the n, d and loss of another: copies count as runs of their own and make intervals "
            "too narrow; leave them out"
        )
    spare = len(points) - len(law.parameters)
    if len(draws) and spare < FEW_SPARE:
        found.append(
            f"{len(points)} points for {len(law.parameters)} parameters: intervals rest on {spare} degree"
            f"{'s' * (spare > 1)} of freedom, and are little more than a guess"
        )
    if points.trunk is not None and (trunks := int(points.trunk.max()) + 1) < FEW_TRUNKS:
        found.append(
            f"{trunks} trunks: intervals rest on so few independent runs"
            if trunks > 2
            else f"{trunks} trunks are too few for intervals: runs of one trunk are not independent"
        )
    if {"n", "d"} <= set(law.variables) and points.n is not None and points.d is not None:
        ratio = points.d / points.n
        if ratio.max() < 2 * ratio.min():
            found.append(
                f"all runs have {ratio.min():.3g} to {ratio.max():.3g} tokens a parameter: the terms of N and D cannot "
                "be told apart; add runs with four times more and fewer tokens"
            )
    if points.n is not None and points.n_no_embed is not None:
        share = 1 - (points.n_no_embed / points.need("n", "")).min()
        if share > 0.2 and fitted.convention == "total":
            found.append(
                f"embeddings are up to {share:.0%} of the parameters: exponents depend on whether they count "
                "(Pearce & Song 2024, arXiv 2406.12907); compare --params no-embed"
            )
    if "seq" not in law.variables and points.seq is not None and points.seq.max() > 1.01 * points.seq.min():
        found.append("context lengths differ between runs, and this law has no term for them: --law context has")
    constant = law.coefficients[0]
    if len(draws) and constant in ("E", "L_inf"):
        apart = widened(fitted.theta, draws, fitted.spread)
        gone = float((law.natural(apart)[constant] < 0.05 * points.loss.min()).mean())
        if gone > 0.05:
            found.append(
                f"{constant} is not determined: in {gone:.0%} of the replicates it is almost 0; predictions far beyond "
                "the largest run rest on it"
            )
    if law.name == "kaplan" and fitted.convention == "total":
        found.append("Kaplan's N leaves embeddings out; --params no-embed takes a column that does")
    if law.name == "compute" and points.n is not None:
        found.append(
            "the best run of each budget is taken: the minimum over noisy runs lies below their law, the more so the "
            "more runs a budget has"
        )
    return found
