"""Plot of `lmworks bench coordinate-check`: mean |x| by role against width or depth, a panel a parametrization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .plots import save


def draw_coordinates(checks: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """`checks`: as --json prints them. After the last step; dashed: before the first."""
    from matplotlib.figure import Figure

    columns = len(checks[0]["roles"])
    figure = Figure(figsize=(5 * columns, 4 * len(checks)), layout="constrained")
    grid = figure.subplots(len(checks), columns, squeeze=False, sharey="row")
    for row, check in zip(grid, checks, strict=True):
        for axes, (name, roles) in zip(row, check["roles"].items(), strict=True):
            for color, (role, found) in enumerate(roles.items()):
                sizes = check["sizes"]
                axes.loglog(sizes, [points[-1] for points in found["size"]], f"C{color}o-", label=role)
                axes.loglog(sizes, [points[0] for points in found["size"]], f"C{color}--", alpha=0.5)
            axes.set(title=f"{name}: steepest {check['steepest'][name]['slope']:+.2f}", xlabel=check["axis"])
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        row[0].set_ylabel("mean |x|")
        row[-1].legend(frameon=False, fontsize=8)
    return save(figure, path)
