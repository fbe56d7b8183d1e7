"""Fit the constants of a step's time to what others measured, and write src/lmworks/plan/fitted.toml.

    python benchmarks/fit_time.py --data DIR

Least squares on log(predicted / measured), with a prior for every constant, every source weighing the same however
many rows it has. Rows that are suspect, or whose layout is inferred, are left out. Then the same once more for each
source, without it: those constants make a blind prediction of that source.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmworks.plan.bare import Bare
from lmworks.plan.case import Case
from lmworks.plan.constants import FITTED, Constants
from lmworks.plan.sources import SOURCES, Measured
from lmworks.plan.step import weigh

Array = NDArray[np.float64]
NUMBERS = {entry.name for entry in fields(Case) if "Number" in str(entry.type)}
OUTLIER = 0.15  # of log(predicted / measured): beyond it a row pulls no harder


@dataclass(frozen=True)
class Prior:
    """A constant before any run was seen: its logarithm is normal around log(value)."""

    name: str  # of a field of Constants, with a key after a dot where that is a table
    value: float
    sigma: float


PRIORS = (
    *(Prior(f"products.{gpu}", value, 0.15) for gpu, value in {
        "A100": 1.05, "H100": 1.15, "H100-SXM-96GB": 1.3, "H200": 1.15, "B200": 1.25, "V100": 1.05,
    }.items()),
    *(Prior(f"attention.{gpu}", 1.1, 0.15) for gpu in ("A100", "H100", "H200", "B200")),
    Prior("memory", 1.15, 0.2),
    *(Prior(f"launch_s.{name}", value, 0.5) for name, value in {
        "compiled": 10e-6, "eager": 20e-6, "megatron-deepspeed": 50e-6}.items()),
    Prior("uneven", 0.1, 0.5),
    Prior("step_s", 5e-3, 0.7),
    Prior("contention", 0.15, 0.7),
    Prior("links", 1.1, 0.2),
    Prior("network", 1.2, 0.3),
    Prior("jitter", 0.005, 0.7),
    *(Prior(f"software.{name}", 1.0, 0.05) for name in (
        "llm-foundry", "torchtitan", "torchtitan-compile", "torchtitan-2025", "megatron", "megatron-2021",
        "megatron-deepspeed",
    )),
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows of one source, those with the same model and words together, so that they are priced in one go."""

    rows: list[Measured]
    groups: list[tuple[NDArray[np.int64], Bare]]

    @classmethod
    def of(cls, rows: Iterable[Measured]) -> Table:
        rows = [row for row in rows if row.step_s and not row.suspect and not row.inferred]
        places: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            words = {name: value for name, value in vars(row.case).items() if name not in NUMBERS}
            places.setdefault(repr(words), []).append(place)
        return cls(
            rows, [(np.array(found), Bare.of(stacked([rows[i].case for i in found]))) for found in places.values()]
        )

    def seconds(self, given: Constants) -> Array:
        result = np.zeros(len(self.rows))
        for places, bare in self.groups:
            result[places] = weigh(bare, given).seconds
        return result

    @property
    def measured(self) -> Array:
        return np.array([row.step_s for row in self.rows])


def stacked(cases: list[Case]) -> Case:
    arrays = {name: np.array([getattr(case, name) for case in cases]) for name in NUMBERS}
    return replace(cases[0], **arrays)


def unpack(logs: Array) -> Constants:
    tables: dict[str, Any] = {}
    for prior, log in zip(PRIORS, logs, strict=True):
        name, dot, key = prior.name.partition(".")
        if dot:
            tables.setdefault(name, {})[key] = float(np.exp(log))
        else:
            tables[name] = float(np.exp(log))
    return Constants(**tables)


def fit(tables: dict[str, Table], start: Array | None = None, rounds: int = 6) -> Array:
    """Gauss-Newton; `start` is where another fit ended."""
    centre = np.array([np.log(prior.value) for prior in PRIORS])
    sigma = np.array([prior.sigma for prior in PRIORS])
    logs = centre.copy() if start is None else start.copy()
    weights = np.concatenate([np.full(len(t.rows), EVIDENCE / len(t.rows)) for t in tables.values()])
    targets = np.log(np.concatenate([table.measured for table in tables.values()]))

    def residuals(at: Array) -> Array:
        given = unpack(at)
        return np.log(np.concatenate([table.seconds(given) for table in tables.values()])) - targets

    for _ in range(rounds):
        here = residuals(logs)
        slopes = np.stack([(residuals(logs + step) - here) / 0.01 for step in 0.01 * np.eye(len(logs))], axis=1)
        pull = weights / NOISE**2 / np.maximum(1, np.abs(here) / OUTLIER)
        normal = slopes.T @ (pull[:, None] * slopes) + np.diag(1 / sigma**2)
        gradient = slopes.T @ (pull * here) + (logs - centre) / sigma**2
        move = np.clip(np.linalg.solve(normal, -gradient), -0.5, 0.5)
        logs = logs + move
        if np.abs(move).max() < 2e-3:
            break
    return logs


EVIDENCE = 30.0  # rows that a source counts for
NOISE = 0.06  # of log(predicted / measured) in a good fit


def errors(table: Table, given: Constants) -> Array:
    return table.seconds(given) / table.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with the bulk tables")
    parser.add_argument("--blind", action="store_true")
    options = parser.parse_args()
    tables = {name: Table.of(rows) for name, source in SOURCES.items() if (rows := source.rows(options.data))}
    logs = fit(tables)
    given = unpack(logs)
    for prior, log in zip(PRIORS, logs, strict=True):
        print(
            f"{prior.name:30s} {prior.value:9.4g} → {np.exp(log):9.4g}  {(log - np.log(prior.value)) / prior.sigma:+.1f}σ"
        )
    for name, table in tables.items():
        error = errors(table, given)
        line = f"{name:12s} {len(error):5d} fitted {np.abs(error).mean():.3f} bias {error.mean():+.3f} worst {error[np.abs(error).argmax()]:+.3f}"
        if options.blind:
            blind = errors(table, unpack(fit({k: t for k, t in tables.items() if k != name}, logs, 2)))
            line += f" | blind {np.abs(blind).mean():.3f} bias {blind.mean():+.3f}"
        print(line)
    np.save("/tmp/t/logs.npy", logs)


if __name__ == "__main__":
    main()
