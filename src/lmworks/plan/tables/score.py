"""How wrong predictions are: errors of a set, and a table of runs beside what its own columns measured.

`forecast.py` predicts a row without looking at its results; only here are they read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .columns import EMPTY, Table, number, plain

GIB = 2**30
FIGURES = ("step time", "allocated", "reserved")
UNITS = {"gib": GIB, "gb": 1e9, "mib": 2**20, "mb": 1e6, "bytes": 1.0}
PER_GPU = re.compile(r"(per_|_)(gpu|device|chip|accelerator|card)\b|_gpu$")
TOKENS = re.compile(r"tok(en)?s?_?(per_)?(s|sec|second)(?![a-z])|tok(en)?s?_per_(gpu|device)|^tps|throughput")
STEP = re.compile(r"(step|iter(ation)?)_?(time|ms|s|sec|seconds|latency)|(sec|seconds|s|time)_(per_)?(step|it|iter)")
MEMORY = {"allocated": re.compile(r"alloc"), "reserved": re.compile(r"reserv")}


@dataclass(frozen=True)
class Score:
    """Relative errors of a set of predictions, as fractions."""

    rows: int
    mape: float  # mean of the absolute errors
    median: float
    p90: float
    bias: float  # mean of the signed errors: above zero, the prediction is too high
    worst: str
    worst_error: float

    @classmethod
    def of(cls, errors: Sequence[float], labels: Sequence[str]) -> Score:
        signed = np.asarray(errors)
        size = np.abs(signed)
        index = int(np.argmax(size))
        return cls(
            len(signed),
            float(size.mean()),
            float(np.median(size)),
            float(np.quantile(size, 0.9)),
            float(signed.mean()),
            labels[index],
            float(signed[index]),
        )


def weighted_median(values: Any, weights: Any) -> float:
    order = np.argsort(values)
    share = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(share, 0.5)])


@dataclass(frozen=True)
class Scored:
    """One figure of one run: predicted and measured."""

    label: str
    figure: str  # of FIGURES
    predicted: float
    measured: float
    group: str = ""  # a part of the runs with errors of its own: the number format, or experts
    interval: tuple[float, float] | None = None
    mfu: float | None = None  # as measured

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool | None:
        return self.interval[0] <= self.measured <= self.interval[1] if self.interval else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error, "within_interval": self.within}


@dataclass(frozen=True)
class Errors:
    """Of one figure of a set of runs, or of a part of it."""

    source: str
    group: str  # "" for all of it
    figure: str
    score: Score
    coverage: float | None  # share of runs within their 90 % interval
    same_mfu: float | None  # mean absolute error of the constant MFU that suits these runs best

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def errors_of(source: str, scored: Iterable[Scored]) -> list[Errors]:
    """By figure: of all, and of every part where there are several."""
    found = []
    all_of_them = list(scored)
    for figure in FIGURES:
        if not (whole := [one for one in all_of_them if one.figure == figure]):
            continue
        groups = list(dict.fromkeys(one.group for one in whole))
        parts = {group: [one for one in whole if one.group == group] for group in groups} if len(groups) > 1 else {}
        for group, some in {"": whole, **parts}.items():
            within = [one.within for one in some if one.within is not None]
            found.append(
                Errors(
                    source,
                    group,
                    figure,
                    Score.of([one.error for one in some], [one.label for one in some]),
                    float(np.mean(within)) if within else None,
                    constant_mfu_error([one.mfu for one in some if one.mfu]),
                )
            )
    return found


def constant_mfu_error(real: Sequence[float]) -> float | None:
    """With the real MFU r of a run a constant c is |r/c − 1| off in time: least at a weighted median of 1/r."""
    if not real:
        return None
    rates = np.array(real)
    best = 1 / weighted_median(1 / rates, rates)
    return float(np.abs(rates / best - 1).mean())


def score_table(table: Table, forecasts: Sequence[Mapping[str, Any]]) -> tuple[list[Scored], list[str]]:
    """Figures of a table whose rows were predicted, and sentences about rows that could not be compared."""
    scored, left = [], []
    for raw, found in zip(table.raw, forecasts, strict=True):
        name = f"row {found['row']} {found['label']}".strip()
        if "error" in found:
            left.append(f"{name}: {found['error']}")
            continue
        figures = measured_figures(raw, table.results, found)
        if not figures:
            left.append(f"{name}: nothing is measured")
        group = "experts" if found["job"]["model"]["experts"] else found["job"]["dtype"]
        for figure, measured in figures.items():
            if figure == "step time":
                interval, seconds = (found["step_s_low"], found["step_s_high"]), found["step_s"]
                mfu = found["mfu"] * seconds / measured if found["mfu"] else None
                scored.append(Scored(name, figure, seconds, measured, group, interval, mfu))
            else:
                scored.append(Scored(name, figure, found[f"{figure}_gib"] * GIB, measured, group))
    return scored, left


def measured_figures(raw: Mapping[str, str], titles: Iterable[str], found: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step, and bytes, from whichever result columns a row has; a step time counts before tokens/s."""
    figures: dict[str, float] = {}
    rate = None
    for title in titles:
        value, short = figure(raw.get(title)), plain(title)
        if not value:
            continue
        if TOKENS.search(short):
            rate = value * (found["job"]["n_gpus"] if PER_GPU.search(short) else 1)
        elif STEP.search(short) and "step time" not in figures:
            figures["step time"] = value * (1e-3 if re.search(r"(^|_)(ms|millisec\w*)(_|$)", short) else 1)
        else:
            unit = next((scale for name, scale in UNITS.items() if re.search(rf"(^|_){name}(_|$)", short)), None)
            kind = next((kind for kind, pattern in MEMORY.items() if pattern.search(short)), None)
            if unit and kind and kind not in figures:
                figures[kind] = value * unit
    if rate and "step time" not in figures:
        figures["step time"] = found["tokens_per_s"] * found["step_s"] / rate
    return {name: figures[name] for name in FIGURES if name in figures}


def figure(cell: str | None) -> float | None:
    """None where a cell has no number: "OOM", "x"."""
    if cell is None or cell.strip().lower() in EMPTY:
        return None
    try:
        return number(cell)
    except ValueError:
        return None
