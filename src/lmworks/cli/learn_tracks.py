"""`lmworks learn tracks`: the study plans as tracks of lessons, ticked by what is there."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from ..learn.progress import Progress
from ..learn.workspace import Workspace
from ..spec.errors import SpecError
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..learn.tracks import Lesson

NOWHERE = Path(os.devnull)  # a folder without files


def tracks(
    name: Annotated[str, typer.Argument(metavar="[TRACK]", help="Its lessons; else all tracks.")] = "",
    json: Json = False,
) -> None:
    """Study plans as tracks of lessons, with what is done of each."""
    from ..learn import tracks as data

    chosen = [data.find_track(name)] if name else list(data.tracks().values())
    folder, progress = workspace_or_none()
    rows = []
    for track in chosen:
        for one in map(data.lesson, track.lessons):
            ticks = data.lesson_ticks(one, folder, progress)
            rows.append({"track": track.id, "id": one.id, "part": one.part, "title": one.title,
                         "done": sum(tick.done for tick in ticks), "of": len(ticks)})  # fmt: skip
    if json:
        print_json(rows)
        return
    if name:
        typer.echo(f"{chosen[0].title}. {chosen[0].about}\n")
        cells = [[row["part"], row["id"], row["title"], f"{row['done']} of {row['of']}"] for row in rows]
        print_table(chosen[0].title, ["", "lesson", "about", "done"], cells, drop=("about",))
        typer.echo("`lmworks learn explain LESSON` shows one.")
        return
    cells = []
    for track in chosen:
        own = [row for row in rows if row["track"] == track.id]
        whole = sum(row["done"] == row["of"] for row in own)
        cells.append([track.id, track.title, f"{whole} of {len(own)}"])
    print_table("Tracks", ["track", "about", "lessons done"], cells)
    typer.echo("`lmworks learn tracks TRACK` lists its lessons.")


def workspace_or_none() -> tuple[Path, Progress]:
    """Outside of a workspace nothing is done yet."""
    try:
        folder = Workspace.find(Path.cwd()).folder
    except SpecError:
        return NOWHERE, Progress(NOWHERE)
    return folder, Progress.load(folder)


def print_lesson(one: Lesson, json: bool) -> None:
    """What `lmworks learn explain` says of a lesson of a track."""
    from ..learn.tracks import lesson_ticks, track_of

    if json:
        print_json(asdict(one))
        return
    track = track_of(one.id)
    typer.echo(f"{one.title}\n{track.title} · {one.part}\n")
    typer.echo("\n\n".join(one.idea))
    typer.echo(f"\nPicture, on the page of `lmworks learn serve`: {one.caption}")
    for formula in one.formulas:
        typer.echo(f"\n    {formula.formula}\n{formula.means}")
    if one.commands:
        typer.echo("\nSee it on this machine:")
    for command in one.commands:
        typer.echo(f"    {command.run}\n  {command.what}")
    if one.explain:
        typer.echo("\nBe able to explain (answers are on the page):")
    for asked in one.explain:
        typer.echo(f"  {asked.question}")
    typer.echo("\nTo do:")
    for tick in lesson_ticks(one, *workspace_or_none()):
        typer.echo(f"  {'✓' if tick.done else '·'} {tick.item}")
        for text in (tick.found, *(() if tick.done else (tick.link, tick.how))):
            if text:
                typer.echo(indent(text, " " * 6))
