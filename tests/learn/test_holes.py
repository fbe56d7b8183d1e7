"""Marks in the course's source: what stands between them, and lines that keep their numbers."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from textwrap import dedent

import pytest

from lmworks.learn import unfinished
from lmworks.learn.course_files import course_holes, course_sources
from lmworks.learn.exercise import GUIDE, exercises
from lmworks.learn.holes import find_holes, replace_holes
from lmworks.spec.errors import SpecError

unfinished_module = importlib.import_module("lmworks.learn.unfinished")  # the package has the function by that name
TEXT = """\
def f(x):
    # exercise one(x)
    y = x + 1
    return y
    # end one


def g(x):
    if x:
        # exercise two.part(x) -> a, b
        a = x
        b = 2 * x
        # end two.part
    return a + b
"""


def test_parts_and_stubs() -> None:
    one, two = find_holes(TEXT, "f.py")
    assert (one.name, one.exercise, one.arguments, one.results) == ("one", "one", "x", "")
    assert one.body == "y = x + 1\nreturn y\n" and one.stub == 'return unfinished("one", x)\n'
    assert (two.name, two.exercise, two.results) == ("two.part", "two", "a, b")
    assert two.body == "a = x\nb = 2 * x\n" and two.stub == 'a, b = unfinished("two.part", x)\n'
    assert one.written and two.written


def test_replaced_lines_know_where_they_come_from() -> None:
    text, origin = replace_holes(TEXT, "f.py", lambda hole: "return 7\n" if hole.name == "one" else None)
    lines, before = text.splitlines(), TEXT.splitlines()
    assert lines[2] == "    return 7" and origin[2] == 3
    assert len(origin) == len(lines) == len(before) - 1
    assert all(lines[at] == before[origin[at] - 1] for at in range(len(lines)) if at != 2)
    stubs, _ = replace_holes(TEXT, "f.py", lambda hole: hole.stub)
    assert not any(hole.written for hole in find_holes(stubs, "f.py"))
    assert "        a, b = unfinished" in stubs


WHOLE = """\
# exercise three() -> square
def square(x):
    return x * x


# end three
"""


def test_a_whole_function_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference has a source that can be read, as Triton does, and the caller's names."""
    (hole,) = find_holes(WHOLE, "f.py")
    assert hole.stub == 'square = unfinished("three")\n'
    text, origin = replace_holes(WHOLE, "f.py", lambda one: one.stub)
    assert text.splitlines() == ["# exercise three() -> square", 'square = unfinished("three")', "# end three"]
    assert origin == [1, 2, 6]
    monkeypatch.setattr(unfinished_module, "course_holes", lambda: {"three": hole})
    square = unfinished("three")
    assert square(3) == 9 and square.__globals__ is globals()
    assert dedent(inspect.getsource(square)) == "def square(x):\n    return x * x\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "# exercise one(x)\nx\n",
            "mine.py:1: the line `# end one` is missing; write it again, or `lmworks learn reset",
        ),
        ("# exercise one(x)\n# exercise two(x)\n# end two\n", "mine.py:1: the line `# end one` is missing"),
    ],
)
def test_broken_marks_are_named(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=re.escape(says)):
        find_holes(text, "mine.py")


def test_every_exercise_has_its_parts_and_data() -> None:
    known = exercises()
    assert [one.number for one in known.values()] == list(range(1, len(known) + 1))
    assert {hole.exercise for hole in course_holes().values()} == set(known)
    for one in known.values():
        assert any(hole.exercise == one.id for hole in find_holes(course_sources()[one.file], one.file)), one.id
        assert len(one.hints) == 3 and len(one.mutants) >= 5 and one.quiz, one.id
        assert all(known[other].number < one.number for other in one.depends_on), one.id
        assert all(0 <= question.answer < len(question.choices) for question in one.quiz), one.id


def test_the_document_counts_what_is_there() -> None:
    known = list(exercises().values())
    text = (Path(__file__).parents[2] / "docs" / "course.md").read_text()
    for topic, of_topic in groupby(known[GUIDE:], key=lambda one: one.phase):
        names = [f"`{one.id}`" for one in of_topic]
        assert f"| {topic} | {len(names)} | {', '.join(names)} |\n" in text, (topic, names)
    wrong = sum(len(one.mutants) for one in known)
    assert f"every wrong answer is caught: {wrong} of {wrong}." in text, wrong
    assert f"0 of {GUIDE} exercises pass, 0 of {len(known) - GUIDE} further ones." in text
    assert text.startswith("# The course") and GUIDE == 15 and "\nFifteen exercises" in text


def tokens(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def longest_run(line: list[str], text: list[str]) -> int:
    """Of tokens of `line`, in their order and next to each other, that stand in `text` too."""
    inside = "\0".join(["", *text, ""])
    runs = (stop - start for start in range(len(line)) for stop in range(start + 1, len(line) + 1)
            if "\0".join(["", *line[start:stop], ""]) in inside)  # fmt: skip
    return max(runs, default=0)


def given_away(solution: str, hints: Sequence[str]) -> list[tuple[str, str]]:
    """Lines of the solution that a hint has so much of that it could be pasted: more than half, or six tokens of it."""
    lines = [line.partition("  #")[0].strip() for line in solution.splitlines()]
    return [
        (line, hint)
        for line in lines
        for hint in hints
        if len(tokens(line)) >= 5 and longest_run(tokens(line), tokens(hint)) > max(5, len(tokens(line)) // 2)
    ]


def test_hints_give_no_line_away() -> None:
    solution = "scores = q @ k.transpose(-2, -1) / 8\nreturn scores\n"
    assert given_away(solution, ["try scores = q @ k.transpose(-2, -1)"]) and given_away(solution, [solution])
    assert not given_away(solution, ["`k.transpose` swaps two dimensions", "scores = q·kᵀ / 8"])
    for hole in course_holes().values():
        assert not given_away(hole.body, exercises()[hole.exercise].hints), hole.name
