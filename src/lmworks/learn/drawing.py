"""Pictures of lessons as SVG: boxes, arrows, bars and text on a grid of pixels.

Text in a box is dark on a light shade, all else is a grey that reads on a white and on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

SHADES = {"blue": "#b3d4f5", "green": "#bfe3c0", "orange": "#fbd2a4", "red": "#f5b8b5", "purple": "#d8c7f0",
          "grey": "#dcdcdc", "white": "#ffffff"}  # fmt: skip
INK, DARK = "#777777", "#222222"
FONT = 13
LINE = 17  # pixels from one line of text to the next
CHARACTER = 0.56  # of the font's size: the width of a character of a sans-serif font, in the mean


class Drawing:
    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []
        self.outside: list[str] = []  # texts that leave the picture or their box: a test asks

    def text(self, x: float, y: float, words: str, *, anchor: str = "middle", size: int = FONT, ink: str = INK,
             bold: bool = False) -> None:  # fmt: skip
        """`y` is the base line of the first line; `\\n` begins another. `anchor`: start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        for number, line in enumerate(words.split("\n")):
            at = y + number * LINE
            self.parts.append(
                f'<text x="{pixels(x)}" y="{pixels(at)}" font-size="{size}" text-anchor="{anchor}" '
                f'fill="{ink}"{weight}>{escape(line)}</text>'
            )
            wide = width_of(line, size)
            first = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
            if first < 0 or first + wide > self.width or at - size < 0 or at > self.height:
                self.outside.append(line)

    def box(self, x: float, y: float, width: float, height: float, words: str = "", shade: str = "blue",
            size: int = FONT) -> None:  # fmt: skip
        """Words stand in its middle."""
        self.parts.append(
            f'<rect x="{pixels(x)}" y="{pixels(y)}" width="{pixels(width)}" height="{pixels(height)}" rx="3" '
            f'fill="{SHADES[shade]}" stroke="{INK}"/>'
        )
        if x < 0 or y < 0 or x + width > self.width or y + height > self.height:
            self.outside.append(f"box {words}")
        if words:
            lines = words.split("\n")
            top = y + height / 2 - (len(lines) - 1) * LINE / 2 + size * 0.36
            self.text(x + width / 2, top, words, size=size, ink=DARK)
            self.outside += [line for line in lines if width_of(line, size) > width + 2]

    def line(self, *points: tuple[float, float], dashed: bool = False) -> None:
        self.parts.append(path(points, dashed))

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Through these points; the head is at the last."""
        self.parts.append(path(points, dashed, ' marker-end="url(#head)"'))

    def svg(self, title: str) -> str:
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="system-ui, sans-serif">'
            f"<title>{escape(title)}</title>{head}{''.join(self.parts)}</svg>\n"
        )

    # --- of these ----------------------------------------------------------------------------------------

    def bars(self, x: float, y: float, width: float, rows: Sequence[tuple[str, Sequence[tuple[float, str]], str]],
             label: float = 110, height: float = 22) -> None:  # fmt: skip
        """Rows of (label, parts of (value, shade), words after it), all to one scale; the longest ends at `width`."""
        longest = max(sum(value for value, _ in parts) for _, parts, _ in rows)
        scale = (width - label - max(width_of(words, FONT) for _, _, words in rows) - 8) / longest
        for number, (name, parts, words) in enumerate(rows):
            top, at = y + number * (height + 8), x + label
            self.text(x + label - 8, top + height / 2 + 5, name, anchor="end")
            for value, shade in parts:
                if value:
                    self.box(at, top, value * scale, height, shade=shade)
                    at += value * scale
            self.text(at + 8, top + height / 2 + 5, words, anchor="start")

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """(words, shade) from left to right."""
        for words, shade in entries:
            self.box(x, y - 10, 12, 12, shade=shade)
            self.text(x + 18, y, words, anchor="start")
            x += 18 + width_of(words, FONT) + 18


def pixels(value: float) -> str:
    return f"{round(value, 1):g}"


def width_of(words: str, size: int) -> float:
    return len(words) * size * CHARACTER


def path(points: Sequence[tuple[float, float]], dashed: bool, more: str = "") -> str:
    way = " ".join(f"{'L' if number else 'M'}{pixels(x)} {pixels(y)}" for number, (x, y) in enumerate(points))
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<path d="{way}" fill="none" stroke="{INK}" stroke-width="1.4"{dashes}{more}/>'
