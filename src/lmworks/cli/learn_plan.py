"""`lmworks learn plan`, `checklist`, `milestones` and `benchmarks`: what is done, by what is there."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import typer

from ..learn.progress import Progress
from ..learn.workspace import Workspace
from ..spec.errors import SpecError
from .output import Json, print_json, print_table


def plan(json: Json = False) -> None:
    """The study plan by days, ticked by what you have done."""
    print_ticks("plan", json)


def checklist(json: Json = False) -> None:
    """The checklist of week 1, ticked by what you have done."""
    print_ticks("checklist", json)


def milestones(json: Json = False) -> None:
    """The three milestones, ticked by what you have done."""
    print_ticks("milestones", json)


def benchmarks(json: Json = False) -> None:
    """Write the table of your runs into benchmarks.md."""
    from ..learn.benchmarks import COLUMNS, row_of, write_benchmarks
    from ..learn.runs import find_runs

    workspace = Workspace.find(Path.cwd())
    runs = find_runs(workspace.folder)
    whole = [run for run in runs if not run.problem]
    if not whole:
        why = "".join(f"; {run.name}: {run.problem}" for run in runs)
        raise SpecError(f"{workspace.folder}/runs has no whole run{why}; the trainers of src/training leave them there")
    file = write_benchmarks(workspace.folder, whole)
    rows = [row_of(run) for run in whole]
    left_out = {run.name: run.problem for run in runs if run.problem}
    if json:
        table = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        print_json({"file": str(file), "runs": table, "left_out": left_out})
        return
    print_table("Runs", COLUMNS, rows, drop=("recompute", "batch", "last loss"))
    for name, problem in left_out.items():
        typer.echo(f"{name} is left out: {problem}")
    typer.echo(f"{file} has the table; write below it what you conclude.")


def print_ticks(kind: str, json: bool) -> None:
    from ..learn.goals import ticks

    workspace = Workspace.find(Path.cwd())
    found = ticks(kind, workspace.folder, Progress.load(workspace.folder))
    if json:
        print_json([asdict(one) for one in found])
        return
    for section, items in groupby(found, key=lambda one: one.section):
        typer.echo(f"{section}\n")
        for one in items:
            typer.echo(f"  {'✓' if one.done else '·'} {one.item}")
            if one.found:
                typer.echo(f"      {one.found}")
            if not one.done:
                rows = (("read", one.link), ("do", one.how), ("needs", one.needs))
                for label, text in rows:
                    if text:
                        typer.echo(f"      {label:<6} {text}")
        typer.echo("")
    typer.echo(f"{sum(one.done for one in found)} of {len(found)} done.")
