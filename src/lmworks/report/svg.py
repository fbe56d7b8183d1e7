"""SVG charts: lines over steps, event marks, and stacked areas over steps.

Colours are CSS classes (`s0`, `s1`, …) of the page, so charts follow light and dark mode.

Horizontal bar charts: SVG for HTML (colours are CSS classes s0, s1, …), text for markdown.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TypeVar

from ..record.formatting import short

Points = Sequence[tuple[float, float]]
T = TypeVar("T")

WIDTH, HEIGHT = 640, 270
LEFT, RIGHT, TOP, BOTTOM = 88, 24, 18, 44
MAX_POINTS = 500  # more than a chart has pixels for


@dataclass(frozen=True)
class Line:
    name: str
    points: Points
    style: str  # CSS classes: s0 … for the colour, faint for a background line
    dots: bool = False  # mark each point


@dataclass(frozen=True)
class EventMarks:
    """Events of one kind on a chart; texts are tooltips."""

    name: str
    style: str  # CSS class, for the colour
    glyph: str
    points: Sequence[tuple[float, str]]
    low: bool = False  # on the axis, for frequent events; else a vertical line


@dataclass(frozen=True)
class Axes:
    """From values to coordinates."""

    low: tuple[float, float]
    high: tuple[float, float]

    def x(self, value: float) -> float:
        return LEFT + (value - self.low[0]) / (self.high[0] - self.low[0]) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low[1]) / (self.high[1] - self.low[1]) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def line_chart(
    lines: Sequence[Line],
    *,
    zero: bool = False,
    show: Callable[[float], str] = short,
    x: str = "step",
    y: str = "",
    marks: Sequence[EventMarks] = (),
) -> str:
    """Lines over steps; `zero` keeps 0 in view. `show` writes a value of the y axis; `x` and `y` name the axes."""
    points = [point for line in lines for point in line.points]
    if not points:
        return '<p class="empty">No data.</p>'
    values = [y for _, y in points]
    axes = make_axes([x for x, _ in points], min([*values, 0.0] if zero else values), max(values))
    marks = [replace(each, points=spaced_out(axes, each.points)) for each in marks if each.points]
    body = [draw_axes(axes, show, x, y), *(draw_marks(axes, each) for each in marks)]
    for line in lines:
        downsampled = downsample(line.points)
        if len(line.points) > 1:
            body.append(f'<polyline class="{line.style}" points="{axes.path(downsampled)}"/>')
        if line.dots or len(line.points) == 1:
            spots = "".join(f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3"/>' for x, y in downsampled)
            body.append(f'<g class="{line.style}">{spots}</g>')
    readout = [{"name": line.name, "points": [(x, show(y)) for x, y in downsample(line.points)]} for line in lines]
    names = [(line.name, line.style, "") for line in lines if line.points]
    names += [(each.name, f"mark {each.style}", each.glyph) for each in marks]
    marked = [{"name": each.name, "points": each.points} for each in marks]
    return svg_document(body, axes, {"x": x, "lines": readout, "marks": marked}, names)


def stacked_chart(
    names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]], show: Callable[[float], str], y: str = ""
) -> str:
    """Stacked areas over steps; each row is (step, parts)."""
    if len(rows) < 2:
        return '<p class="empty">Too few steps for a chart.</p>'
    sums = [sum(parts[index] for _, parts in rows) for index in range(len(names))]
    rows = average(rows)
    axes = make_axes([x for x, _ in rows], 0.0, max(sum(parts) for _, parts in rows))
    body = [draw_axes(axes, show, "step", y)]
    baseline = [0.0] * len(rows)
    for index in range(len(names)):
        top = [below + parts[index] for below, (_, parts) in zip(baseline, rows, strict=True)]
        xs = [x for x, _ in rows]
        outline = [*zip(xs, top, strict=True), *reversed(list(zip(xs, baseline, strict=True)))]
        body.append(f'<polygon class="s{index}" points="{axes.path(outline)}"/>')
        baseline = top
    whole = sum(sums) or 1.0
    shares = [
        (f"{name} {part / whole:.1%}", f"s{index}", "")
        for index, (name, part) in enumerate(zip(names, sums, strict=True))
    ]
    readout = [
        {"name": name, "points": [(x, show(parts[index])) for x, parts in rows]} for index, name in enumerate(names)
    ]
    return svg_document(body, axes, {"x": "step", "lines": readout, "marks": []}, shares)


def make_axes(xs: Sequence[float], low: float, high: float) -> Axes:
    """Axes around the data, padded if it has no extent."""
    left, right = min(xs), max(xs)
    if left == right:
        left, right = left - 1, right + 1
    if low == high:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    return Axes((left, low), (right, high + (high - low) * 0.04))


def spaced_out(axes: Axes, points: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Marks clamped to the axes; of marks less than three units apart, the first."""
    kept: list[tuple[float, str]] = []
    for x, text in points:
        x = min(max(x, axes.low[0]), axes.high[0])
        if not kept or abs(axes.x(x) - axes.x(kept[-1][0])) >= 3:
            kept.append((x, text))
    return kept


