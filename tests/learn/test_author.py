"""Exercises have all that belongs to one; a new one starts as files that say what they lack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lmworks.learn import author
from lmworks.learn.author import missing, scaffold, with_check
from lmworks.learn.exercise import Mutant, exercises
from lmworks.spec.errors import SpecError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("exercise", list(exercises().values()), ids=lambda one: one.id)
def test_nothing_is_missing(exercise: author.Exercise) -> None:
    lacking = missing(exercise)
    assert not lacking, "\n".join(lacking)


def test_what_is_missing_is_said() -> None:
    good = exercises()["rotate_half"]
    first = good.mutants[0]
    assert missing(replace(good, task="TODO: a task", hints=("a", "a", "b"), quiz=())) == [
        "task: TODO", "hints: three different ones, not 2", "quiz: a question or more",
    ]  # fmt: skip
    wrong = replace(good.quiz[0], answer=7)
    assert missing(replace(good, quiz=(wrong,))) == [f"quiz: there is no choice 7 of {wrong.question!r}"]
    found = missing(replace(good, mutants=(first, first, Mutant("nowhere", "x", "why"))))
    assert found[0] == "mutants: 5 wrong answers or more, not 3"
    assert found[1] == "mutant 3: 'nowhere' stands 0 times in the solution, not once"
    assert found[2] == f"mutants: {first.replace!r} for {first.find!r} stands there twice"
    assert missing(replace(good, depends_on=("nothing",), file="src/models/none.py")) == [
        "depends_on: there is no exercise nothing", "file: the course has no src/models/none.py",
    ]  # fmt: skip
    found = missing(replace(good, id="unheard_of"))
    assert "src/models/gpt.py: no marks `# exercise unheard_of(…)` and `# end unheard_of`" in found
    assert found[-1] == "checks/__init__.py: CHECKS has no unheard_of"


def test_a_check_is_registered_in_either_form() -> None:
    short = "from . import ddp, gpt\n\nCHECKS: dict[str, int] = {**gpt.CHECKS, **ddp.CHECKS}\nPRELOAD = {}\n"
    long = with_check(short, "fresh")
    assert long == (
        "from . import ddp, fresh, gpt\n\n"
        "CHECKS: dict[str, int] = {\n    **gpt.CHECKS,\n    **ddp.CHECKS,\n    **fresh.CHECKS,\n}\nPRELOAD = {}\n"
    )
    name = "a_name_of_many_letters" * 5
    assert f"from . import (\n    {name},\n    ddp,\n    fresh,\n    gpt,\n)\n" in with_check(long, name)
    with pytest.raises(SpecError, match="add the check by hand"):
        with_check("CHECKS = {}", "fresh")


@pytest.mark.parametrize(
    ("name", "file", "says"),
    [
        ("rmsnorm", "src/models/gpt.py", r"rmsnorm\.toml is there already"),
        ("Upper", "src/models/gpt.py", "'Upper' is no name of an exercise"),
        ("for", "src/models/gpt.py", "'for' is no name of an exercise"),
        ("fresh", "../models/gpt.py", r"\.\./models/gpt\.py is no file of a workspace"),
    ],
)
def test_what_cannot_be_begun(name: str, file: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        scaffold(name, file)


@pytest.mark.slow
def test_an_exercise_from_its_first_file_to_the_courses_own_tests(tmp_path: Path) -> None:
    """In a copy of the source: begun, refused by the tests, written, accepted."""
    for name in ("src/lmworks", "tests/learn", "tests/conftest.py", "pyproject.toml", "docs/course"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    begin = f"import sys; sys.path.insert(0, {str(tmp_path / 'src')!r}); sys.argv = sys.argv[1:]; "

    def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", begin + code, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return python("import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)", *words)

    def tests() -> subprocess.CompletedProcess[str]:
        chosen = ["tests/learn/test_author.py", "tests/learn/test_checks.py", "tests/learn/test_lessons.py"]
        return run("pytest", "-vv", "-p", "no:cacheprovider", *chosen, "-k", "doubled or are_those_of")

    assert python("import lmworks; print(lmworks.__file__)").stdout.startswith(str(tmp_path))
    done = run("lmworks", "learn", "new", "doubled", "src/own/doubled.py")
    assert done.returncode == 0 and done.stdout.count("doubled") >= 4, done.stderr
    done = tests()
    assert "task: TODO" in done.stdout and "mutants: 5 wrong answers or more, not 1" in done.stdout
    assert "doubled.md, " in done.stdout and "`lmworks learn export --pages docs/course`" in done.stdout
    package = tmp_path / "src/lmworks/learn"
    for path in (
        package / "exercises/doubled.toml",
        package / "course/src/own/doubled.py",
        package / "checks/doubled.py",
    ):
        path.write_text(path.read_text().replace("TODO: ", "About "))
    toml = package / "exercises/doubled.toml"
    for wrong in ("3 * x", "x + 2", "x", "-2 * x"):
        text = f'[[mutants]]\nfind = "2 * x"\nreplace = "{wrong}"\nmisconception = "It is {wrong}."\n\n'
        toml.write_text(toml.read_text().replace("[[quiz]]", f"{text}[[quiz]]"))
    assert run("lmworks", "learn", "new", "doubled").stdout.startswith("doubled is complete")
    assert run("lmworks", "learn", "export", "--pages", "docs/course").returncode == 0
    done = tests()
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-2000:]
    toml.write_text(toml.read_text().replace('"x + 2"', '"x + x"'))  # which is no wrong answer
    assert tests().returncode == 1
