"""Notebooks of a workspace: one an exercise, with the lesson, cells for its parts, and its check.

The cells are of this module as an IPython extension: `%%exercise NAME` puts its text between the marks of the file,
`%learn WORDS` runs `lmworks learn WORDS`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

from ...spec.errors import LMWorksError, SpecError, near_names, suggestion
from ...spec.files import write_whole
from ..course_files import course_holes
from ..exercise import Exercise, exercises
from ..holes import Hole, replace_holes
from ..workspace import MARKER, Workspace, stub_of
from .markdown import folded, markdown, quiz_blocks, wrapped
from .pages import around, holes_of, lesson

FOLDER = "notebooks"
LESSON_LINK = re.compile(r"\((\w+)\.md\)")


def write_notebooks(folder: Path) -> tuple[Path, int]:
    """Into a workspace, which is made where there is none; how many were written. Those that are there stay."""
    workspace = Workspace(folder) if (folder / MARKER).is_dir() else Workspace.create(folder)
    notebooks = workspace.folder / FOLDER
    notebooks.mkdir(exist_ok=True)
    ahead = [one for one in exercises().values() if not (notebooks / file_name(one)).exists()]
    for one in ahead:
        write_whole(notebooks / file_name(one), json.dumps(notebook(one), indent=1, ensure_ascii=False) + "\n")
    return notebooks, len(ahead)


def file_name(exercise: Exercise) -> str:
    return f"{exercise.number:02}-{exercise.id}.ipynb"


def notebook(exercise: Exercise) -> dict[str, Any]:
    hints = [block for number, one in enumerate(exercise.hints, 1)
             for block in folded(f"Hint {number}", [wrapped(markdown(one))])]  # fmt: skip
    cells = [
        ("markdown", text_of([f"# {markdown(exercise.about)}", *lesson(exercise)])),
        ("code", f"%load_ext {__name__}"),
        *(("code", part_cell(hole, exercise.file)) for hole in holes_of(exercise)),
        ("code", f"%learn check {exercise.id}"),
        ("markdown", text_of(["## Hints", *hints])),
        ("markdown", text_of(["## Quiz", *quiz_blocks(exercise.quiz)])),
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [cell(number, kind, text) for number, (kind, text) in enumerate(cells)],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def cell(number: int, kind: str, text: str) -> dict[str, Any]:
    found = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
    return {**found, "execution_count": None, "outputs": []} if kind == "code" else found


def text_of(blocks: list[str]) -> str:
    return LESSON_LINK.sub(lambda link: f"({file_name(exercises()[link[1]])})", "\n\n".join(blocks))


def part_cell(hole: Hole, path: str) -> str:
    """The part's stub below the function that it belongs to, or that calls it, as a comment."""
    before, after = around(hole, path)
    function = dedent("\n".join([*before[:-1], *after[1:]])).strip()
    comment = "\n".join(f"# {line}".rstrip() for line in function.splitlines())
    return f"%%exercise {hole.name}\n{comment}\n\n{stub_of(hole).rstrip()}"


# --- the extension ---------------------------------------------------------------------------------------


def load_ipython_extension(ipython: Any) -> None:
    ipython.register_magic_function(put_part, "cell", "exercise")
    ipython.register_magic_function(run_learn, "line", "learn")


def put_part(name: str, text: str) -> None:
    """The cell's text, between the marks of the file; what stood there is kept if it was written by hand."""
    try:
        print(f"{put(Workspace.find(Path.cwd()), name.strip(), text)} has it")
    except (LMWorksError, OSError) as error:
        print(f"error: {error}")


def put(workspace: Workspace, name: str, text: str) -> str:
    """The place: file and line."""
    if name not in course_holes():
        raise SpecError(f"there is no part {name!r}{suggestion(near_names(name, list(course_holes())))}")
    exercise = exercises()[course_holes()[name].exercise]
    hole = next(hole for hole in workspace.holes(exercise) if hole.name == name)
    body = text.strip("\n") + "\n"
    if hole.written and hole.body != body:
        workspace.keep_copy(exercise.file)
    changed = replace_holes(
        workspace.text(exercise.file), exercise.file, lambda one: body if one.name == name else None
    )
    write_whole(workspace.folder / exercise.file, changed[0])
    return f"{exercise.file}:{hole.start + 1}"


def run_learn(words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmworks", "learn", *words.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    print(done.stdout, end="")
