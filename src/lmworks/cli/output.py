"""Shared by all commands: `--json`, writing results."""

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

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]


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
    from rich.console import Console  # neither is needed by commands that print no table

    from .tables import render_table

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
