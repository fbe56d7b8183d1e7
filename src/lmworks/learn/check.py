"""Checks an exercise: the learner's part among references, in a process of its own."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .course_files import course_sources
from .exercise import Exercise, Mutant
from .holes import Hole, replace_holes
from .run_isolated import run_isolated
from .verdict import BROKEN, FAILED, PASSED, STOPPED, UNFINISHED, Verdict
from .workspace import Workspace, solution_of

SECONDS = 30.0  # a check takes less than ten on two cores
RECOGNITION_SECONDS = 5.0  # for the misconception behind a wrong answer


def check_exercise(workspace: Workspace, exercise: Exercise) -> Verdict:
    """Imports torch the first time; later checks of this process begin at once."""
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
        return verdict_of(exercise, folder, origin, workspace.text(exercise.file).splitlines())


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


def write_references(folder: Path) -> None:
    for path, text in course_sources().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def mutate(exercise: Exercise, mutant: Mutant) -> Callable[[Hole], str | None]:
    """The solution with this one mistake."""
    name = f"{exercise.id}.{mutant.part}" if mutant.part else exercise.id

    def body(hole: Hole) -> str | None:
        if hole.name != name:
            return None
        solution = solution_of(hole)
        if solution.count(mutant.find) != 1:
            raise ValueError(f"{name}: {mutant.find!r} stands {solution.count(mutant.find)} times in the solution")
        return solution.replace(mutant.find, mutant.replace)

    return body


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
        why = f"{outcome.why}. {exercise.if_stopped}" if exercise.if_stopped else outcome.why
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

    wrong = failure_of(check, Path.cwd(), exercise.file)
    if wrong is None:
        return Verdict(exercise.id, PASSED).as_json()
    misconception = recognise(exercise, check, wrong)
    if isinstance(wrong, Mismatch):
        return Verdict(
            exercise.id, FAILED, wrong.remark, wrong.case, shown(wrong.expected), shown(wrong.got),
            {name: shown(value) for name, value in wrong.inputs.items()}, misconception,
        ).as_json()  # fmt: skip
    where = own_lines(wrong, exercise, origin, lines)
    message = f"{type(wrong).__name__}: {wrong}"
    return Verdict(exercise.id, BROKEN, message, misconception=misconception, traceback=where).as_json()


def failure_of(check: Callable[[ModuleType], None], folder: Path, file: str) -> Exception | None:
    try:
        check(load(folder, file))
    except Exception as error:
        return error
    return None


def load(folder: Path, file: str) -> ModuleType:
    """`src/models/gpt.py` as the programs of the workspace import it; what another folder gave is forgotten."""
    source = str(folder / "src")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("models", "training")]:
        del sys.modules[name]
    sys.path[:] = [source, *(path for path in sys.path if not path.endswith("/src") or "lmworks-learn-" not in path)]
    importlib.invalidate_caches()
    return importlib.import_module(file.removeprefix("src/").removesuffix(".py").replace("/", "."))


def recognise(exercise: Exercise, check: Callable[[ModuleType], None], wrong: Exception) -> str:
    """The known wrong answer that fails at the same case with the same value, or with the same error."""
    began = time.monotonic()
    for number, mutant in enumerate(exercise.mutants):
        if time.monotonic() - began > RECOGNITION_SECONDS:
            break
        folder = Path.cwd() / f"lmworks-learn-{number}"
        write_references(folder)
        text, _ = replace_holes(course_sources()[exercise.file], exercise.file, mutate(exercise, mutant))
        (folder / exercise.file).write_text(text)
        known = failure_of(check, folder, exercise.file)
        if known is not None and same_failure(known, wrong):
            return mutant.misconception
    return ""


def same_failure(one: Exception, other: Exception) -> bool:
    from .expect import Mismatch

    if isinstance(one, Mismatch) and isinstance(other, Mismatch):
        return one.is_like(other)
    return type(one) is type(other) and without_paths(one) == without_paths(other)


def without_paths(error: Exception) -> str:
    return re.sub(r"\S*/", "", str(error))


def own_lines(error: Exception, exercise: Exercise, origin: list[int], lines: list[str]) -> list[str]:
    """The frames of the learner's file, by its own line numbers."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.endswith(exercise.file) and frame.lineno:
            number = origin[frame.lineno - 1]
            found.append(f"{exercise.file}, line {number}: {lines[number - 1].strip()}")
    return found
