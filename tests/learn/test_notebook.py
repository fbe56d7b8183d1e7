"""Notebooks of the course: their format, and that their cells write, check and keep what a learner does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.learn.course_files import course_holes
from lmworks.learn.exercise import exercises
from lmworks.learn.lesson_pages.notebook import file_name, put
from lmworks.learn.workspace import Workspace
from lmworks.spec.errors import SpecError


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    result = CliRunner().invoke(app, ["learn", "export", str(tmp_path / "course"), "--notebooks"])
    assert result.exit_code == 0 and f"{len(exercises())} notebooks" in result.output
    return Workspace(tmp_path / "course")


def opened(workspace: Workspace, exercise: str) -> Any:
    return nbformat.read(workspace.folder / "notebooks" / file_name(exercises()[exercise]), as_version=4)


def code(notebook: Any) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_a_notebook_an_exercise(workspace: Workspace) -> None:
    for exercise in exercises().values():
        notebook = opened(workspace, exercise.id)
        nbformat.validate(notebook)
        parts = [source for source in code(notebook) if source.startswith("%%exercise ")]
        names = [hole.name for hole in course_holes().values() if hole.exercise == exercise.id]
        assert [source.splitlines()[0].removeprefix("%%exercise ") for source in parts] == names
        assert all(f'unfinished("{name}"' in source for name, source in zip(names, parts, strict=True))
        assert not [name for name in names if any(course_holes()[name].body.strip() in source for source in parts)]
    text = opened(workspace, "rotary").cells[0].source
    assert "(02-rotate_half.ipynb)" in text and ".md)" not in text


def test_those_that_are_there_stay(workspace: Workspace) -> None:
    folder = workspace.folder / "notebooks"
    mine, gone = folder / file_name(exercises()["rmsnorm"]), folder / file_name(exercises()["rotary"])
    mine.write_text("mine")
    gone.unlink()
    result = CliRunner().invoke(app, ["learn", "export", str(workspace.folder), "--notebooks"])
    assert "1 notebooks written" in result.output and mine.read_text() == "mine" and gone.exists()


def test_a_cell_is_put_between_the_marks(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.folder / "notebooks")
    before = workspace.text("src/models/gpt.py")
    shell = InteractiveShell()
    load, part, _ = code(opened(workspace, "rotate_half"))
    shell.run_cell(load).raise_error()
    shell.run_cell(part).raise_error()
    (hole,) = workspace.holes(exercises()["rotate_half"])
    assert not hole.written and not (workspace.folder / ".learn/kept").exists()
    shell.run_cell("%%exercise rotate_half\nif x is None:\n    return 0\n\nreturn -x").raise_error()
    after = workspace.text("src/models/gpt.py")
    assert "    if x is None:\n        return 0\n\n    return -x\n    # end rotate_half" in after
    assert not (workspace.folder / ".learn/kept").exists()  # a stub is no work
    shell.run_cell("%%exercise rotate_half\nreturn x").raise_error()
    (copy,) = (workspace.folder / ".learn/kept").glob("*/src/models/gpt.py")
    assert copy.read_text() == after
    workspace.reset("rotate_half")
    assert workspace.text("src/models/gpt.py") == before


def test_mistakes_are_one_line(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="there is no part 'rotatehalf'; did you mean 'rotate_half'"):
        put(workspace, "rotatehalf", "return x")
    words = ["learn", "export", str(workspace.folder), "--pages", "--notebooks"]
    assert "--pages and --notebooks: one of them" in str(CliRunner().invoke(app, words).exception)


@pytest.mark.slow
def test_a_notebook_is_worked_through(workspace: Workspace) -> None:
    """In a kernel: first as it is, then with the solution."""
    notebook = opened(workspace, "rotate_half")
    client = NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(workspace.folder / "notebooks")}}
    )
    parts = [cell for cell in notebook.cells if cell.cell_type == "code"]
    client.execute(env={**os.environ})
    assert "exercise 2 is not written yet" in parts[2].outputs[0].text
    parts[1].source = f"%%exercise rotate_half\n{course_holes()['rotate_half'].body}"
    client.execute()
    assert (
        parts[1].outputs[0].text.startswith("src/models/gpt.py:")
        and "✓ 2. rotate_half passes" in parts[2].outputs[0].text
    )
    assert '"tries": 1' in (workspace.folder / ".learn/progress.json").read_text()
