"""Lesson pages: those of docs/course/ are the exercises' own, and their Markdown says what the exercises say."""

from __future__ import annotations

import ast
import re
from html import unescape
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from lmworks.learn.course_files import course_holes
from lmworks.learn.exercise import exercises
from lmworks.learn.goals import readings
from lmworks.learn.lesson_pages import pages as lessons
from lmworks.learn.lesson_pages.markdown import bullets, markdown, wrapped
from lmworks.learn.lesson_pages.pages import excerpt, pages, write_pages
from lmworks.learn.lesson_pages.tracks import track_files
from lmworks.learn.tracks import lesson, lesson_names, tracks

FOLDER = Path(__file__).parents[2] / "docs/course"
EXERCISES = list(exercises().values())


def test_pages_are_those_of_the_exercises() -> None:
    kept = files_of(FOLDER)
    made = {**pages(), **track_files()}
    stale = sorted(name for name in {*kept, *made} if kept.get(name) != made.get(name))
    assert not stale, f"{', '.join(stale)}: `lmworks learn export --pages docs/course` writes them anew"


def files_of(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")}


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


def rendered(text: str) -> str:
    """What a reader sees."""
    html = MarkdownIt().render(text)
    return " ".join(unescape(re.sub(r"<[^>]+>", "", html)).split())


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda one: one.id)
def test_a_reader_sees_what_the_exercise_says(exercise: lessons.Exercise, made: dict[str, str]) -> None:
    says = [exercise.task, exercise.insight, exercise.concept, *exercise.hints, *exercise.read_first]
    says += [one.misconception for one in exercise.mutants]
    says += [words for one in exercise.quiz for words in (one.question, one.why, *one.choices)]
    page = rendered(made[f"{exercise.id}.md"])
    assert not [one for one in says if " ".join(one.replace("`", "").split()) not in page]
    for hole in course_holes().values():
        if hole.exercise == exercise.id:
            assert " ".join(hole.body.split()) not in page
            assert f'unfinished("{hole.name}"' in page
            ast.parse(excerpt(hole, exercise.file))  # a whole function


@pytest.mark.parametrize(
    "text", ["2 * 3 * 4", "a_b and _c_", "x < y > z", "[a](b) \\n", "[1, 2]", "1 | 2", "3. is no list", "<b>bold</b>"]
)
def test_nothing_of_plain_text_is_markup(text: str) -> None:
    html = MarkdownIt().render(wrapped(f"say {markdown(text)}"))
    assert unescape(html) == f"<p>say {text}</p>\n"


def test_a_line_does_not_begin_a_list_by_chance() -> None:
    text = " ".join(["word"] * 22) + " of one - two + 3. of # four"
    for width in range(20, 120):
        lines = wrapped(text[width:]).splitlines()
        assert not [line for line in lines[1:] if re.match(r"([-+*>#]|\d+[.)]) ", line)]
    assert wrapped("a " * 80, "- ", "  ").splitlines()[1].startswith("  a")
    assert bullets(["one", "two"]) == "- one\n- two"
    assert MarkdownIt().render(wrapped("8. With more ranks")) == "<p>8. With more ranks</p>\n"


def test_pages_of_exercises_that_are_no_more_are_removed(tmp_path: Path) -> None:
    write_pages(tmp_path)
    first = files_of(tmp_path)
    assert len(first) == len(EXERCISES) + 5 + len(tracks()) + 2 * len(lesson_names())
    (tmp_path / "gone.md").write_text(f"{lessons.MADE}\n\n# 99. Gone\n")
    (tmp_path / "pictures" / "gone.svg").write_text("<svg/>")
    (tmp_path / "mine.md").write_text("# Mine\n")
    write_pages(tmp_path)
    assert files_of(tmp_path) == {**first, "mine.md": "# Mine\n"}


@pytest.mark.parametrize("name", lesson_names())
def test_a_reader_sees_what_a_lesson_of_a_track_says(name: str, made: dict[str, str]) -> None:
    one = lesson(name)
    says = [*one.idea, one.title, *(each.means for each in one.formulas), *(each.shows for each in one.commands)]
    says += [words for each in one.explain for words in (each.question, each.answer)]
    says += [words for each in one.quiz for words in (each.question, each.why, *each.choices)]
    page = rendered(made[f"{name}.md"])
    assert not [words for words in says if " ".join(words.replace("`", "").split()) not in page]
    assert f"pictures/{one.picture}.svg" in made[f"{name}.md"]


def test_readings_and_the_plan_lead_to_their_quizzes() -> None:
    made = pages()
    assert all(f"    lmworks learn quiz {one}\n" in made["readings.md"] for one in readings())
    assert "([rmsnorm](rmsnorm.md), [rotate_half](rotate_half.md)" in made["plan.md"]
