"""What a simulated run was like: percentiles, goodput, GPU-hours and dollars; many runs as a front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..plan.serving.plans import Slo
from .server_model import ServerModel
from .simulate import Run, Served

QUANTILES = {"p50": 50, "p90": 90, "p99": 99}


def met(one: Served, slo: Slo) -> bool:
    return one.ttft <= slo.ttft and one.tpot <= slo.tpot and one.e2e <= slo.e2e


def summary(values: Iterable[float]) -> dict[str, float] | None:
    found = list(values)
    if not found:
        return None
    marks = np.percentile(found, list(QUANTILES.values()))
    shown = {name: float(mark) for name, mark in zip(QUANTILES, marks, strict=True)}
    return {"mean": float(np.mean(found)), **shown, "max": max(found)}


def sheet(run: Run, model: ServerModel, slo: Slo) -> dict[str, Any]:
    """The keys of `lmworks bench serve --json` where both have a figure, so that they can be laid side by side."""
    served = run.served
    good = [one for one in served if met(one, slo)]
    count = len(served) + run.rejected
    seconds = max((one.last for one in served), default=0.0) - min((one.at for one in served), default=0.0)
    hours = run.server_seconds * model.gpus / 3600
    tokens = sum(one.answer for one in served)
    prompts = sum(one.prompt for one in served)
    return {
        "policy": run.policy,
        "seconds": seconds,
        "requests": count,
        "completed": len(served),
        "rejected": run.rejected,
        "input_tokens": prompts,
        "cached_tokens": sum(one.cached for one in served),
        "output_tokens": tokens,
        "requests_per_s": len(served) / seconds if seconds else 0.0,
        "output_tokens_per_s": tokens / seconds if seconds else 0.0,
        "goodput": {
            "requests": len(good),
            "requests_per_s": len(good) / seconds if seconds else 0.0,
            "share": len(good) / count if count else 0.0,
        },
        "ttft_s": summary(one.ttft for one in served),
        "request_itl_s": summary(one.tpot for one in served if one.answer > 1),
        "e2e_s": summary(one.e2e for one in served),
        "preemptions": sum(one.preemptions for one in served),
        "most_servers": run.most_servers,
        "gpu_hours": hours,
        "dollars": hours * model.price_hour,
        "dollars_per_million_output": 1e6 * hours * model.price_hour / tokens if tokens else 0.0,
    }


# --- fronts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrontPoint:
    policy: str
    cost: float  # dollars, or GPU-hours where no price is known
    attained: float  # share of requests within the SLO
    best: bool = False  # nothing is cheaper and as good


def front(sheets: Sequence[dict[str, Any]]) -> list[FrontPoint]:
    priced = any(one["dollars"] for one in sheets)
    points = [(one["policy"], one["dollars" if priced else "gpu_hours"], one["goodput"]["share"]) for one in sheets]
    ordered = sorted(points, key=lambda point: (point[1], -point[2]))
    found, most = [], -1.0
    for policy, cost, attained in ordered:
        found.append(FrontPoint(policy, cost, attained, attained > most))
        most = max(most, attained)
    return found


COLOURS = {"static": "#8c8f96", "reactive": "#2a6fd6", "predictive": "#d9622b"}


def draw_front(points: Sequence[FrontPoint], path: Path, unit: str, title: str) -> Path:
    from matplotlib.figure import Figure

    from ..report.plots import save

    figure = Figure(figsize=(7.2, 4.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for kind, colour in COLOURS.items():
        own = [point for point in points if point.policy.startswith(kind)]
        axes.plot([point.cost for point in own], [point.attained for point in own], "o", color=colour, label=kind)
    best = [point for point in points if point.best]
    axes.step([point.cost for point in best], [point.attained for point in best], where="post", color="#5d6066", lw=1)
    axes.set(xlabel=unit, ylabel="share of requests within the SLO", title=title, ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return save(figure, path)
