"""Bus bandwidth and time of collectives over message size, with the fitted α and β."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..plan.devices.alpha_beta import AlphaBeta
from .plots import save

Table = Sequence[Mapping[str, Any]]


def draw_bandwidths(rows: Table, fits: Table, title: str, path: Path) -> Path:
    """Measured medians with quartiles, filled in place, hollow out of place; lines are the fits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bandwidth, time = figure.subplots(1, 2)
    series: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        series.setdefault(series_key(row), []).append(row)
    fitted = {series_key(fit): AlphaBeta.from_dict(fit["fit"]) for fit in fits}
    several = [len({key[place] for key in series}) > 1 for place in range(len(next(iter(series))))]
    colors = {op: f"C{number}" for number, op in enumerate(dict.fromkeys(key[0] for key in series))}
    for key, points in series.items():
        label = ", ".join(str(value) for value, shown in zip(key, several, strict=True) if shown) or key[0]
        color, sizes = colors[key[0]], np.array([row["bytes"] for row in points])
        mark: dict[str, Any] = {"markersize": 5, "color": color, "label": label}
        mark["markerfacecolor"] = color if points[0]["in_place"] else "none"
        us, low, high = (np.array([row[name] for row in points]) for name in ("time_us", "time_us_low", "time_us_high"))
        time.errorbar(sizes, us, yerr=[us - low, high - us], fmt="o", **mark)
        bandwidth.plot(sizes, [row["busbw"] for row in points], "o", **mark)
        if fit := fitted.get(key):
            smooth = np.geomspace(sizes[0], sizes[-1], 200)
            seconds = fit.seconds(smooth)
            factor = points[-1]["busbw"] / points[-1]["algbw"]
            time.plot(smooth, 1e6 * seconds, color=color, linewidth=1)
            bandwidth.plot(smooth, factor * smooth / seconds / 1e9, color=color, linewidth=1)
    for axes, name in ((bandwidth, "bus bandwidth, GB/s"), (time, "time, µs")):
        axes.set(xscale="log", yscale="log", xlabel="message, bytes", ylabel=name)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    bandwidth.legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    return save(figure, path)


def series_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    place = "in place" if row["in_place"] else "out of place"
    return row["op"], row["group"], f"{row['ranks']} ranks", row["dtype"], place
