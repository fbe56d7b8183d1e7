"""`lmworks learn cheatsheet` and `summary`: rules of thumb beside numbers, and a page on each reading."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..learn.workspace import Workspace
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..learn.cheat_sheet import CheatSheet, Table


def cheatsheet(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the rules on this machine, in a minute or two.")
    ] = False,
    json: Json = False,
) -> None:
    """Rules of thumb with numbers, debugging tips, what to read."""
    from ..learn.cheat_sheet import as_json, cheat_sheet, shipped_measurement

    measured = measure_here() if measure else shipped_measurement()
    if json:
        print_json(as_json(measured))
        return
    sheet = cheat_sheet()
    print_rules(sheet, measured)
    print_problems(sheet)
    typer.echo("Key questions\n")
    for one in sheet.questions:
        typer.echo(f"  {one.question}\n    {one.answer}\n    exercises: {', '.join(one.exercises)}")
    typer.echo("\nEssential reading")
    for kind, ones in groupby(sheet.essential, key=lambda one: one.kind):
        typer.echo(f"\n  {kind}")
        for essential in ones:
            reading = essential.reading
            typer.echo(f"    {reading.title}\n      {reading.link}")
            typer.echo(f"      lmworks learn quiz {reading.id}; then lmworks learn summary {reading.id}")
            typer.echo(f"      in LMWorks: {essential.command}")


def measure_here() -> dict[str, Any]:
    import os

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a thread a rank
    from ..learn.rules_of_thumb import measure

    return measure(lambda line: typer.echo(f"  {line}", err=True))


def print_rules(sheet: CheatSheet, measured: dict[str, Any]) -> None:
    from ..learn.cheat_sheet import measured_on, measured_table, planned_table

    typer.echo(f"Measured on {measured_on(measured)}.\n")
    for rule in sheet.rules:
        typer.echo(rule.title)
        width = max(len(label) for label, _ in rule.points)
        for label, text in (*rule.points, ("Premise", rule.premise), ("Formula", rule.formula)):
            typer.echo(f"  {label:<{max(width, 7)}}  {text}")
        print_one("By the planner", planned_table(rule))
        print_one("Measured", measured_table(rule, measured))


def print_one(title: str, table: Table) -> None:
    print_table(f"{title}: {table.about}", table.columns, table.cells)
    typer.echo("")


def print_problems(sheet: CheatSheet) -> None:
    from ..learn.cheat_sheet import problem_table

    for problem in sheet.problems:
        typer.echo(problem.title)
        for number, tip in enumerate(problem.tips, 1):
            typer.echo(f"  {number}. {tip.text}\n     {tip.command}")
        print_one("By the planner", problem_table(problem))


def summary(
    reading: Annotated[str, typer.Argument(metavar="[READING]", help="A reading by its name; else all.")] = "",
    json: Json = False,
) -> None:
    """Start a one-page summary of a reading, or list all of them."""
    from ..learn.goals import readings
    from ..learn.summaries import find_reading, read_summary, start_summary

    folder = Workspace.find(Path.cwd()).folder
    chosen = [find_reading(reading)] if reading else list(readings().values())
    started = bool(reading) and start_summary(folder, chosen[0])
    found = [read_summary(folder, one.id) for one in chosen]
    if json:
        rows = [{**vars(one), "state": one.state, "problem": one.problem if one.exists else ""} for one in found]
        print_json(rows[0] | {"new": started} if reading else rows)
        return
    if started:
        typer.echo(f"{folder / found[0].file}: write below each heading, in your own words, one page.")
        return
    if reading:
        typer.echo(f"{found[0].file}: {found[0].problem or f'written, {found[0].words} words'}")
        return
    cells = [[one.reading, one.state, one.words or "", one.problem if one.exists else ""] for one in found]
    print_table("Summaries", ["reading", "state", "words", "what is missing"], cells)
    typer.echo("`lmworks learn summary READING` starts one.")