def draw_marks(axes: Axes, marks: EventMarks) -> str:
    drawn = []
    for place, text in marks.points:
        x = axes.x(place)
        line = "" if marks.low else f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        y = HEIGHT - BOTTOM - 2 if marks.low else TOP - 5
        glyph = f'<text class="mid" x="{x:.1f}" y="{y}">{marks.glyph}</text>'
        drawn.append(f"<g><title>{escape(text)}</title>{line}{glyph}</g>")
    return f'<g class="mark {marks.style}">{"".join(drawn)}</g>'


def draw_axes(axes: Axes, show: Callable[[float], str], x_title: str, y_title: str) -> str:
    """Grid lines with values, ticks along the bottom, and axis titles."""
    marks = []
    for value in ticks(axes.low[1], axes.high[1], 5):
        y = axes.y(value)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text class="axis end" x="{LEFT - 7}" y="{y + 4:.1f}">{escape(show(value))}</text>')
    for value in ticks(axes.low[0], axes.high[0], 7):
        marks.append(f'<text class="axis mid" x="{axes.x(value):.1f}" y="{HEIGHT - 26}">{short(value)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle})" x="14" y="{middle}"'
    marks.append(
        f'<text class="axis title mid" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(x_title)}</text>'
    )
    marks.append(f'<text class="axis title mid" {turned}>{escape(y_title)}</text>' if y_title else "")
    return "".join(marks)


def svg_document(
    body: Sequence[str], axes: Axes, readout: Mapping[str, object], names: Sequence[tuple[str, str, str]]
) -> str:
    """The SVG, with data for the tooltip script of the page."""
    place = {"left": axes.x(axes.low[0]), "right": axes.x(axes.high[0]), "low": axes.low[0], "high": axes.high[0]}
    data = escape(json.dumps({"place": place, **readout}, separators=(",", ":")))
    cursor = f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-chart="{data}">{"".join(body)}{cursor}</svg>'
        f'{legend(names) if len(names) > 1 else ""}<p class="readout">&nbsp;</p>'
    )


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """Entries are (name, CSS class, glyph); without a glyph it is a line."""
    keys = "".join(
        f'<li class="{style}">{f"<b>{glyph}</b>" if glyph else "<i></i>"}{escape(name)}</li>'
        for name, style, glyph in entries
    )
    return f'<ul class="legend">{keys}</ul>'


