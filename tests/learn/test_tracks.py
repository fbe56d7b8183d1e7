"""Tracks: lessons are whole, pictures fit, items tick by what is there, commands are ours and exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from html import escape
from pathlib import Path
from textwrap import indent

import pytest
import typer
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.learn.exercise import exercises
from lmworks.learn.goals import readings
from lmworks.learn.lesson_pages.tracks import track_lesson_page
from lmworks.learn.pictures import PICTURES, picture_svg
from lmworks.learn.progress import Progress, record_answers
from lmworks.learn.tracks import FOLDER, lesson, lesson_names, lesson_ticks, tracks
from lmworks.learn.web.tracks import lesson_body
from lmworks.learn.workspace import Workspace
from lmworks.spec.errors import SpecError

LESSONS = [lesson(name) for name in lesson_names()]
PARTS = re.compile(r"&&|;|\||>|\n|\bdo\b|^! ", re.MULTILINE)  # between the commands of a script


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = Workspace.create(tmp_path / "course")
    monkeypatch.chdir(made.folder)
    return made


def test_every_lesson_stands_in_one_track() -> None:
    assert sorted(lesson_names()) == sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "tracks")
    assert [len(track.lessons) for track in tracks().values()] == [7, 5, 13, 18]
    assert not set(lesson_names()) & ({*exercises()} | {*readings()})  # `quiz ID` finds one thing


@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.id)
def test_a_lesson_is_whole(one: object) -> None:
    assert len(one.idea) >= 2 and one.commands and one.explain and len(one.quiz) >= 2
    assert {*one.readings} <= {*readings()} and {*one.exercises} <= {*exercises()} and one.readings
    assert all(0 <= asked.answer < len(asked.choices) for asked in one.quiz)
    assert one.picture in PICTURES
    assert "TODO" not in str(one)


def test_pictures_are_used_once_and_their_text_fits() -> None:
    assert sorted(one.picture for one in LESSONS) == sorted(PICTURES)
    for name, draw in PICTURES.items():
        assert draw().outside == [], name
    ET.fromstring(picture_svg("rank_grid", "<&"))


def test_readings_have_an_address_and_questions_with_one_answer() -> None:
    for one in readings().values():
        assert one.link.startswith("https://") and len(one.quiz) >= 2, one.id
        for asked in one.quiz:
            assert 0 <= asked.answer < len(asked.choices) and len(set(asked.choices)) == len(asked.choices), one.id


def options_of(words: list[str]) -> tuple[set[str], list[str]]:
    """The options of the command that these words name, and the words that are not its name."""
    command = typer.main.get_command(app)
    while words and hasattr(command, "get_command") and command.get_command(None, words[0]):
        command, words = command.get_command(None, words[0]), words[1:]
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}, words


@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.id)
def test_commands_have_these_options(one: object) -> None:
    scripts = [command.run for command in one.commands] + [each.how for each in one.deliverables]
    for run in (part.strip() for script in scripts for part in PARTS.split(script.replace("\\\n", " "))):
        if run.startswith("lmworks "):
            known, rest = options_of(shlex.split(run)[1:])
            assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known, run


def test_deliverables_have_files_of_their_own() -> None:
    """A file that two of them leave would tick both."""
    leaves = [each.leaves for one in LESSONS for each in one.deliverables]
    assert sorted(leaves) == sorted({*leaves})


def test_a_script_of_a_deliverable_keeps_its_lines(workspace: Workspace) -> None:
    one = lesson("mastery_memory")
    how = one.deliverables[0].how
    assert "; do\n  lmworks plan memory" in how
    assert f"\n\n```bash\n{how}\n```\n\n" in "\n\n".join(track_lesson_page(one))
    assert f"<pre>{escape(how)}</pre>" in lesson_body("", one, "", "")
    assert indent(how, " " * 6) in CliRunner().invoke(app, ["learn", "explain", one.id]).output


@pytest.mark.slow
@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.id)
def test_commands_run_and_deliverables_tick(one: object, workspace: Workspace) -> None:
    """In a fresh workspace, in their order; those that need more than this machine has are left out."""
    made = [each for each in one.deliverables if not each.needs]
    for script in [*(command.run for command in one.commands if not command.needs), *(each.how for each in made)]:
        run_script(script)
    ticks = {tick.item: tick for tick in lesson_ticks(one, workspace.folder, Progress.load(workspace.folder))}
    assert not [ticks[each.text] for each in made if not ticks[each.text].done]


def run_script(script: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, (script, done.stderr[-500:])


def test_a_lesson_is_done_by_its_quiz_its_readings_and_its_exercises(workspace: Workspace) -> None:
    one = lesson("roadmap_memory")
    before = lesson_ticks(one, workspace.folder, Progress.load(workspace.folder))
    assert not any(tick.done for tick in before)
    record_answers(workspace.folder, one.id, [True] * len(one.quiz))
    record_answers(workspace.folder, "attention_paper", [True] * len(readings()["attention_paper"].quiz))
    record_answers(workspace.folder, "nanogpt_code", [True, *[False] * (len(readings()["nanogpt_code"].quiz) - 1)])
    after = {tick.item: tick.done for tick in lesson_ticks(one, workspace.folder, Progress.load(workspace.folder))}
    assert [name for name, done in after.items() if done] == [
        readings()["attention_paper"].title,
        "The quiz of the lesson",
    ]


def test_a_deliverable_is_a_file_that_holds_what_it_should(workspace: Workspace) -> None:
    from lmworks.learn.evidence import Workplace, file_found

    def found() -> tuple[bool, str]:
        seen = file_found(Workplace(workspace.folder), "deliverables/*.json", ("all_reduce", "seconds"))
        return seen.done, seen.what

    assert found() == (False, "")
    file = workspace.folder / "deliverables" / "ring.json"
    file.parent.mkdir()
    file.write_text(" \n")
    assert found() == (False, "deliverables/ring.json is empty")
    file.write_text('{"all_reduce": 1}')
    assert found() == (False, "deliverables/ring.json has no seconds")
    file.write_text('{"all_reduce": {"seconds": 1}}')
    assert found() == (True, "deliverables/ring.json")


def test_tracks_on_the_command_line(workspace: Workspace) -> None:
    import json

    record_answers(workspace.folder, "roadmap_memory", [True, True])
    rows = json.loads(CliRunner().invoke(app, ["learn", "tracks", "roadmap", "--json"]).output)
    assert [row["done"] for row in rows][:2] == [1, 0] and rows[0]["of"] == len(lesson("roadmap_memory").items) + 1
    assert "0 of 18" in CliRunner().invoke(app, ["learn", "tracks"]).output
    shown = CliRunner().invoke(app, ["learn", "explain", "roadmap_memory"]).output
    assert "lmworks plan memory llama3-8b" in shown and "✓ The quiz of the lesson" in shown
    quiz = CliRunner().invoke(app, ["learn", "quiz", "roadmap_memory", "--answer", "3", "--answer", "1"]).output
    assert quiz.count("right.") == 2
    with pytest.raises(SpecError, match="did you mean 'roadmap_memory'"):
        lesson("roadmap_memroy")


@pytest.mark.parametrize("path", sorted((FOLDER.parent / "readings").glob("*.toml")), ids=lambda path: path.stem)
def test_the_right_choice_is_not_given_away_by_its_length(path: Path) -> None:
    """Who always takes the longest choice is right in at most half of the questions."""
    quiz = [one for reading in tomllib.loads(path.read_text())["readings"] for one in reading["quiz"]]
    longest = 0
    for one in quiz:
        right = len(one["choices"][one["answer"]])
        longest += all(len(choice) < right for at, choice in enumerate(one["choices"]) if at != one["answer"])
    assert len(quiz) < 6 or longest <= len(quiz) / 2
