"""What `lmworks scaling fit --json` prints: one shape for every method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .fitting import Fit, outside, ranges_of
from .hyperparameter_laws import HyperparameterLaw
from .isoflop import IsoFlop

WORST = 3  # residuals that are named


def law_result(fit: Fit, optimum: dict[str, Any], extra: Sequence[str] = ()) -> dict[str, Any]:
    fitted, points = fit.fitted, fit.points
    return finite(
        {
            "method": fitted.law.name,
            "formula": fitted.law.formula,
            "params": fitted.params,
            "interval": fitted.interval,
            "level": fitted.level,
            "optimum": optimum,
            "holdout_error": fit.holdout["error"] if fit.holdout else None,
            "holdout": dict(fit.holdout) if fit.holdout else None,
            "derived": derived(fit),
            "points": len(points),
            "trunks": None if points.trunk is None else int(points.trunk.max()) + 1,
            "n_convention": fitted.convention,
            "objective": {"huber_sum": fit.objective, "delta": fit.delta},
            "starts": {"tried": fit.starts, "agree": fit.starts_agreeing},
            "residuals": residuals(fit),
            "warnings": [*fit.warnings, *fitted.outside(optimum), *extra],
        }
    )


def derived(fit: Fit) -> dict[str, float]:
    """Gadre et al.'s own parameters of tied exponents: E + (a·M^η + b·M^−η)·C^−η with C = 6ND."""
    if fit.fitted.law.name != "tied":
        return {}
    params = fit.fitted.params
    eta = params["alpha"] / 2
    return {"eta": eta, "a": params["A"] * 6**eta, "b": params["B"] * 6**eta}


def residuals(fit: Fit) -> dict[str, Any]:
    """Of log-loss, measured less predicted: about the relative error of the loss."""
    off = fit.fitted.residuals
    worst = np.argsort(-np.abs(off))[:WORST]
    loss, lines = fit.points.loss, fit.points.lines
    return {
        "rms": float(np.sqrt(np.mean(off**2))),
        "median": float(np.median(np.abs(off))),
        "worst": [
            {
                "line": None if lines is None else int(lines[row]),
                "loss": float(loss[row]),
                "predicted": float(loss[row] * np.exp(-off[row])),
            }
            for row in worst
        ],
    }


def isoflop_result(found: IsoFlop, optimum: dict[str, Any]) -> dict[str, Any]:
    from .bootstrap import interval

    spread = {}
    if len(found.draws):
        log_k, a = found.draws.T
        spread = {"k": np.exp(log_k), "a": a, "b": 1 - found.rule.exponent * a}
    return finite(
        {
            "method": "isoflop",
            "formula": "N* = k·C^a, D* ∝ C^b",
            "params": {"k": found.k, "a": found.a, "b": found.b},
            "interval": {name: interval(draws, found.level) for name, draws in spread.items()},
            "level": found.level,
            "optimum": optimum,
            "holdout_error": found.holdout_error,
            "budgets": [
                {"flops": one.flops, "runs": len(one.rows), "n": one.n, "least_loss": one.loss} for one in found.budgets
            ],
            "bias_without_noise": dict(found.bias) if found.bias else None,
            "points": len(found.points),
            "warnings": [*found.warnings, *outside(optimum, ranges_of(found.points))],
        }
    )


def hyperparameter_result(found: HyperparameterLaw, optimum: dict[str, Any]) -> dict[str, Any]:
    return finite(
        {
            "method": found.setting,
            "formula": f"{found.setting} = c·N^n_exponent·D^d_exponent",
            "params": dict(found.params),
            "interval": found.interval,
            "level": found.level,
            "optimum": optimum,
            "holdout_error": found.holdout_error,
            "best": list(found.places),
            "points": len(found.places),
            "warnings": list(found.warnings),
        }
    )


def finite(value: Any) -> Any:
    """null for what is not a number: JSON has no word for it."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
