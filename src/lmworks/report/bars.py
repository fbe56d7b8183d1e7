"""Horizontal bar charts: SVG for HTML (colours are CSS classes s0, s1, …), text for markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .svg import legend

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
