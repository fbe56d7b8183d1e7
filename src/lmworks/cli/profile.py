"""`lmworks profile`: where the time of a step, or of an engine, goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .groups import CommandGroup
from .output import Json
from .profile_compare import compare
from .profile_engine import engine
from .profile_memory import memory
from .profile_record import Html, Perfetto, attach, train
from .trace_report import report_traces

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="See where the time goes: steps, traces, the engine.")


@app.callback()
def profile() -> None:
    """See where the time goes: steps, traces, the engine."""


app.command()(train)
app.command()(attach)
app.command()(memory)
app.command()(compare)
app.command()(engine)


@app.command("trace")
def trace(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Traces of PyTorch's profiler, one a rank (.json, .json.gz)."),
    ],
    html: Html = None,
    perfetto: Perfetto = None,
    json: Json = False,
) -> None:
    """Read profiler traces of any PyTorch program.

    \b
    Examples:
      lmworks profile trace runs/tiny/traces/*.json.gz --html page.html
      lmworks profile trace rank0.json.gz rank1.json.gz --perfetto job.json.gz
      lmworks profile trace rank0.json.gz rank1.json.gz --json
    """
    report_traces(files, json, html, perfetto)
