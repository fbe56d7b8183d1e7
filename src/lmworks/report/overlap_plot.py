"""Plot of `lmworks bench overlap`: the step of each setting, and what communication costs in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .plots import new_axes, save


def draw_overlap(study: Mapping[str, Any], path: Path) -> Path:
    """`study`: as --json prints it."""
    shown = [study["baseline"], *study["settings"]]
    if study["together"] and len(study["together"]["overrides"]) > 1:
        shown.append(study["together"])
    figure, axes = new_axes("")
    names = [one["name"].replace("parallel.", "") for one in shown]
    costs = [min(max(0.0, one["comm_cost_s"]["median"]), one["step_s"]) for one in shown]
    rest = [one["step_s"] - cost for one, cost in zip(shown, costs, strict=True)]
    axes.barh(names, rest, color="#5080c0", label="compute and update")
    axes.barh(names, costs, left=rest, color="#e07050", label="what communication costs")
    axes.barh(names, [one["exposed_s"] for one in shown], height=0.25, color="#303030", label="exposed, in a trace")
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a step", ylabel="")
    axes.set_title(f"{study['ranks']} ranks, {study['backend']}", fontsize=10)
    axes.legend(frameon=False, loc="lower right")
    return save(figure, path)
