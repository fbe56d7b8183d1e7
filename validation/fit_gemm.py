"""Fit the constants of matrix products to measured ones, and say how far off they are.

    python validation/fit_gemm.py --data DIR            errors of a fit, on rows and systems that it has not seen
    python validation/fit_gemm.py --data DIR --write    the same, and write src/lmworks/plan/devices/gemm.toml

DIR holds aiconfigurator_gemm_bf16_measured.csv.gz (ai-dynamo/aiconfigurator, systems/data: bf16 products as
TensorRT-LLM runs them, 9 systems). A fifth of the rows, by a hash of system and shape, is kept out of every fit. A
system left out gets the constants of its family, or the mean of all others, as a GPU would that was never measured.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.plan.devices import rates
from lmworks.plan.devices.rates import gemm_seconds
from lmworks.spec import Gpu, catalogue
from lmworks_validation.components import PRODUCTS, products

SOURCE = "github:ai-dynamo/aiconfigurator@095f58a51c:aic-core/src/aiconfigurator_core/systems/data/*/gemm"
RESULT = Path(rates.__file__).with_name("gemm.toml")
# Where a constant lies before anything is measured, and how far from it it may reasonably be (in its logarithm, for
# shares in their log-odds).
PRIORS = {
    "ceiling": (0.85, 0.3), "wave": (0.5, 1.0), "ramp": (100.0, 0.5), "tile": (5.0, 0.7), "memory": (0.8, 0.1),
    "launch_us": (2.5, 0.2), "heat": (0.1, 1.0),
}  # fmt: skip
LARGEST = {"wave": 1.0, "memory": 0.92}  # shares, and what is the most of them
SCATTER = 0.05  # of a measurement: beyond it an error counts by its size, not by its square
INDEPENDENT = 300  # rows of one system err together, so they weigh as many against a prior

Table = np.ndarray  # columns m, n, k, seconds
Constants = dict[str, float]


def log_error(rows: Table, gpu: Gpu, fits: Mapping[str, Any]) -> np.ndarray:
    """Of a benchmark, which is not sustained work."""
    m, n, k, seconds = rows.T
    rate = dataclasses.replace(rates.gemm_rate(gpu, "bf16", fits), sustained=1.0)
    return np.log(gemm_seconds(m, k, n, rate) / seconds)


def encode(constants: Constants) -> np.ndarray:
    return np.array([np.log(v / (LARGEST[n] - v)) if n in LARGEST else np.log(v) for n, v in constants.items()])


def decode(point: np.ndarray) -> Constants:
    values = zip(PRIORS, point, strict=True)
    return {n: float(LARGEST[n] / (1 + np.exp(-v)) if n in LARGEST else np.exp(v)) for n, v in values}


def fit(rows: Table, gpu: Gpu) -> Constants:
    """Least squares by Levenberg and Marquardt, outliers and prior weighed as above."""
    start = encode({name: value for name, (value, _) in PRIORS.items()})
    prior = np.sqrt(len(rows) / INDEPENDENT) * SCATTER / np.array([spread for _, spread in PRIORS.values()])

    def residuals(point: np.ndarray) -> np.ndarray:
        error = log_error(rows, gpu, {"gpus": {gpu.name: decode(point)}})
        soft = np.sign(error) * SCATTER * np.sqrt(2 * (np.sqrt(1 + (error / SCATTER) ** 2) - 1))
        return np.concatenate([soft, prior * (point - start)])

    point, damping = start, 1.0
    now = residuals(point)
    for _ in range(60):
        steps = np.eye(len(point)) * 1e-3
        slope = np.stack([(residuals(point + step) - now) / 1e-3 for step in steps], axis=1)
        normal = slope.T @ slope
        trial = point - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope.T @ now)
        then = residuals(trial)
        if then @ then < now @ now:
            point, now, damping = trial, then, damping / 3
        else:
            damping *= 4
    return decode(point)


def with_best(constants: Constants, gpu: Gpu) -> Constants:
    """Beside the ceiling, its ratio to the best product of a published search, where there is one."""
    best = rates.best_matmul(tuple(rates.facts(gpu).get("matmul", ())), "bf16")
    peak = gpu.peak_flops("bf16") or 0.0
    return {**constants, "of_best": constants["ceiling"] * peak / best} if best else constants


def mean(group: list[Constants]) -> Constants:
    """Half-way between fits: geometric, a share by its odds."""
    middle = decode(np.mean([encode({name: one[name] for name in PRIORS}) for one in group], axis=0))
    ratios = [one["of_best"] for one in group if "of_best" in one]
    return {**middle, "of_best": float(np.exp(np.mean(np.log(ratios))))} if ratios else middle


def pooled(fitted: Mapping[str, Constants]) -> dict[str, Any]:
    """What is kept in gemm.toml: each GPU's constants, each family's, and those of a GPU of no family."""
    families: dict[str, list[Constants]] = defaultdict(list)
    for name, constants in fitted.items():
        families[rates.facts(catalogue()[name])["family"]].append(constants)
    means = {family: mean(group) for family, group in families.items()}
    return {"generic": mean(list(means.values())), "families": means, "gpus": dict(fitted)}


def errors(rows: Table, gpu: Gpu, fits: Mapping[str, Any]) -> dict[str, float]:
    """In percent."""
    off = 100 * np.abs(np.exp(log_error(rows, gpu, fits)) - 1)
    figures = {"median": np.median(off), "mape": off.mean(), "p90": np.percentile(off, 90)}
    return {name: round(float(figure), 1) for name, figure in figures.items()}


def write(fits: Mapping[str, Any], scores: Mapping[str, Mapping[str, Any]]) -> None:
    lines = [
        "# Constants of matrix products; what they mean is in rates.py. Written by validation/fit_gemm.py from bf16",
        f"# products that others measured ({SOURCE}).",
        "# Errors in percent: on rows kept out of the fit, and with the whole system left out.",
    ]

    def add(title: str, constants: Constants) -> None:
        lines.extend(["", f"[{title}]", *(f"{name} = {value:.4g}" for name, value in constants.items())])

    add("generic", fits["generic"])
    for family, constants in fits["families"].items():
        add(f"families.{family}", constants)
    for name, constants in fits["gpus"].items():
        add(f'gpus."{name}"', constants)
        for label in ("unseen_rows", "left_out"):
            figures = ", ".join(f"{key} = {value}" for key, value in scores[name][label].items())
            lines.append(f"{label} = {{ {figures} }}")
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    data, gpus = products(options.data / PRODUCTS), catalogue()
    fitted = {name: with_best(fit(rows.fitted, gpus[name]), gpus[name]) for name, rows in data.items()}
    fits = pooled(fitted)
    scores: dict[str, dict[str, Any]] = {}
    print(f"{'median / mean / p90 error, %':32}{'fitted rows':>20}{'unseen rows':>20}{'system left out':>20}")
    for name, rows in data.items():
        others = pooled({other: constants for other, constants in fitted.items() if other != name})
        scores[name] = {
            "seen": errors(rows.fitted, gpus[name], fits),
            "unseen_rows": errors(rows.unseen, gpus[name], fits),
            "left_out": errors(np.concatenate([rows.fitted, rows.unseen]), gpus[name], others),
        }
        print(f"{name:32}" + "".join(f"{' / '.join(map(str, s.values())):>20}" for s in scores[name].values()))
    if options.write:
        write(fits, scores)


if __name__ == "__main__":
    main()
