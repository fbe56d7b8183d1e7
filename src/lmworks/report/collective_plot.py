"""Plot of a comparison of collective algorithms: time over message size."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..plan.collective_algorithms.compare import LARGEST, SMALLEST, Comparison, curves
from .plots import new_axes, save


def draw_collective(found: Comparison, path: Path) -> Path:
    figure, axes = new_axes("seconds")
    sizes = np.geomspace(SMALLEST, LARGEST, 300)
    usable = [row.algorithm for row in found.rows]
    for algorithm, seconds in zip(usable, curves(found.collective, found.group, usable, sizes), strict=True):
        axes.plot(sizes, seconds, label=algorithm.name)
    axes.plot(sizes, found.group.planned(found.collective, sizes), "k:", label="planner")
    for _, start, _ in found.crossovers[1:]:
        axes.axvline(start, color="#b8b8b8", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="bytes of the buffer")
    axes.set_title(f"{found.collective}, {found.group.ranks:,} × {found.group.fabric.gpu}", fontsize=10)
    axes.legend(frameon=False)
    return save(figure, path)
