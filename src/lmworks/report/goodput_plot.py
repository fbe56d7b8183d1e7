"""A plot of goodput: a timeline of causes, and seconds by cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..diagnose.goodput import Span, TimeBreakdown
from ..record import RunFolder
from ..record.formatting import duration
from ..spec import SpecError
from .plots import has_matplotlib, save

COLORS = {
    "useful": "#2f7d4f",
    "evaluation": "#8fc1a0",
    "start": "#b8b8b8",
    "save": "#e0a030",
    "restart": "#b03030",
    "replay": "#e07050",
    "rewind": "#9060b0",
    "skip": "#5080c0",
    "hang": "#601010",
    "other": "#d8d8d8",
}


def draw_goodput(folder: RunFolder, time_breakdown: TimeBreakdown) -> Path:
    """plots/goodput.png, pauses left out."""
    if not has_matplotlib():
        raise SpecError('--plot needs matplotlib: pip install "lmworks[plots]"')
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    when, much = figure.subplots(2, height_ratios=(1, 3))
    spans = list(without_pauses(time_breakdown.spans))
    for cause, color in COLORS.items():
        parts = [(span.begin / 1e6, (span.end - span.begin) / 1e6) for span in spans if span.cause == cause]
        when.broken_barh(parts, (0, 1), color=color, linewidth=0)
    end = spans[-1].end / 1e6 if spans else 1.0
    when.set(xlim=(0, end), yticks=[], xlabel="seconds, pauses left out", title=f"{folder.path.name}: time by cause")
    seconds = {cause: time_breakdown.seconds[cause] for cause in COLORS if time_breakdown.seconds[cause]}
    bars = much.barh(list(seconds), list(seconds.values()), color=[COLORS[cause] for cause in seconds])
    shares = [f"{duration(part)}, {part / time_breakdown.active_s:.1%}" for part in seconds.values()]
    much.bar_label(bars, shares, padding=4)
    much.invert_yaxis()
    much.margins(x=0.2)
    much.set_xlabel("seconds")
    for axes in (when, much):
        axes.spines[["top", "right"]].set_visible(False)
    return save(figure, folder.plots / "goodput.png")


def without_pauses(spans: list[Span]) -> Iterator[Span]:
    paused = 0
    for span in spans:
        if span.cause == "pause":
            paused += span.end - span.begin
        else:
            yield Span(span.begin - paused, span.end - paused, span.cause)
