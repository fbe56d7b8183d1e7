"""How wrong predictions are: errors of a set, and a table of runs beside what its own columns measured.

`forecast.py` predicts a row without looking at its results; only here are they read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .columns import Table, number, plain

GIB = 2**30
FIGURES = ("step time", "allocated", "reserved")
FEW = 5  # runs that a constant is fitted to
UNITS = {"gib": GIB, "gb": 1e9, "mib": 2**20, "mb": 1e6, "bytes": 1.0}
# Words of a column's title. One with a word of OTHER_MEANING is not what its other words say.
TOKENS = {"tok": 1.0, "toks": 1.0, "token": 1.0, "tokens": 1.0, "ktok": 1e3, "ktokens": 1e3, "tps": 1.0, "wps": 1.0}
SECONDS = {"s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "millisecond": 1e-3}
SECONDS |= {"milliseconds": 1e-3, "us": 1e-6}
STEP = {"step", "iter", "iteration", "it"}
ONE_GPU = {"gpu", "device", "chip", "accelerator", "card", "rank"}
OTHER_MEANING = {
    *(
        "tflop",
        "tflops",
        "flop",
        "flops",
        "sample",
        "samples",
        "seq",
        "seqs",
        "sequence",
        "sequences",
        "image",
        "images",
    ),
    *("day", "days", "hour", "hours", "std", "stdev", "stddev", "var", "variance", "min", "max", "p50", "p90", "p95"),
    *("p99", "pred", "predicted", "expected", "estimated", "simulated", "total", "retries", "node", "err", "error"),
}
BOARD = re.compile(r"[ahblv]\d{2,3}|gb\d{3}|gh\d{3}|mi\d{3}x?")
RATE = re.compile(r"(step|iter(ation)?|it)s?\s*(/|per|_per_)\s*_?(s|sec|second)\b", re.IGNORECASE)


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
    """With the real MFU r of a run a constant c is |r/c − 1| off in time: least at a weighted median of 1/r. None of
    a few runs, which the constant would fit whatever they are."""
    if len(real) < FEW:
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
        tokens = found["tokens_per_s"] * found["step_s"]
        figures = measured_figures(raw, table.results, found["job"]["n_gpus"], tokens)
        if not figures:
            chance = found["oom_probability"]
            told = "" if chance is None else f"; predicted to run out of memory with a probability of {chance:.0%}"
            left.append(f"{name}: nothing is measured{told}")
        group = "experts" if found["job"]["model"]["experts"] else found["job"]["dtype"]
        for figure, measured in figures.items():
            if figure == "step time":
                interval, seconds = (found["step_s_low"], found["step_s_high"]), found["step_s"]
                mfu = found["mfu"] * seconds / measured if found["mfu"] else None
                scored.append(Scored(name, figure, seconds, measured, group, interval, mfu))
            else:
                scored.append(Scored(name, figure, found[f"{figure}_gib"] * GIB, measured, group))
    return scored, left


@dataclass(frozen=True)
class Column:
    """What a column of results measures: in what, and of which part of the run."""

    figure: str  # of FIGURES, or "tokens/s"
    scale: float
    per_gpu: bool = False


def column_of(title: str) -> Column | None:
    """None where its title may mean several things, or none of these."""
    words = plain(title).split("_")
    other = OTHER_MEANING & set(words)
    kind = next((figure for figure in ("allocated", "reserved") for word in words if word.startswith(figure[:5])), "")
    if kind:
        unit = next((UNITS[word] for word in words if word in UNITS), 0.0)
        return Column(kind, unit) if unit and not other - {"max"} else None
    if other:
        return None
    second = next((SECONDS[word] for word in words if word in SECONDS), 0.0)
    token = next((TOKENS[word] for word in words if word in TOKENS), 0.0)
    if token and (second == 1.0 or {"tps", "wps"} & set(words)):
        return Column("tokens/s", token, any(word in ONE_GPU or BOARD.fullmatch(word) for word in words))
    if STEP & set(words) and (second or {"time", "latency"} & set(words)) and not RATE.search(title):
        return Column("step time", second or 1.0)
    return None


def measured_figures(raw: Mapping[str, str], titles: Iterable[str], gpus: int, tokens: float) -> dict[str, float]:
    """Seconds of a step of so many `tokens`, and bytes, from whichever result columns a row has; a step time counts
    before tokens/s.
    """
    figures: dict[str, float] = {}
    for title in titles:
        column, cell = column_of(title), number_with_unit(raw.get(title))
        if not column or not cell or column.figure in figures:
            continue
        value, unit = cell
        if column.figure == "tokens/s":
            figures["tokens/s"] = value * column.scale * (gpus if column.per_gpu else 1)
        else:
            figures[column.figure] = value * (SECONDS.get(unit) or UNITS.get(unit) or column.scale)
    if "tokens/s" in figures:
        figures.setdefault("step time", tokens / figures["tokens/s"])
    return {name: figures[name] for name in FIGURES if name in figures}


def number_with_unit(cell: str | None) -> tuple[float, str] | None:
    """(2.5, "s") of "2.5 s" and of "2.5±0.1 s"; None where a cell has no positive number: "OOM", "x", "1e400"."""
    text = re.sub(r"±\s*[\d.,]+", "", (cell or "").strip().lower())
    unit = re.search(r"(?<=[\d\s])(ms|s|sec|seconds|us|gib|gb|mib|mb)$", text)
    try:
        value = number(text.removesuffix(unit[1]) if unit else text)
    except ValueError:
        return None
    return (value, unit[1] if unit else "") if math.isfinite(value) and value > 0 else None
