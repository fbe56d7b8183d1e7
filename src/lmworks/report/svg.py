"""Charts as SVG text, small enough to read: lines over steps, marks on them, and stacked shares over steps.

Colours are CSS classes (`s0`, `s1`, …) of the page around them, so a chart follows light and dark mode.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TypeVar

from ..record.figures import short

Points = Sequence[tuple[float, float]]
T = TypeVar("T")

WIDTH, HEIGHT = 640, 270
LEFT, RIGHT, TOP, BOTTOM = 88, 24, 18, 44
MOST_POINTS = 500  # more than a chart has pixels for


@dataclass(frozen=True)
class Line:
    name: str
    points: Points
    style: str  # CSS classes: s0 … for the colour, faint for a backdrop
    dots: bool = False  # mark each point: for values that are few


@dataclass(frozen=True)
class Marks:
    """Events of one kind on a chart; the texts are read under the pointer."""

    name: str
    style: str  # CSS class, for the colour
    glyph: str
    points: Sequence[tuple[float, str]]
    low: bool = False  # on the axis, for what happens often and is no news; else a line from top to bottom


@dataclass(frozen=True)
class Axes:
    """Where a value lies on the picture."""

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
    marks: Sequence[Marks] = (),
) -> str:
    """Lines over steps; `zero` keeps 0 in view. `show` writes a value of the y axis; `x` and `y` name the axes."""
    points = [point for line in lines for point in line.points]
    if not points:
        return '<p class="empty">Nothing was recorded.</p>'
    values = [y for _, y in points]
    axes = make_axes([x for x, _ in points], min([*values, 0.0] if zero else values), max(values))
    marks = [replace(each, points=apart(axes, each.points)) for each in marks if each.points]
    body = [frame(axes, show, x, y), *(draw_marks(axes, each) for each in marks)]
    for line in lines:
        thinned = thin(line.points)
        if len(line.points) > 1:
            body.append(f'<polyline class="{line.style}" points="{axes.path(thinned)}"/>')
        if line.dots or len(line.points) == 1:
            spots = "".join(f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3"/>' for x, y in thinned)
            body.append(f'<g class="{line.style}">{spots}</g>')
    readout = [{"name": line.name, "points": [(x, show(y)) for x, y in thin(line.points)]} for line in lines]
    names = [(line.name, line.style, "") for line in lines if line.points]
    names += [(each.name, f"mark {each.style}", each.glyph) for each in marks]
    return picture(body, axes, {"x": x, "lines": readout, "marks": marks_read(marks)}, names)


def stacked_chart(
    names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]], show: Callable[[float], str], y: str = ""
) -> str:
    """Parts that add up to a whole, over steps; each row is (step, the parts)."""
    if len(rows) < 2:
        return '<p class="empty">Too few steps for a chart.</p>'
    sums = [sum(parts[index] for _, parts in rows) for index in range(len(names))]
    rows = average(rows)
    axes = make_axes([x for x, _ in rows], 0.0, max(sum(parts) for _, parts in rows))
    body = [frame(axes, show, "step", y)]
    floor = [0.0] * len(rows)
    for index in range(len(names)):
        top = [below + parts[index] for below, (_, parts) in zip(floor, rows, strict=True)]
        xs = [x for x, _ in rows]
        outline = [*zip(xs, top, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        body.append(f'<polygon class="s{index}" points="{axes.path(outline)}"/>')
        floor = top
    whole = sum(sums) or 1.0
    shares = [
        (f"{name} {part / whole:.1%}", f"s{index}", "")
        for index, (name, part) in enumerate(zip(names, sums, strict=True))
    ]
    readout = [
        {"name": name, "points": [(x, show(parts[index])) for x, parts in rows]} for index, name in enumerate(names)
    ]
    return picture(body, axes, {"x": "step", "lines": readout, "marks": []}, shares)


def make_axes(xs: Sequence[float], low: float, high: float) -> Axes:
    """Room for the data, and some for data without any extent."""
    left, right = min(xs), max(xs)
    if left == right:
        left, right = left - 1, right + 1
    if low == high:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    return Axes((left, low), (right, high + (high - low) * 0.04))


def apart(axes: Axes, points: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """What can be told apart on the picture, and lies on it: of marks less than three units apart, the first."""
    kept: list[tuple[float, str]] = []
    for x, text in points:
        x = min(max(x, axes.low[0]), axes.high[0])
        if not kept or abs(axes.x(x) - axes.x(kept[-1][0])) >= 3:
            kept.append((x, text))
    return kept


def draw_marks(axes: Axes, marks: Marks) -> str:
    drawn = []
    for place, text in marks.points:
        x = axes.x(place)
        line = "" if marks.low else f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        y = HEIGHT - BOTTOM - 2 if marks.low else TOP - 5
        glyph = f'<text class="mid" x="{x:.1f}" y="{y}">{marks.glyph}</text>'
        drawn.append(f"<g><title>{escape(text)}</title>{line}{glyph}</g>")
    return f'<g class="mark {marks.style}">{"".join(drawn)}</g>'


def marks_read(marks: Sequence[Marks]) -> list[dict[str, object]]:
    return [{"name": each.name, "points": each.points} for each in marks]


def frame(axes: Axes, show: Callable[[float], str], x_title: str, y_title: str) -> str:
    """Grid lines with their values, steps along the bottom, and the names of both axes."""
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


def picture(
    body: Sequence[str], axes: Axes, readout: Mapping[str, object], names: Sequence[tuple[str, str, str]]
) -> str:
    """The drawing, with what the page's script needs to name the values under the pointer."""
    place = {"left": axes.x(axes.low[0]), "right": axes.x(axes.high[0]), "low": axes.low[0], "high": axes.high[0]}
    data = escape(json.dumps({"place": place, **readout}, separators=(",", ":")))
    cursor = f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-chart="{data}">{"".join(body)}{cursor}</svg>'
        f'{legend(names) if len(names) > 1 else ""}<p class="readout">&nbsp;</p>'
    )


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """Of each its name, its CSS class, and what it is drawn as, if that is not a line."""
    keys = "".join(
        f'<li class="{style}">{f"<b>{glyph}</b>" if glyph else "<i></i>"}{escape(name)}</li>'
        for name, style, glyph in entries
    )
    return f'<ul class="legend">{keys}</ul>'


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values between low and high: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points that keep every spike: the lowest and the highest of each stretch, in order."""
    if len(points) <= most:
        return points
    kept: list[tuple[float, float]] = []
    for stretch in stretches(points, most // 2):
        ends = {
            min(range(len(stretch)), key=lambda i: stretch[i][1]),
            max(range(len(stretch)), key=lambda i: stretch[i][1]),
        }
        kept += [stretch[index] for index in sorted(ends)]
    return kept


def average(rows: Sequence[tuple[float, Sequence[float]]], most: int = 80) -> list[tuple[float, Sequence[float]]]:
    """At most `most` rows, each the mean of a stretch: the parts still add up to the mean of the whole."""
    means: list[tuple[float, Sequence[float]]] = []
    for stretch in stretches(rows, most):
        parts = [sum(column) / len(stretch) for column in zip(*(parts for _, parts in stretch), strict=True)]
        means.append((stretch[len(stretch) // 2][0], parts))
    return means


def stretches(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """`count` runs of neighbours, as equal as can be."""
    count = min(count, len(items))
    edges = [index * len(items) // count for index in range(count + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(edges)]
