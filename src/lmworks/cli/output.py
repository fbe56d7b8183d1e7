"""Shared by all commands: spec and overrides, `--json`, tables, writing results."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.text import Text

from ..record import RunFolder
from ..record.formatting import binary_bytes
from ..spec.dial import dial_overrides
from ..spec.errors import LMWorksError, SpecError
from ..spec.model import ModelSpec
from ..spec.presets import PRESETS
from ..weight_prefetch import weight_files
from . import options

Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="A TOML file, a run folder, or the name of a model preset.",
        autocompletion=options.sources,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.KEY=VALUE]...",
        help="Changes to the spec, e.g. optim.lr=3e-4.",
        autocompletion=options.overrides,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]


def with_dial(spec: str, overrides: list[str] | None, dial: str) -> list[str]:
    """Overrides with the keys that --dial stands for, which are printed, in front of them."""
    given = overrides or []
    expanded = dial_overrides(spec, given, dial)
    if dial:
        typer.echo(f"--dial {dial}: {' '.join(expanded[: len(expanded) - len(given)])}", err=True)
    return expanded


def print_json(result: Any) -> None:
    write(as_json(result))


def as_json(result: Any) -> str:
    return json.dumps(result, indent=2, allow_nan=False)


def write(text: str, nl: bool = True) -> None:
    """Writes a command's result. A full disk is a one-line error; a closed pipe is none."""
    try:
        typer.echo(text, nl=nl)
    except BrokenPipeError:
        raise
    except OSError as error:
        close_output()
        raise LMWorksError(f"the result could not be written: {error.strerror}") from None


def close_output() -> None:
    """Redirects stdout to /dev/null, so that the interpreter does not flush again at exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextmanager
def uninterrupted_output() -> Iterator[None]:
    """For output after Ctrl-C: a second Ctrl-C is ignored, and the reader may be gone."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    except OSError:
        close_output()
    finally:
        signal.signal(signal.SIGINT, before)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], drop: Sequence[str] = ()) -> None:
    """A table that fits the terminal. `drop`: optional columns of a narrow table, the first is left out first.

    A pipe has no width to respect, unless COLUMNS gives it one.
    """
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    bounded = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    with console.capture() as captured:
        for line in render_table(title, columns, rows, console.width if bounded else None, drop):
            console.print(line, soft_wrap=True)
    write(captured.get(), nl=False)


def write_file(path: Path, text: str, option: str) -> None:
    """Writes the file of an option; `option` is named in errors."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{option} {path}: {error.strerror}") from None


# --- tables that fit a terminal and never cut a figure ---------------------------------------------------

# A table that is too wide has its prose and headings wrapped between words; then optional columns (`drop`) are left out
# and listed below it; then it is transposed: a block a row, a line a column.


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


# --- progress text while a model is loaded ---------------------------------------------------------------


def loading(source: str | Path, step: int | None = None) -> str:
    """'loading runs/demo: …'. Errors of the source are ignored here: the loader reports them."""
    if str(source) in PRESETS and not Path(source).exists():
        return f"loading {source}: {ModelSpec.from_preset(str(source)).params:,} parameters, random weights of a preset"
    with suppress(LMWorksError, OSError, ValueError, LookupError, AttributeError, TypeError):
        if (Path(source) / "spec.toml").is_file():
            which = "newest checkpoint" if step is None else f"step {step}"
            return f"loading {source}: {RunFolder.open(source).spec().model.params:,} parameters, {which}"
        if files := weight_files(Path(source)):
            return f"loading {source}: {binary_bytes(sum(file.stat().st_size for file in files))} of weights"
    return f"loading {source}"
