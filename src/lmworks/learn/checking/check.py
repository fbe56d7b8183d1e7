"""Checks an exercise: the learner's part among references, in a process of its own."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ..answers import failure_of, write_references
from ..course_files import course_sources
from ..exercise import Exercise
from ..holes import Hole, replace_holes
from ..workspace import Workspace
from .recognise import recogniser
from .run_isolated import run_isolated
from .verdict import BROKEN, FAILED, PASSED, STOPPED, UNAVAILABLE, UNFINISHED, Verdict

SECONDS = 30.0  # a check takes less than ten on two cores


def check_exercise(workspace: Workspace, exercise: Exercise) -> Verdict:
    """Imports torch the first time; later checks of this process begin at once."""
    if exercise.requires and importlib.util.find_spec(exercise.requires) is None:
        return Verdict(exercise.id, UNAVAILABLE, f"this needs {exercise.needs}")
    if broken := syntax_error(workspace, exercise):
        return broken
    if not workspace.written(exercise):
        what = f"{exercise.file}: exercise {exercise.number} is not written yet"
        return Verdict(exercise.id, UNFINISHED, f"{what}; replace the line with `unfinished`")
    text, origin = workspace.with_reference_around(exercise)
    with tempfile.TemporaryDirectory(prefix="lmworks-learn-") as temporary:
        folder = Path(temporary, "workspace")
        copy_sources(workspace, folder)
        (folder / exercise.file).write_text(text)
        verdict = verdict_of(exercise, folder, origin, workspace.text(exercise.file).splitlines())
    return replace(verdict, note=own_lines_note(workspace, exercise.file))


def own_lines_note(workspace: Workspace, path: str) -> str:
    """What happens with what the learner has changed outside of the marks."""
    changed = workspace.lines_outside(path)
    if not changed:
        return ""
    lines = f"line {changed[0]}" if len(changed) == 1 else f"{len(changed)} lines from line {changed[0]} on"
    return (
        f"{path} is changed outside of the marks ({lines}): checks of this file run with that, those of other files "
        "with the course's own"
    )


def check_source(exercise: Exercise, changed: Callable[[Hole], str | None]) -> Verdict:
    """Of the course's own source with another text in some parts: stubs, wrong answers."""
    with tempfile.TemporaryDirectory(prefix="lmworks-learn-") as temporary:
        folder = Path(temporary, "workspace")
        write_references(folder)
        text, origin = replace_holes(course_sources()[exercise.file], exercise.file, changed)
        (folder / exercise.file).write_text(text)
        return verdict_of(exercise, folder, origin, text.splitlines())


def copy_sources(workspace: Workspace, folder: Path) -> None:
    """The learner's own modules beside the references of the course's files."""
    shutil.copytree(workspace.folder / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    write_references(folder)


def syntax_error(workspace: Workspace, exercise: Exercise) -> Verdict | None:
    text = workspace.text(exercise.file)
    try:
        ast.parse(text)
    except SyntaxError as error:
        line = (error.text or "").strip()
        return Verdict(
            exercise.id, BROKEN, f"{exercise.file}, line {error.lineno}: {error.msg}", traceback=[line] if line else []
        )
    return None


def verdict_of(exercise: Exercise, folder: Path, origin: list[int], lines: list[str]) -> Verdict:
    preload(exercise)
    check = importlib.import_module("lmworks.learn.checks").CHECKS[exercise.id]
    outcome = run_isolated(lambda: judge(exercise, check, origin, lines), folder, SECONDS)
    if outcome.result is None:
        why = outcome.why
        if exercise.if_stopped:
            why += f"{'' if why.endswith('?') else '.'} {exercise.if_stopped}"
        return Verdict(exercise.id, STOPPED, why, output=outcome.output, seconds=outcome.seconds)
    return Verdict(**{**outcome.result, "output": outcome.output, "seconds": outcome.seconds})


def preload(exercise: Exercise) -> None:
    """What its check imports, before the fork: later checks of this process have it."""
    importlib.import_module("torch").set_num_threads(1)
    for name in importlib.import_module("lmworks.learn.checks").PRELOAD.get(exercise.file, ()):
        importlib.import_module(name)


def judge(exercise: Exercise, check: Callable[[ModuleType], None], origin: list[int], lines: list[str]) -> Any:
    """Within the process of the check; its folder holds the workspace."""
    from .expect import Mismatch, shown

    recognise = recogniser(exercise, check)
    wrong = failure_of(check, Path.cwd(), exercise.file)
    if wrong is None:
        return Verdict(exercise.id, PASSED).as_json()
    misconception = recognise(wrong)
    if isinstance(wrong, Mismatch):
        return Verdict(
            exercise.id, FAILED, wrong.remark, wrong.case, shown(wrong.expected), shown(wrong.got),
            {name: shown(value) for name, value in wrong.inputs.items()}, misconception,
        ).as_json()  # fmt: skip
    where = own_lines(wrong, exercise, origin, lines)
    message = f"{type(wrong).__name__}: {wrong}"
    return Verdict(exercise.id, BROKEN, message, misconception=misconception, traceback=where).as_json()


def own_lines(error: Exception, exercise: Exercise, origin: list[int], lines: list[str]) -> list[str]:
    """The frames of the learner's file, by its own line numbers."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.endswith(exercise.file) and frame.lineno:
            number = origin[frame.lineno - 1]
            found.append(f"{exercise.file}, line {number}: {lines[number - 1].strip()}")
    return found
