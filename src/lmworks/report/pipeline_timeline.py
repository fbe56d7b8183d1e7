"""The timeline of a pipeline schedule as text and as PNG."""

from __future__ import annotations

import math
from pathlib import Path

from ..plan.pipelines.schedule import Span
from ..spec import SpecError
from .plots import has_matplotlib, save

COLOURS = {"F": "#7fb3e6", "B": "#f0b27a", "I": "#f0b27a", "W": "#9fd3a1"}
KINDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


def label(span: Span, ranks: int) -> str:
    """F3: forward of micro-batch 3. Every second stage of a rank is lower case."""
    return (span.kind.lower() if span.stage // ranks % 2 else span.kind) + str(span.micro_batch)


def draw_text(spans: list[Span], unit: float) -> str:
    """One row per rank, one column per time unit; a dot is idle. A span of one column shows only its kind."""
    start, end = min(span.begin for span in spans), max(span.end for span in spans)
    ranks = 1 + max(span.rank for span in spans)
    rows = [["·"] * math.ceil((end - start) / unit - 1e-6) for _ in range(ranks)]
    for span in spans:
        begin, stop = (round((when - start) / unit) for when in (span.begin, span.end))
        rows[span.rank][begin:stop] = label(span, ranks).ljust(stop - begin, "─")[: stop - begin]
    return "\n".join(f"rank {rank:<3}{''.join(row)}" for rank, row in enumerate(rows))


def draw_png(spans: list[Span], path: Path, title: str) -> Path:
    """The same as PNG, one bar per span."""
    if not has_matplotlib():
        raise SpecError('a plot of the timeline needs matplotlib: pip install "lmworks[plots]"')
    from matplotlib.figure import Figure

    start, end = min(span.begin for span in spans), max(span.end for span in spans)
    ranks = 1 + max(span.rank for span in spans)
    figure = Figure(figsize=(14, 0.6 * ranks + 1.6), layout="constrained")
    axes = figure.add_subplot()
    for span in spans:
        wide = span.end - span.begin
        odd = span.stage // ranks % 2
        axes.barh(
            span.rank, wide, left=span.begin - start, color=COLOURS[span.kind], alpha=0.55 if odd else 1, edgecolor="w"
        )
        if wide > (end - start) / 90:
            middle = span.begin - start + wide / 2
            axes.text(middle, span.rank, str(span.micro_batch), ha="center", va="center", fontsize=7)
    used = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
    axes.legend(
        [axes.barh(0, 0, color=COLOURS[kind]) for kind in used],
        [KINDS[kind] for kind in used],
        ncols=len(used),
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        frameon=False,
    )
    axes.set(yticks=range(ranks), yticklabels=[f"rank {rank}" for rank in range(ranks)], xlabel=title)
    axes.invert_yaxis()
    return save(figure, path)
