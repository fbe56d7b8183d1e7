"""For teachers: a class repository, its autograders, grades of many learners."""

from __future__ import annotations

import csv
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lmworks import __version__
from lmworks.cli.main import app
from lmworks.learn import grade
from lmworks.learn.checking.verdict import PASSED, UNFINISHED, Verdict
from lmworks.learn.course_files import course_holes
from lmworks.learn.exercise import find_exercise
from lmworks.learn.workspace import Workspace
from lmworks.spec.errors import LMWorksError, SpecError

TWO = ("--exercise", "rmsnorm", "--exercise", "rotate_half")


def learn(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["learn", *words])
    if isinstance(result.exception, LMWorksError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def flat(text: str) -> str:
    """Without indentation."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def solve(folder: Path, exercise: str) -> None:
    Workspace(folder).apply_solution(find_exercise(exercise))


def environment() -> dict[str, str]:
    """With the `lmworks` of this environment first."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_a_class_repository_has_no_solutions(tmp_path: Path) -> None:
    learn("export", str(tmp_path / "class"), "--install", "lmworks @ git+https://example.org/lmworks")
    folder = tmp_path / "class"
    texts = [flat(path.read_text()) for path in folder.rglob("*") if path.is_file()]
    stubs = [flat(hole.stub) for hole in course_holes().values()]
    assert all(sum(stub in text for text in texts) == 1 for stub in stubs)
    assert not [hole.name for hole in course_holes().values() if any(flat(hole.body) in text for text in texts)]
    assert (folder / "requirements.txt").read_text() == "lmworks @ git+https://example.org/lmworks\n"
    workflow = yaml.safe_load((folder / ".github/workflows/classroom.yml").read_text())
    steps = workflow["jobs"]["run-autograding-tests"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands[0].endswith("-r requirements.txt")
    assert commands[1].startswith("lmworks learn grade . ") and "--require-all" in commands[1]
    for name in ("setup.sh", "run_autograder"):
        assert (folder / "autograder" / name).stat().st_mode & stat.S_IXUSR
        subprocess.run(["bash", "-n", folder / "autograder" / name], check=True)


def test_what_is_installed_brings_what_is_graded(tmp_path: Path) -> None:
    for name, extra in (("rmsnorm", ""), ("triton_add", "[learn]")):
        learn("export", str(tmp_path / name), "--exercise", name)
        assert (tmp_path / name / "requirements.txt").read_text() == f"lmworks{extra}=={__version__}\n"


def test_a_clone_of_it_is_a_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git keeps no empty folders, and what a learner does in .learn is not pushed."""
    learn("export", str(tmp_path / "class"), *TWO)
    for words in (("init", "-q"), ("add", "-A"), ("-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "t")):
        subprocess.run(["git", *words], cwd=tmp_path / "class", check=True)
    subprocess.run(["git", "clone", "-q", tmp_path / "class", tmp_path / "mine"], check=True)
    monkeypatch.chdir(tmp_path / "mine")
    learn("hint", "rmsnorm")
    assert "Next: 1. RMSNorm.forward" in learn()
    assert (tmp_path / "mine/.learn/progress.json").exists()
    done = subprocess.run(["git", "status", "--short"], cwd=tmp_path / "mine", capture_output=True, text=True)
    assert done.stdout == ""


def test_grades_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written passes here; `test_all_autograders_agree` has real checks."""
    monkeypatch.setattr(
        grade, "check_exercise", lambda work, one: Verdict(one.id, PASSED if work.written(one) else UNFINISHED)
    )
    for name in ("ann", "=ben", "eve"):
        learn("init", str(tmp_path / name))
    solve(tmp_path / "ann", "rmsnorm")
    solve(tmp_path / "ann", "rotate_half")
    solve(tmp_path / "=ben", "rotate_half")
    (tmp_path / "eve/src/models/gpt.py").unlink()
    (tmp_path / "eve/.learn/progress.json").write_text(
        json.dumps({"exercises": {"rmsnorm": {"passed": "2026-01-01T00:00:00+00:00"}}, "answers": {}})
    )
    folders = [str(tmp_path / name) for name in ("ann", "=ben", "eve")]
    said = learn("grade", *folders, *TWO, "--csv", str(tmp_path / "grades.csv"))
    assert said.splitlines() == [
        "ann: 2 of 2 pass, 20 of 20 points",
        "=ben: 1 of 2 pass, 10 of 20 points",
        "eve: 0 of 2 pass, 0 of 20 points",
    ]
    rows = list(csv.reader((tmp_path / "grades.csv").open()))
    assert rows == [
        ["learner", "points", "of", "rmsnorm", "rotate_half"],
        ["ann", "20", "20", "10", "10"],
        ["'=ben", "10", "20", "0", "10"],
        ["eve", "0", "20", "0", "0"],
    ]
    said = learn("grade", folders[2], *TWO, "--require-all", code=1)
    assert said.count("gpt.py is gone; `lmworks learn reset src/models/gpt.py` writes it anew") == 2


@pytest.mark.parametrize("link", ["src/models/gpt.py", "src/models/more", "src"])
def test_links_are_not_followed(tmp_path: Path, link: str) -> None:
    """Neither to an endless file nor into another folder, though it has the solution."""
    learn("init", str(tmp_path / "ann"))
    learn("init", str(tmp_path / "eve"))
    solve(tmp_path / "ann", "rotate_half")
    there = tmp_path / "eve" / link
    shutil.rmtree(there) if there.is_dir() else there.unlink(missing_ok=True)
    there.symlink_to("/dev/zero" if link.endswith("gpt.py") else tmp_path / "ann" / link.removesuffix("/more"))
    said = learn("grade", str(tmp_path / "eve"), "--exercise", "rotate_half")
    assert f"✗ 2. rotate_half: {link} is a link; files are graded" in said and "0 of 10 points" in said


def test_what_cannot_be_graded_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nobody is no folder; name the learners' workspaces"):
        learn("grade", str(tmp_path / "nobody"))
    with pytest.raises(SpecError, match="--gradescope is of one learner, and 2 folders are given; --csv takes many"):
        learn("grade", str(tmp_path), str(tmp_path), "--gradescope", str(tmp_path / "results.json"))
    with pytest.raises(SpecError, match=r"no exercise 'rmsnrom'; did you mean 'rmsnorm'"):
        learn("export", str(tmp_path / "class"), "--exercise", "rmsnrom")
    with pytest.raises(SpecError, match="--install: one line"):
        learn("export", str(tmp_path / "class"), "--install", "a\nb")
    assert not (tmp_path / "class").exists()


@pytest.mark.slow
def test_all_autograders_agree(tmp_path: Path) -> None:
    """As Gradescope, GitHub Classroom and the workflow run them: one exercise of two is solved."""
    learn("export", str(tmp_path / "class"), *TWO)
    autograder, submission = tmp_path / "autograder", tmp_path / "autograder/submission"
    (autograder / "results").mkdir(parents=True)
    shutil.copy(tmp_path / "class/autograder/run_autograder", autograder)
    shutil.copytree(tmp_path / "class", submission)
    solve(submission, "rmsnorm")
    subprocess.run([autograder / "run_autograder"], cwd="/", env=environment(), check=True)
    results = json.loads((autograder / "results/results.json").read_text())
    assert results["score"] == 10 and sum(one["max_score"] for one in results["tests"]) == 20
    assert [(one["name"], one["score"], one["status"]) for one in results["tests"]] == [
        ("RMSNorm.forward", 10, "passed"),
        ("rotate_half", 0, "failed"),
    ]
    assert "exercise 2 is not written yet" in results["tests"][1]["output"]
    tests = json.loads((submission / ".github/classroom/autograding.json").read_text())["tests"]
    codes = [
        subprocess.run(one["run"], shell=True, cwd=submission, env=environment(), stdout=subprocess.DEVNULL).returncode
        for one in tests
    ]
    assert codes == [0, 1]
    learn("grade", str(submission), "--exercise", "rmsnorm", "--require-all")
    workflow = yaml.safe_load((submission / ".github/workflows/classroom.yml").read_text())
    (step,) = (one for one in workflow["jobs"]["run-autograding-tests"]["steps"] if one.get("name") == "Grade")
    assert subprocess.run(step["run"], shell=True, cwd=submission, env=environment()).returncode == 1
    pushed = json.loads((submission / "results.json").read_text())
    assert [one["score"] for one in pushed["tests"]] == [one["score"] for one in results["tests"]]
    assert (submission / "results.csv").read_text() == "learner,points,of,rmsnorm,rotate_half\nsubmission,10,20,10,0\n"
    assert sum(one["points"] for one, code in zip(tests, codes, strict=True) if code == 0) == results["score"]
