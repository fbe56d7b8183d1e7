"""A plot of `lmworks bench serve`: distributions of latencies, and latency over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..record.formatting import duration
from ..report.plots import has_matplotlib, save
from ..spec import SpecError
from .serve import QUANTILES, Measured

BLUE, ORANGE, RED, INK = "#2a6fd6", "#d9622b", "#b93a32", "#5d6066"


def draw_bench(measured: Measured, path: Path) -> Path:
    if not has_matplotlib():
        raise SpecError('--plot needs matplotlib: pip install "lmworks[plots]"')
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    grid = figure.subplots(2, 2)
    done, slo = measured.with_kind("completed"), measured.slo
    plot_cdf(grid[0][0], "time to first token", [one.ttft for one in done], slo.ttft)
    plot_cdf(grid[0][1], "time between tokens, mean of a request", [one.tpot for one in done], slo.tpot)
    plot_cdf(grid[1][0], "whole request", [one.e2e for one in done], slo.e2e)
    over_time(grid[1][1], measured)
    count = f"{len(done)} of {len(measured.outcomes)} requests completed"
    figure.suptitle(f"{measured.model}: {measured.load.arrivals.text}, {count}", fontsize=11)
    return save(figure, path)


def plot_cdf(axes: Any, title: str, values: Sequence[float], limit: float | None) -> None:
    """Cumulative distribution over requests."""
    frame(axes, title)
    axes.set(xlabel="seconds", ylabel="share of requests", ylim=(0, 1.02))
    if not values:
        return
    ordered = np.sort(values)
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), color=BLUE, drawstyle="steps-post")
    for name, mark in zip(QUANTILES, np.percentile(values, list(QUANTILES.values())), strict=True):
        axes.plot([mark], [QUANTILES[name] / 100], "o", color=BLUE, markersize=4)
        axes.annotate(f"{name} {duration(float(mark))}", (mark, QUANTILES[name] / 100), xytext=(6, -10),
                      textcoords="offset points", fontsize=8, color=INK)  # fmt: skip
    if limit is not None:
        axes.axvline(limit, color=ORANGE, linestyle="--", linewidth=1, label="SLO")
        axes.legend(frameon=False, loc="lower right")
    axes.set_xlim(left=0)


def over_time(axes: Any, measured: Measured) -> None:
    """Time to first token of every request at its scheduled time; rejections and errors as crosses."""
    frame(axes, "first token, over time")
    axes.set(xlabel="seconds since the start", ylabel="seconds to the first token")
    for kind, colour, label in (("completed", BLUE, ""), ("rejected", ORANGE, "rejected"), ("error", RED, "failed")):
        with_kind = measured.with_kind(kind)
        if with_kind:
            heights = [one.ttft if kind == "completed" else 0.0 for one in with_kind]
            how = {"marker": "o", "s": 12} if kind == "completed" else {"marker": "x", "s": 18}
            axes.scatter([one.scheduled for one in with_kind], heights, color=colour, alpha=0.7, linewidths=1,
                         label=f"{label or 'answered'} ({len(with_kind)})", **how)  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
    axes.set_ylim(bottom=0)


def frame(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
