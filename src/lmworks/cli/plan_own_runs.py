"""Runs that the reader measured, beside what the planner says of them: `lmworks plan validate RUNS`."""

from __future__ import annotations

import math
from pathlib import Path

from ..plan.memory.sheet import budget
from ..plan.step.price import price
from ..plan.tables.columns import read
from ..plan.tables.forecast import forecast_table
from ..plan.tables.score import Scored, score_table
from ..record import read_metrics
from ..record.run_summary import find_runs
from ..report.predicted_vs_measured import compare
from ..spec import LMWorksError

FIGURES = {"step_s": "step time", "memory_bytes": "allocated"}


def scored_table(path: Path) -> tuple[list[Scored], list[str]]:
    table = read(path)
    return score_table(table, forecast_table(table, price, budget)["rows"])


def is_positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def scored_runs(place: Path) -> tuple[list[Scored], list[str]]:
    """What was predicted before the first step of each run, as its folder has it."""
    scored, left = [], []
    for folder in find_runs([place]):
        name = str(folder.path)
        try:
            spec = folder.spec()
            rows = compare(folder, read_metrics(folder.metrics_path))
        except (LMWorksError, TypeError, ValueError) as error:  # a file of it is damaged
            left.append(f"{name}: {error}")
            continue
        group = "experts" if spec.model.experts else spec.precision.dtype
        known = [
            row for row in rows if row.name in FIGURES and is_positive(row.measured) and is_positive(row.predicted)
        ]
        scored += [
            Scored(name, FIGURES[row.name], row.predicted or 0.0, row.measured or 0.0, group, row.range)
            for row in known
        ]
        if not known:
            left.append(f"{name}: no step was measured, or nothing was predicted")
    return scored, left
