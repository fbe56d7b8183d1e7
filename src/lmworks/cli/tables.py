"""Tables that fit a terminal and never cut a figure.

A table that is too wide has its prose and headings wrapped between words; then optional columns (`drop`) are left out
and listed below it; then it is transposed: a block a row, a line a column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.cells import cell_len
from rich.text import Text

GAP = 2  # spaces between columns
MIN_PROSE = 24  # the minimum width of a column of sentences
FIGURE = re.compile(r"[-+−–~≈<>≤≥±$]*\d")
# Where a line may end: not between a figure and its unit.
BREAK = re.compile(r"(?<!\d) +|(?<=\d) +(?![A-Za-zµ%×/]{1,9}(?:[\s,;.)]|$))")


@dataclass(frozen=True)
class Column:
    name: str
    cells: list[Text]

    @cached_property
    def right(self) -> bool:
        """Right-aligned: its cells are figures. A cell of many words is prose, even if it begins with a digit."""
        return all(
            cell.plain in ("-", "–", "") or (FIGURE.match(cell.plain) and len(cell.plain.split()) <= 4)
            for cell in self.cells
        )

    @cached_property
    def widest(self) -> int:
        return max(text_width(Text(self.name)), *map(text_width, self.cells), 0)

    @cached_property
    def least(self) -> int:
        """The minimum width: headings and prose wrap between words, figures and names do not."""
        heading = longest_word(Text(self.name))
        if self.right:
            return max(heading, *map(text_width, self.cells), 0)
        return max(heading, *map(longest_word, self.cells), min(self.widest, MIN_PROSE) if self.wraps else 0)

    @cached_property
    def wraps(self) -> bool:
        return any(BREAK.search(cell.plain) for cell in self.cells)


def render_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int | None, drop: Sequence[str] = ()
) -> list[Text]:
    """The lines of a table in `width` columns (None: as wide as it is).

    `drop`: optional columns, the first is left out first.
    """
    if unknown := set(drop) - set(columns):
        raise ValueError(f"{title}: {', '.join(sorted(unknown))} may be dropped, but there is no such column")
    texts = [[as_text(cell) for cell in row] for row in rows]
    table = [Column(name, [row[index] for row in texts]) for index, name in enumerate(columns)]
    heading = wrap(Text(title, style="italic"), width) if title else []
    for count in range(len(drop) + 1):
        gone = drop[:count]
        kept = [column for column in table if column.name not in gone]
        sizes = fit_columns(kept, width)
        if sizes is not None:
            note = f"not shown in {width} columns: {'; '.join(gone)} (a wider terminal has them, and --json)"
            return [*heading, Text(), *grid(kept, sizes), *(wrap(Text(note), width) if gone else []), Text()]
    return [*heading, Text(), *as_blocks(table, width)]


def fit_columns(columns: Sequence[Column], width: int | None) -> list[int] | None:
    """How wide each column is, the widest giving way first; None where figures would have to be cut."""
    sizes = [column.widest for column in columns]
    if width is None:
        return sizes
    room = width - 1 - GAP * (len(columns) - 1)
    if sum(column.least for column in columns) > room:
        return None
    while sum(sizes) > room:
        spare = [index for index, column in enumerate(columns) if sizes[index] > column.least]
        sizes[max(spare, key=lambda index: sizes[index])] -= 1
    return sizes


def grid(columns: Sequence[Column], sizes: Sequence[int]) -> list[Text]:
    names = [Text(column.name, style="bold") for column in columns]
    rule = Text(" " + "─" * (sum(sizes) + GAP * (len(sizes) - 1)))
    lines = [*side_by_side(columns, sizes, names), rule]
    for row in zip(*(column.cells for column in columns), strict=True):
        lines += side_by_side(columns, sizes, row)
    return lines


def side_by_side(columns: Sequence[Column], sizes: Sequence[int], cells: Sequence[Text]) -> list[Text]:
    """One row, as many lines high as its highest cell."""
    wrapped = [wrap(cell, size) for cell, size in zip(cells, sizes, strict=True)]
    lines = []
    for number in range(max(map(len, wrapped), default=0)):
        line = Text()
        for index, (column, size) in enumerate(zip(columns, sizes, strict=True)):
            piece = wrapped[index][number] if number < len(wrapped[index]) else Text()
            line.append(" " * (GAP if index else 1))
            padding = " " * (size - text_width(piece))
            line.append_text(Text(padding) + piece if column.right else piece + Text(padding))
        line.rstrip()
        lines.append(line)
    return lines


def as_blocks(columns: Sequence[Column], width: int | None) -> list[Text]:
    """A block a row, headed by its first cell, and a line for each other cell that is not empty."""
    indent = 2 + max((text_width(Text(column.name)) for column in columns[1:]), default=0) + 2
    lines = []
    for row in zip(*(column.cells for column in columns), strict=True):
        for index, (column, cell) in enumerate(zip(columns, row, strict=True)):
            if not cell.plain:
                continue
            name = f"{column.name}: " if column.name else ""
            start = Text(("  " if index else "") + name, style="bold")
            start = start if not index else start + Text(" " * (indent - text_width(start)))
            for number, piece in enumerate(
                wrap(cell, None if width is None else max(width - text_width(start), MIN_PROSE))
            ):
                lines.append((Text(" " * text_width(start)) if number else start) + piece)
        lines.append(Text())
    return lines


def as_text(cell: Any) -> Text:
    """A cell may be a styled Text; other values are plain text, without rich markup."""
    return cell if isinstance(cell, Text) else Text(str(cell))


def text_width(text: Text) -> int:
    return max((line.cell_len for line in text.split("\n")), default=0)


def longest_word(text: Text) -> int:
    return max(cell_len(word) for line in text.plain.split("\n") for word in BREAK.split(line))


def wrap(text: Text, width: int | None) -> list[Text]:
    """Lines of at most this width; a word that is longer stands alone, whole."""
    lines = []
    for line in text.split("\n", allow_blank=True) if text.plain else [text]:
        while width is not None and line.cell_len > width:
            breaks = [found for found in BREAK.finditer(line.plain) if found.start()]
            before = [found for found in breaks if cell_len(line.plain[: found.start()]) <= width]
            at = before[-1] if before else breaks[0] if breaks else None
            if at is None:
                break
            lines.append(line[: at.start()])
            line = line[at.end() :]
        lines.append(line)
    return lines
