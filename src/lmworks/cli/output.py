"""What every command shares: a spec with its overrides, the `--json` option, tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..spec.errors import LMWorksError, SpecError

Spec = Annotated[str, typer.Argument(metavar="SPEC", help="A TOML file, a run folder, or the name of a model preset.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the spec, e.g. optim.lr=3e-4.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]


def print_json(result: Any) -> None:
    write(as_json(result))


def as_json(result: Any) -> str:
    return json.dumps(result, indent=2, allow_nan=False)


def write(text: str, nl: bool = True) -> None:
    """What a command was asked for. A full disk is one line; a pipe whose reader is gone is nothing to speak of."""
    try:
        typer.echo(text, nl=nl)
    except BrokenPipeError:
        raise
    except OSError as error:
        close_output()
        raise LMWorksError(f"the result could not be written: {error.strerror}") from None


def close_output() -> None:
    """What could not be written is not tried once more when the process ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextmanager
def last_words() -> Iterator[None]:
    """After Ctrl-C: a second one does not cut them off, and whoever was to read them may be gone."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    except OSError:
        close_output()
    finally:
        signal.signal(signal.SIGINT, before)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table; columns whose cells are all numbers or start with a digit are right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        cells = [str(row[index]) for row in rows]
        numeric = all(cell[:1].isdigit() or cell in ("-", "") for cell in cells)
        # In a narrow terminal the first column, a name, folds; figures stay in one piece.
        table.add_column(column, justify="right" if numeric else "left", no_wrap=index > 0, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(markup=False, highlight=False)  # a name like [x] is text, not a style
    if not console.is_terminal:  # a pipe has no width to respect: nothing is cut off
        endless = console.options.update(max_width=10_000)
        console.width = max(console.width, console.measure(table, options=endless).maximum)
    console.print(table)


def write_file(path: Path, text: str, option: str) -> None:
    """What an option asked to be written; `option` names it in the error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{option} {path}: {error.strerror}") from None