def ticks(low: float, high: float, limit: int) -> list[float]:
    """Round values between low and high: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / limit
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def downsample(points: Points, limit: int = MAX_POINTS) -> Points:
    """At most `limit` points that keep every spike: the lowest and the highest of each chunk, in order."""
    if len(points) <= limit:
        return points
    kept: list[tuple[float, float]] = []
    for chunk in chunks(points, limit // 2):
        ends = {
            min(range(len(chunk)), key=lambda i: chunk[i][1]),
            max(range(len(chunk)), key=lambda i: chunk[i][1]),
        }
        kept += [chunk[index] for index in sorted(ends)]
    return kept


def average(rows: Sequence[tuple[float, Sequence[float]]], limit: int = 80) -> list[tuple[float, Sequence[float]]]:
    """At most `limit` rows, each the mean of a chunk."""
    means: list[tuple[float, Sequence[float]]] = []
    for chunk in chunks(rows, limit):
        parts = [sum(column) / len(chunk) for column in zip(*(parts for _, parts in chunk), strict=True)]
        means.append((chunk[len(chunk) // 2][0], parts))
    return means


def chunks(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """`count` contiguous chunks of nearly equal length."""
    count = min(count, len(items))
    edges = [index * len(items) // count for index in range(count + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(edges)]


# --- bars ------------------------------------------------------------------------------------------------


WIDTH, LABEL, VALUE, ROW = 640, 150, 90, 24
BLOCKS = "█▓▒░·"  # one per part of a bar
TEXT_WIDTH = 48


@dataclass(frozen=True)
class Bars:
    title: str
    names: Sequence[str]
    parts: Sequence[str]  # names of the stacked parts
    values: Sequence[Sequence[float]]  # of each bar
    show: Callable[[float], str]
    marks: Sequence[float | None] = ()  # of each bar, e.g. the value by formula
    mark: str = ""  # name of the marks

    @property
    def longest(self) -> float:
        return max([*(sum(bar) for bar in self.values), *(mark or 0.0 for mark in self.marks)]) or 1.0


def as_svg(bars: Bars) -> str:
    unit = (WIDTH - LABEL - VALUE) / bars.longest
    rows = []
    for index, (name, values) in enumerate(zip(bars.names, bars.values, strict=True)):
        top, x = index * ROW, float(LABEL)
        rows.append(f'<text class="axis end" x="{LABEL - 8}" y="{top + 16}">{escape(name)}</text>')
        for part, value in enumerate(values):
            end = x + value * unit
            corners = f"{x:.1f},{top + 4} {end:.1f},{top + 4} {end:.1f},{top + 20} {x:.1f},{top + 20}"
            rows.append(f'<polygon class="s{part}" points="{corners}"/>')
            x = end
        mark = bars.marks[index] if bars.marks else None
        if mark is not None:
            at = LABEL + mark * unit
            rows.append(f'<line class="cursor" x1="{at:.1f}" x2="{at:.1f}" y1="{top + 1}" y2="{top + 23}"/>')
        beyond = max(x, LABEL + (mark or 0.0) * unit)
        rows.append(f'<text class="axis" x="{beyond + 6:.1f}" y="{top + 16}">{escape(bars.show(sum(values)))}</text>')
    picture = f'<svg viewBox="0 0 {WIDTH} {len(bars.names) * ROW}" role="img">{"".join(rows)}</svg>'
    keys = legend([(part, f"s{index}", "") for index, part in enumerate(bars.parts)]) if len(bars.parts) > 1 else ""
    note = f'<p class="note">dashed: {escape(bars.mark)}</p>' if bars.mark else ""
    return f"<h3>{escape(bars.title)}</h3>{picture}{keys}{note}"


def as_text(bars: Bars) -> str:
    """A code block."""
    wide = max(len(name) for name in bars.names)
    lines = []
    for index, (name, values) in enumerate(zip(bars.names, bars.values, strict=True)):
        drawn, total = "", 0.0
        for part, value in enumerate(values):
            total += value
            drawn += BLOCKS[part] * (round(total / bars.longest * TEXT_WIDTH) - len(drawn))
        mark = bars.marks[index] if bars.marks else None
        if mark is not None:
            at = round(mark / bars.longest * TEXT_WIDTH)
            drawn = drawn.ljust(at)
            drawn = f"{drawn[:at]}|{drawn[at:]}"
        lines.append(f"{name:<{wide}}  {drawn} {bars.show(total)}")
    keys = ", ".join(f"{BLOCKS[index]} {part}" for index, part in enumerate(bars.parts))
    notes = [keys] * (len(bars.parts) > 1) + [f"| {bars.mark}"] * bool(bars.mark)
    return "\n".join(["```text", bars.title, *lines, *notes, "```"])
