"""Pictures of scaling_cpu.py for docs/communication.md: each bar is a step, the lowest part its efficiency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmworks.plan.devices.alpha_beta import AlphaBeta

IMAGES = Path(__file__).parent.parent / "docs" / "images"
USEFUL = "#5080c0"
MEASURED = {"communication": ("exposed communication", "#e07050"), "compute": ("less efficient compute", "#c8c8c8")}
PLANNED = {
    "bandwidth": ("exposed communication: bandwidth", "#e07050"),
    "latency": ("exposed communication: latency", "#f0b040"),
    "bubble": ("pipeline bubble", "#8060a0"),
    "stragglers": ("waiting for the slowest node", "#70a070"),
    "work": ("less efficient compute", "#c8c8c8"),
}


def bars(axes: Axes, points: Sequence[Mapping[str, Any]], names: Sequence[str], kinds: Mapping[str, Any]) -> None:
    """Efficiency, and above it the shares that are lost; what is gained on the way (a part below 0) is not drawn."""
    lost = {kind: np.array([max(0.0, one["lost"][kind]) for one in points]) for kind in kinds}
    useful = np.array([one["efficiency"] for one in points])
    whole = useful + sum(lost.values())
    place, base = np.arange(len(points)), useful / whole
    axes.bar(place, base, color=USEFUL, label="efficiency", width=0.8)
    for kind, (label, colour) in kinds.items():
        axes.bar(place, lost[kind] / whole, bottom=base, color=colour, label=label, width=0.8)
        base = base + lost[kind] / whole
    for x, share in zip(place, useful, strict=True):
        axes.text(x, 0.02, f"{share:.0%}", ha="center", va="bottom", fontsize=7, color="white", rotation=90)
    axes.set_xticks(place, names, fontsize=8)
    axes.set_ylim(0, 1)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def draw_measured(result: Mapping[str, Any]) -> None:
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    single = result["measured"][0]
    links = list(result["wire"])
    for axes, scaling in ((left, "weak"), (middle, "strong")):
        several = [one for one in result["measured"][1:] if one["scaling"] == scaling]
        shown = [single, *sorted(several, key=lambda one: (links.index(one["link"]), one["ranks"]))]
        names = [f"{one['ranks']}\n{one['link']}" for one in shown]
        bars(axes, shown, names, MEASURED)
        for x, one in enumerate(shown):
            low, high = one["efficiency_range"]
            axes.plot([x, x], [low, high], color="black", linewidth=1)
        axes.set_title(f"{scaling} scaling, ranks and link", fontsize=9)
    left.set_ylabel("share of a step", fontsize=8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=8, frameon=False)
    draw_wire(right, result["wire"])
    figure.savefig(IMAGES / "scaling-measured.png", dpi=130)


def draw_wire(axes: Axes, wire: Mapping[str, Any]) -> None:
    """Bus bandwidth by size, the fitted line, and half of its limit; two ranks, so busbw is algbw."""
    for (link, facts), colour in zip(wire.items(), (USEFUL, "#e07050"), strict=True):
        rows = sorted(facts["rows"], key=lambda row: row["bytes"])
        sizes = np.array([row["bytes"] for row in rows], dtype=float)
        fit = AlphaBeta.from_dict(facts["fit"])
        fine = np.geomspace(sizes[0], sizes[-1], 200)
        axes.loglog(sizes, [row["busbw"] for row in rows], "o", color=colour, markersize=4, label=link)
        axes.loglog(fine, fine / np.asarray(fit.seconds(fine)) / 1e9, color=colour, linewidth=1)
        half = fit.latency / fit.last.beta
        if sizes[0] < half < sizes[-1]:
            axes.axvline(half, color=colour, linewidth=0.8, linestyle=":")
    axes.set_xticks([2.0**10, 2.0**14, 2.0**18, 2.0**22], ["1 KiB", "16 KiB", "256 KiB", "4 MiB"])
    axes.tick_params(labelsize=8)
    axes.set_ylabel("busbw, GB/s", fontsize=8)
    axes.set_title("all-reduce of 2 ranks, by size; lines: α + β · bytes", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def draw_planned(result: Mapping[str, Any]) -> None:
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    panels = figure.subplots(2, 3, sharey=True)
    for axes, curve in zip(panels.flat, result["planned"], strict=True):
        bars(axes, curve["points"], [f"{one['gpus']}" for one in curve["points"]], PLANNED)
        axes.set_title(f"{curve['scaling']}: {curve['name']}", fontsize=9)
    for axes in panels[1]:
        axes.set_xlabel(f"{result['planned'][0]['gpu'].upper()}, 8 in a node", fontsize=8)
    for axes in panels[:, 0]:
        axes.set_ylabel("share of a step", fontsize=8)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(IMAGES / "scaling-planned.png", dpi=130)
