"""The timeline of a step on a page: by Bokeh, which draws on a canvas and zooms; without it, a fixed SVG picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..record.formatting import duration
from ..trace.hotspots import short_name
from ..trace.model import DEVICE, Kind, Trace
from ..trace.timeline import GROUPS, Timeline, timeline
from .html_page import note
from .svg import legend

MOST_BOXES = 20_000  # 2 MB of the page; Bokeh's script has 1.3
MOST_IN_SVG = 3_000
LINE = 13  # pixels of a line of boxes
COLOURS = {  # legible on the light and on the dark page
    "annotation": "#8c8f96",
    "python": "#b0820c",
    "op": "#2a6fd6",
    "runtime call": "#8a63c9",
    "collective": "#d9622b",
    "kernel": "#1e9a83",
    "copy": "#b93a32",
}
INK = "#84878d"
TARGET = "timeline"


@dataclass(frozen=True)
class Drawing:
    body: str
    script: str = ""


def draw_timeline(traces: Sequence[Trace]) -> Drawing:
    zooms = find_spec("bokeh") is not None
    found = timeline(traces, MOST_BOXES if zooms else MOST_IN_SVG)
    if found is None or not len(found.boxes):
        return Drawing('<p class="empty">No events within a step.</p>')
    thin = f" Events under {duration(found.resolution / 1e9)} are drawn together." if found.resolution else ""
    ranks = "" if len(found.ranks) == len(traces) else f" Ranks {', '.join(map(str, found.ranks))} are drawn."
    if zooms:
        how = "Drag to move, the wheel or the box to zoom, a name of the legend to hide its events."
        body, script = bokeh_timeline(found)
    else:
        how = "pip install 'lmworks[timeline]' (Bokeh) makes this a timeline that zooms."
        body, script = svg_timeline(found), ""
    said = f"Step {found.step}, {duration(found.length / 1e9)}. {how}{thin}{ranks}"
    return Drawing(f'<div class="card">{body}</div>{note(said)}', script)


def box_tops(found: Timeline) -> tuple[np.ndarray, np.ndarray, int]:
    """Line of every box, first line of every row, and how many lines there are; rows are one line apart."""
    first = np.cumsum([0, *(row.depth + 1 for row in found.rows)])
    return first[found.boxes.row] + found.boxes.depth, first[:-1], int(first[-1])


def box_names(found: Timeline) -> list[str]:
    """Without the template arguments of a kernel; `FSDP::all_gather (layer 3)` stays whole."""
    return [
        short_name(name) if kind in DEVICE else shortened(name)
        for name, kind in zip(found.boxes.name, found.boxes.kind, strict=True)
    ]


def shortened(text: str, longest: int = 100) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def bokeh_timeline(found: Timeline) -> tuple[str, str]:
    """A place for the figure, and the scripts that draw it."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, HoverTool, Range1d, WheelZoomTool
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    line, first, lines = box_tops(found)
    length = found.length / 1e6
    plot = figure(
        height=LINE * lines + 90,
        sizing_mode="stretch_width",
        x_range=Range1d(0, length, bounds=(0, length)),
        y_range=Range1d(lines, -1),
        x_axis_label="milliseconds of the step",
        tools="xpan,xbox_zoom,reset",
        output_backend="canvas",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
    )
    wheel = WheelZoomTool(dimensions="width")
    plot.add_tools(wheel)
    plot.toolbar.active_scroll = wheel
    plot.toolbar.logo = None
    boxes, names = found.boxes, np.array(box_names(found))
    groups = np.array([GROUPS[Kind(kind)] for kind in boxes.kind])
    for group, colour in COLOURS.items():
        own = groups == group
        if not own.any():
            continue
        columns = {
            "left": boxes.start[own] / 1e6,
            "right": boxes.end[own] / 1e6,
            "y": line[own] + 0.5,
            "name": names[own].tolist(),
            "took": [duration(length / 1e9) for length in (boxes.end - boxes.start)[own].tolist()],
        }
        plot.hbar(
            y="y", left="left", right="right", height=0.86, source=ColumnDataSource(columns), color=colour,
            line_color=None, legend_label=group, name=group,
        )  # fmt: skip
    plot.add_tools(HoverTool(tooltips=[("", "@name"), ("took", "@took"), ("at", "@left{0.000} ms")]))
    style_figure(plot, found, first)
    item = json.dumps(json_item(plot, TARGET)).replace("<", "\\u003c")
    library = INLINE.js_raw[0].replace("</script", "<\\/script")
    return f'<div id="{TARGET}"></div>', f"{library}\nBokeh.embed.embed_item({item});"


def style_figure(plot: Any, found: Timeline, first: np.ndarray) -> None:
    middles = [float(top + row.depth / 2) for top, row in zip(first, found.rows, strict=True)]
    plot.yaxis.ticker = middles
    plot.yaxis.major_label_overrides = {place: row.label for place, row in zip(middles, found.rows, strict=True)}
    plot.grid.grid_line_color = INK
    plot.grid.grid_line_alpha = 0.2
    plot.ygrid.visible = False
    for axis in plot.axis:
        axis.axis_line_color = axis.major_tick_line_color = None
        axis.minor_tick_line_color = None
        axis.major_label_text_color = axis.axis_label_text_color = INK
    plot.legend.click_policy = "hide"
    plot.legend.orientation = "horizontal"
    plot.legend.background_fill_alpha = plot.legend.border_line_alpha = 0
    plot.legend.label_text_color = INK
    plot.add_layout(plot.legend[0], "above")


def svg_timeline(found: Timeline) -> str:
    line, first, lines = box_tops(found)
    width, left = 1120, 220
    unit = (width - left) / max(found.length, 1)
    drawn = [
        f'<text x="{left - 8}" y="{LINE * (top + row.depth / 2) + 4:.0f}" class="axis end">{escape(row.label)}</text>'
        for top, row in zip(first, found.rows, strict=True)
    ]
    boxes = found.boxes
    names = box_names(found)
    for at, kind, start, end, name in zip(line, boxes.kind, boxes.start, boxes.end, names, strict=True):
        took = f"{name}, {duration(float(end - start) / 1e9)}"
        drawn.append(
            f'<rect x="{left + start * unit:.2f}" y="{LINE * at}" width="{max((end - start) * unit, 0.3):.2f}" '
            f'height="{LINE - 2}" fill="{COLOURS[GROUPS[Kind(kind)]]}"><title>{escape(took)}</title></rect>'
        )
    there = {GROUPS[Kind(kind)] for kind in np.unique(boxes.kind)}
    keys = legend([(group, f"kind-{group.split()[0]}", "") for group in COLOURS if group in there])
    return f'<svg id="{TARGET}" viewBox="0 0 {width} {LINE * lines}" role="img">{"".join(drawn)}</svg>{keys}'


def legend_style() -> str:
    return " ".join(f".kind-{group.split()[0]} {{ --c: {colour}; }}" for group, colour in COLOURS.items())
