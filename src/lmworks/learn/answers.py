"""Answers as code that runs: the course's own, known wrong ones, and what a check says of either."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from .course_files import course_sources
from .exercise import Exercise, Mutant
from .holes import Hole
from .workspace import solution_of


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


def failure_of(check: Callable[[ModuleType], None], folder: Path, file: str) -> Exception | None:
    try:
        check(load(folder, file))
    except Exception as error:
        return error
    return None


def prepare(file: str) -> None:
    """What has to be there before a program is imported; for all that a process forks, once."""
    if file.startswith("src/kernels/"):
        importlib.import_module("lmworks.learn.checking.interpreter").interpret_kernels()


def load(folder: Path, file: str) -> ModuleType:
    """`src/models/gpt.py` as the programs of the workspace import it; what another folder gave is forgotten."""
    source = str(folder / "src")
    packages = {path.split("/")[1] for path in course_sources()}
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
    for package in packages:  # without an __init__.py any module of that name elsewhere would come before it
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(folder / "src" / package)]
    sys.path[:] = [source, *(path for path in sys.path if not path.endswith("/src") or "lmworks-learn-" not in path)]
    importlib.invalidate_caches()
    prepare(file)
    return importlib.import_module(file.removeprefix("src/").removesuffix(".py").replace("/", "."))
