"""A new exercise: files to start from, and what is still missing of one."""

from __future__ import annotations

import importlib
import keyword
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

from ..spec.errors import SpecError
from ..spec.files import write_whole
from .course_files import course_holes, course_sources
from .exercise import Exercise, exercises, number_of

MUTANTS = 5  # at least
HERE = Path(__file__).parent

EXERCISE = """number = {number}
title = "{id}"
file = "{file}"
phase = "TODO: the part of the course, as its neighbours have it"
concept = "TODO: what it is about, in a few words"
difficulty = "TODO: easy, 1 line"
insight = "TODO: why one should know it"
task = "TODO: what the function returns, with the formula"
hints = [
  "TODO: a question that leads there",
  "TODO: the part that is usually missed",
  "TODO: the formula, in words of code",
]

# A wrong answer that people give, as an edit of the solution. {mutants} or more; each has to fail the check.
[[mutants]]
find = "2 * x"
replace = "x * x"
misconception = "TODO: what its author believes"

[[quiz]]
question = "TODO: a question that the insight answers"
choices = ["TODO: one", "TODO: another"]
answer = 0
why = "TODO: the reason"
"""

PROGRAM = '''"""TODO: what this program shows."""

from __future__ import annotations

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does
'''

FUNCTION = '''

def {id}(x: float) -> float:
    """TODO: what it returns."""
    # exercise {id}(x)
    return 2 * x
    # end {id}
'''

CHECK = '''"""Exercise {id}, `{file}`."""

from __future__ import annotations

from types import ModuleType

from ..expect import expect_equal


def {id}(module: ModuleType) -> None:
    """TODO: the smallest case first; compare with PyTorch's own functions, or with what is worked out by hand."""
    expect_equal("x = 3", module.{id}(3), 6)


CHECKS = {{"{id}": {id}}}
'''


def scaffold(name: str, file: str, learn: Path = HERE) -> list[Path]:
    """Writes them into the folder of this package, in a checkout; the paths."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise SpecError(f"{name!r} is no name of an exercise: lower-case letters, digits and underscores")
    if not re.fullmatch(r"src/[a-z_]+/[a-z_0-9]+\.py", file):
        raise SpecError(f"{file} is no file of a workspace: src/FOLDER/NAME.py, as src/models/gpt.py is one")
    toml, check = learn / "exercises" / f"{name}.toml", learn / "checks" / f"{name}.py"
    program, register = learn / "course" / file, learn / "checks" / "__init__.py"
    for path in (toml, check):
        if path.exists():
            raise SpecError(f"{path} is there already")
    known = program.read_text() if program.exists() else PROGRAM
    registered = with_check(register.read_text(), name)
    number = max(map(number_of, toml.parent.glob("*.toml"))) + 1
    texts = {
        toml: EXERCISE.format(number=number, id=name, file=file, mutants=MUTANTS),
        program: known + FUNCTION.format(id=name),
        check: CHECK.format(id=name, file=file),
        register: registered,
    }
    program.parent.mkdir(exist_ok=True)
    for path, text in texts.items():
        write_whole(path, text)
    return list(texts)


def with_check(text: str, name: str) -> str:
    """checks/__init__.py with one more module."""
    imports = re.search(r"^from \. import (?:\(([^)]*)\)|(.*))$", text, re.MULTILINE)
    table = re.search(r"^(CHECKS: [^=]*= )\{([^}]*)\}", text, re.MULTILINE)
    if not imports or not table:
        raise SpecError("checks/__init__.py has no longer the form that `learn new` knows; add the check by hand")
    modules = sorted({*re.findall(r"\w+", imports[1] or imports[2]), name})
    entries = [*re.findall(r"\*\*\w+\.CHECKS", table[2]), f"**{name}.CHECKS"]
    line = f"from . import {', '.join(modules)}"
    if len(line) > 120:
        line = "from . import (\n" + "".join(f"    {module},\n" for module in modules) + ")"
    lines = "".join(f"    {entry},\n" for entry in entries)
    return text.replace(imports[0], line).replace(table[0], f"{table[1]}{{\n{lines}}}")


def missing(exercise: Exercise) -> list[str]:
    """What keeps an exercise from being one of the course; wrong answers that are not caught are found by tests."""
    holes = [hole for hole in course_holes().values() if hole.exercise == exercise.id]
    found = [f"{name}: TODO" for name, text in texts_of(exercise) if "TODO" in text]
    found += [f"depends_on: there is no exercise {one}" for one in exercise.depends_on if one not in exercises()]
    if len(set(exercise.hints)) != 3:
        found.append(f"hints: three different ones, not {len(set(exercise.hints))}")
    if len(exercise.mutants) < MUTANTS:
        found.append(f"mutants: {MUTANTS} wrong answers or more, not {len(exercise.mutants)}")
    found += [f"quiz: there is no choice {one.answer} of {one.question!r}"
              for one in exercise.quiz if not 0 <= one.answer < len(one.choices)]  # fmt: skip
    if not exercise.quiz:
        found.append("quiz: a question or more")
    if exercise.file not in course_sources():
        found.append(f"file: the course has no {exercise.file}")
    elif not holes or any(f"# exercise {hole.name}(" not in course_sources()[exercise.file] for hole in holes):
        found.append(f"{exercise.file}: no marks `# exercise {exercise.id}(…)` and `# end {exercise.id}`")
    solutions = {hole.name: hole.body for hole in holes}
    for number, one in enumerate(exercise.mutants, 1):
        times = solutions.get(f"{exercise.id}.{one.part}" if one.part else exercise.id, "").count(one.find)
        if times != 1:
            found.append(f"mutant {number}: {one.find!r} stands {times} times in the solution, not once")
    edits = Counter((one.part, one.find, one.replace) for one in exercise.mutants)
    found += [f"mutants: {replace!r} for {find!r} stands there twice"
              for (_, find, replace), times in edits.items() if times > 1]  # fmt: skip
    if exercise.id not in importlib.import_module("lmworks.learn.checks").CHECKS:
        found.append(f"checks/__init__.py: CHECKS has no {exercise.id}")
    return found


def texts_of(exercise: Exercise) -> list[tuple[str, str]]:
    found = [(field.name, str(getattr(exercise, field.name))) for field in fields(exercise)]
    found += [(path, text) for path, text in course_sources().items() if path == exercise.file]
    check = HERE / "checks" / f"{exercise.id}.py"
    return [*found, (f"checks/{exercise.id}.py", check.read_text())] if check.exists() else found
