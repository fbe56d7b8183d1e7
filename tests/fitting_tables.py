"""What is checked of every table that a command prints in a test: at no width is anything cut or lost unsaid."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WIDTHS = (60, 70, 80, 100, 120, 160, 200)
NOT_SHOWN = re.compile(r"not shown in \d+ columns: (.*) \(a wider terminal has them, and --json\)$")
Layout = Callable[..., list[Any]]
seen: set[str] = set()  # where tables were printed: file and function


def checked(render_table: Layout) -> Layout:
    """The same, and every table is also laid out at all widths and looked at."""

    def lay_out_and_check(
        title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int | None, drop: Sequence[str] = ()
    ) -> list[Any]:
        caller = sys._getframe(2)  # of print_table
        seen.add(f"{Path(caller.f_code.co_filename).stem}.{caller.f_code.co_name}")
        rows = [list(row) for row in rows]
        for each in (*WIDTHS, None):
            lines = [line.plain for line in render_table(title, columns, rows, each, drop)]
            problem = lost(columns, rows, lines, each, drop)
            assert not problem, f"{title or columns} in {each} columns: {problem}\n" + "\n".join(lines)
        return render_table(title, columns, rows, width, drop)

    return lay_out_and_check


def lost(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], lines: list[str], width: int | None, drop: Sequence[str]
) -> str:
    """What is wrong with these lines; nothing, if each cell can be read or its column is named as left out."""
    text = " ".join(" ".join(lines).split())
    said = NOT_SHOWN.search(text)
    gone = said[1].split("; ") if said else []
    if gone != list(drop[: len(gone)]) or columns[0] in drop:
        return f"left out {gone}; what may be is {list(drop)}"
    words = Counter(text.split())
    kept = [index for index, name in enumerate(columns) if name not in gone]
    cells = [str(row[index]) for row in rows for index in kept]
    missing = Counter(word for cell in cells for word in cell.split()) - words
    if missing:
        return f"cut or lost: {dict(missing)}"
    for cell in cells:
        for figure in re.findall(
            r"[\d.,]*\d [A-Za-zµ%×/]{1,9}(?=[\s,;.)]|$)", cell
        ):  # a figure and its unit stand in one line
            if not any(figure in line for line in lines):
                return f"{figure!r} of {cell!r} is broken in two"
    if width is not None:
        for line in lines:
            if len(line) > width and " " in line.strip().partition(": ")[2].strip():
                return f"{line!r} is {len(line)} wide"
    return ""
