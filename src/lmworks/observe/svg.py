"""Charts as SVG text, small enough to read: lines over steps, and stacked shares over steps.

Colours are CSS classes (`s0`, `s1`, …) of the page around them, so a chart follows light and dark mode.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from ..record.figures import short

Points = Sequence[tuple[float, float]]
T = TypeVar("T")

WIDTH, HEIGHT = 640, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 26
MOST_POINTS = 500  # more than a chart has pixels for


@dataclass(frozen=True)
class Line:
    name: str
    points: Points
    style: str  # CSS classes: s0 … for the colour, faint for a backdrop
    dots: bool = False  # mark each point: for values that are few


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


def line_chart(lines: Sequence[Line], *, zero: bool = False, show: Callable[[float], str] = short) -> str:
    """Lines over steps; `zero` keeps 0 in view. `show` writes a value of the y axis."""
    points = [point for line in lines for point in line.points]
    if not points:
        return '<p class="empty">Nothing was recorded.</p>'
    values = [y for _, y in points]
    axes = make_axes([x for x, _ in points], min([*values, 0.0] if zero else values), max(values))
    body = [frame(axes, show)]
    for line in lines:
        thinned = thin(line.points)
        if len(line.points) > 1:
            body.append(f'<polyline class="{line.style}" points="{axes.path(thinned)}"/>')
        if line.dots or len(line.points) == 1:
            spots = "".join(f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3"/>' for x, y in thinned)
            body.append(f'<g class="{line.style}">{spots}</g>')
    readout = [{"name": line.name, "points": [(x, show(y)) for x, y in thin(line.points)]} for line in lines]
    return picture(body, axes, readout, [(line.name, line.style) for line in lines if line.points])


def stacked_chart(
    names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]], show: Callable[[float], str]
) -> str:
    """Parts that add up to a whole, over steps; each row is (step, the parts)."""
    if len(rows) < 2:
        return '<p class="empty">Too few steps for a chart.</p>'
    sums = [sum(parts[index] for _, parts in rows) for index in range(len(names))]
    rows = average(rows)
    axes = make_axes([x for x, _ in rows], 0.0, max(sum(parts) for _, parts in rows))
    body = [frame(axes, show)]
    floor = [0.0] * len(rows)
    for index in range(len(names)):
        top = [below + parts[index] for below, (_, parts) in zip(floor, rows, strict=True)]
        xs = [x for x, _ in rows]
        outline = [*zip(xs, top, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        body.append(f'<polygon class="s{index}" points="{axes.path(outline)}"/>')
        floor = top
    whole = sum(sums) or 1.0
    shares = [
        (f"{name} {part / whole:.1%}", f"s{index}") for index, (name, part) in enumerate(zip(names, sums, strict=True))
    ]
    readout = [
        {"name": name, "points": [(x, show(parts[index])) for x, parts in rows]} for index, name in enumerate(names)
    ]
    return picture(body, axes, readout, shares)


def make_axes(xs: Sequence[float], low: float, high: float) -> Axes:
    """Room for the data, and some for data without any extent."""
    left, right = min(xs), max(xs)
    if left == right:
        left, right = left - 1, right + 1
    if low == high:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    return Axes((left, low), (right, high + (high - low) * 0.04))


def frame(axes: Axes, show: Callable[[float], str]) -> str:
    """Grid lines with their values, and steps along the bottom."""
    marks = []
    for value in ticks(axes.low[1], axes.high[1], 5):
        y = axes.y(value)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text class="axis end" x="{LEFT - 7}" y="{y + 4:.1f}">{escape(show(value))}</text>')
    for value in ticks(axes.low[0], axes.high[0], 7):
        marks.append(f'<text class="axis mid" x="{axes.x(value):.1f}" y="{HEIGHT - 7}">{short(value)}</text>')
    return "".join(marks)


def picture(body: Sequence[str], axes: Axes, readout: object, names: Sequence[tuple[str, str]]) -> str:
    """The drawing, with what the page's script needs to name the values under the pointer."""
    place = {"left": axes.x(axes.low[0]), "right": axes.x(axes.high[0]), "low": axes.low[0], "high": axes.high[0]}
    data = escape(json.dumps({"place": place, "lines": readout}, separators=(",", ":")))
    cursor = f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-chart="{data}">{"".join(body)}{cursor}</svg>'
        f'{legend(names) if len(names) > 1 else ""}<p class="readout">&nbsp;</p>'
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<li class="{style}"><i></i>{escape(name)}</li>' for name, style in entries)
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
