"""`lmworks learn export`, `grade` and `new`: for who teaches the course, or adds to it."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import __version__
from ..learn.exercise import exercises, find_exercise
from ..spec.errors import SpecError
from .output import Json, print_json, write_file

if TYPE_CHECKING:
    from ..learn.exercise import Exercise
    from ..learn.grade import Grade

Graded = Annotated[list[str] | None, typer.Option("--exercise", help="Graded: this one; repeat the option. Else all.")]


def chosen_exercises(names: list[str] | None) -> list[Exercise]:
    return list(dict.fromkeys(map(find_exercise, names))) if names else list(exercises().values())


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new folder; of pages or notebooks, also an old one.")
    ],
    exercise: Graded = None,
    install: Annotated[
        str, typer.Option("--install", help="What pip installs: a wheel, a repository. [default: this version]")
    ] = "",
    pages: Annotated[bool, typer.Option("--pages", help="Instead: all lessons as Markdown.")] = False,
    notebooks: Annotated[
        bool, typer.Option("--notebooks", help="Instead: a notebook an exercise, into a workspace.")
    ] = False,
) -> None:
    """Write a class repository: a workspace, a workflow, autograders."""
    from ..learn.export import export_class

    if pages and notebooks:
        raise SpecError("--pages and --notebooks: one of them")
    if notebooks:
        from ..learn.lesson_pages.notebook import write_notebooks

        written, count = write_notebooks(folder)
        typer.echo(f"{written}: {count} notebooks written; others stay as they are")
        return
    if pages:
        from ..learn.lesson_pages.pages import write_pages

        write_pages(folder)
        typer.echo(f"{folder}/index.md: all lessons")
        return
    graded = chosen_exercises(exercise)
    extra = "[learn]" if any(one.requires for one in graded) else ""
    export_class(folder, graded, install or f"lmworks{extra}=={__version__}")
    typer.echo(f"{folder}: a workspace, .github/workflows/classroom.yml, autograder/")
    typer.echo(f"For Gradescope: cd {folder}/autograder && zip ../autograder.zip *")


def grade(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Learners' workspaces.")],
    exercise: Graded = None,
    gradescope: Annotated[
        Path | None, typer.Option("--gradescope", help="Write Gradescope's results.json, of one learner.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write a row a learner.")] = None,
    require_all: Annotated[
        bool, typer.Option("--require-all", help="Exit with 1 unless all that is graded passes.")
    ] = False,
    json: Json = False,
) -> None:
    """Check the exercises of many workspaces, and give points."""
    from ..learn.grade import as_csv, as_gradescope, grades

    if gradescope and len(folders) > 1:
        raise SpecError(f"--gradescope is of one learner, and {len(folders)} folders are given; --csv takes many")
    graded = []
    for one in grades(folders, chosen_exercises(exercise)):
        graded.append(one)
        if not json:
            print_grade(one, in_full=len(folders) == 1)
    if gradescope:
        write_file(gradescope, json_text.dumps(as_gradescope(graded[0]), indent=2) + "\n", "--gradescope")
    if csv:
        write_file(csv, as_csv(graded), "--csv")
    if json:
        print_json([one.as_json() for one in graded])
    if require_all and any(one.total < one.most for one in graded):
        raise typer.Exit(1)


def print_grade(one: Grade, in_full: bool) -> None:
    if in_full:
        for exercise, verdict in one.verdicts.items():
            typer.echo("\n".join(verdict.lines(exercise.about)))
    passed = sum(verdict.passed for verdict in one.verdicts.values())
    typer.echo(f"{one.learner}: {passed} of {len(one.verdicts)} pass, {one.total} of {one.most} points")


def new(
    name: Annotated[str, typer.Argument(metavar="ID", help="Of the exercise: a name in lower case.")],
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="Of a workspace, new or not: src/FOLDER/NAME.py.")] = "",
) -> None:
    """Start an exercise in LMWorks' source, or say what it lacks."""
    from ..learn.author import HERE, missing, scaffold

    if not file:
        lacking = missing(find_exercise(name))
        typer.echo("\n".join(lacking) or f"{name} is complete; `pytest tests/learn -k {name}` checks it")
        raise typer.Exit(1 if lacking else 0)
    checkout = HERE.parents[2]
    if not (checkout / "pyproject.toml").exists():
        raise SpecError(f"{HERE} is no checkout: clone LMWorks, and `pip install -e .` in it")
    for path in scaffold(name, file):
        typer.echo(path.relative_to(checkout))
    typer.echo(f"Replace each TODO, then `lmworks learn new {name}` says what is missing.")
