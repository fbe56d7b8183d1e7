"""Heat map of a probe: its score by the length of the text and the depth of what is hidden in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .plots import save


def draw_heat_map(scores: Mapping[tuple[int, float], float], title: str, path: Path) -> Path:
    """`scores`: in [0, 1] by (length, depth); a cell without one is left white."""
    from matplotlib.figure import Figure

    lengths, depths = (sorted({place[axis] for place in scores}) for axis in (0, 1))
    cells = [[scores.get((int(length), depth), float("nan")) for length in lengths] for depth in depths]
    figure = Figure(figsize=(1.6 + 1.1 * len(lengths), 1.6 + 0.6 * len(depths)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for row, line in enumerate(cells):
        for column, score in enumerate(line):
            if score == score:
                axes.text(column, row, f"{score:.0%}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set(title=title, xlabel="words", ylabel="depth (0: start)")
    figure.colorbar(image, ax=axes, label="score")
    return save(figure, path)
