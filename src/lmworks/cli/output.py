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
from . import complete

Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="A TOML file, a run folder, or the name of a model preset.",
        autocompletion=complete.sources,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.KEY=VALUE]...",
        help="Changes to the spec, e.g. optim.lr=3e-4.",
        autocompletion=complete.overrides,
    ),
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


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], drop: Sequence[str] = ()) -> None:
    """A table that fits the terminal. `drop`: columns that may be left out of a narrow one, the first to go first.

    A pipe has no width to respect, unless COLUMNS gives it one.
    """
    from rich.console import Console

    from .table import render_table

    console = Console(markup=False, highlight=False)
    bounded = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    with console.capture() as captured:
        for line in render_table(title, columns, rows, console.width if bounded else None, drop):
            console.print(line, soft_wrap=True)
    write(captured.get(), nl=False)


def write_file(path: Path, text: str, option: str) -> None:
    """What an option asked to be written; `option` names it in the error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{option} {path}: {error.strerror}") from None
