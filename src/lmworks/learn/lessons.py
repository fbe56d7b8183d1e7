"""Lesson pages as Markdown, for a docs site: one an exercise, the readings, the plan, and an index.

All of it comes from the exercises, goals.toml and readings.toml: the same input gives the same pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import dedent, fill

from ..spec.files import write_whole
from .course_files import course_holes, course_sources
from .exercise import Exercise, Question, exercises
from .goals import Item, readings, sections
from .holes import Hole
from .workspace import stub_of

WIDTH = 120
MADE = "<!-- made: lmworks learn export --pages -->"
LISTS = {"plan": "The study plan by days", "checklist": "The checklist", "milestones": "The milestones"}
CODE_OR_LINK = re.compile(r"(`[^`]+`|https?://[^\s<>]*[^\s<>.,;:)])")
SPECIAL = re.compile(r"[\\*<>\[\]|]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word is one
BLOCK_START = re.compile(r" (?=(?:[-+*>]|#+|\d+[.)]) )")  # at the start of a line this would begin a list


def write_pages(folder: Path) -> None:
    """All pages; those of exercises that are no more are removed."""
    made = pages()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in made and path.read_text().startswith(MADE):
            path.unlink()
    for name, page in made.items():
        write_whole(folder / name, page)


def pages() -> dict[str, str]:
    """File name → text."""
    found = {f"{one.id}.md": lesson_page(one) for one in exercises().values()}
    found |= {"index.md": index_page(), "plan.md": plan_page(), "readings.md": readings_page()}
    return {name: "\n\n".join([MADE, *blocks]) + "\n" for name, blocks in found.items()}


# --- pages: blocks of Markdown ---------------------------------------------------------------------------


def index_page() -> Iterator[str]:
    every = exercises().values()
    yield "# The course, lesson by lesson"
    yield wrapped(
        f"{len(every)} exercises on the real code. `lmworks learn init DIR` makes a workspace, `lmworks learn` in it "
        "says what is next; [the course](../course.md) tells how it works. [The plan](plan.md) has the days, the "
        "checklist and the milestones, [the readings](readings.md) have questions to answer afterwards."
    )
    for phase, ones in groupby(every, key=lambda one: one.phase):
        yield f"## {markdown(phase)}"
        rows = [
            f"| {one.number} | {link(one, one.title)} | {markdown(one.concept)} | {markdown(one.difficulty)} |"
            for one in ones
        ]
        yield "\n".join(["| | exercise | concept | difficulty |", "|---|---|---|---|", *rows])


def lesson_page(exercise: Exercise) -> Iterator[str]:
    every = list(exercises().values())
    at = every.index(exercise)
    yield f"# {markdown(exercise.about)}"
    yield from lesson(exercise)
    yield "## Check it"
    yield "\n".join(f"    {command}" for command in commands(exercise))
    yield "## Hints"
    for number, one in enumerate(exercise.hints, 1):
        yield from folded(f"Hint {number}", [wrapped(markdown(one))])
    yield "## What goes wrong"
    known = dict.fromkeys(one.misconception for one in exercise.mutants)
    yield from folded("Wrong answers that the check knows", [bullets(map(markdown, known))])
    yield "## Quiz"
    yield from quiz(exercise.quiz)
    yield "---"
    before, after = every[at - 1 : at] if at else [], every[at + 1 : at + 2]
    around = [f"Before: {link(one)}" for one in before] + [f"Next: {link(one)}" for one in after]
    yield " · ".join([*around, "[All](index.md)"])


def lesson(exercise: Exercise) -> Iterator[str]:
    """What one reads before writing."""
    yield f"{markdown(exercise.phase)} · {markdown(exercise.difficulty)} · `{exercise.file}`"
    yield wrapped(f"**Concept:** {markdown(exercise.concept)}")
    if exercise.needs:
        yield wrapped(f"**Needs:** {markdown(exercise.needs)}")
    yield wrapped(markdown(exercise.insight))
    yield "## The task"
    yield wrapped(markdown(exercise.task))
    for hole in holes_of(exercise):
        yield f"```python\n{excerpt(hole, exercise.file)}```"
    if exercise.read_first:
        yield "## Read first"
        yield bullets(map(markdown, exercise.read_first))
    if exercise.depends_on:
        yield "## Depends on"
        yield bullets(link(exercises()[name]) for name in exercise.depends_on)


def readings_page() -> Iterator[str]:
    yield "# Readings"
    yield "Each is done once its quiz is answered."
    for one in readings().values():
        yield f"## {markdown(one.title)}"
        yield f"<{one.link}>"
        yield f"    lmworks learn quiz {one.id}"
        yield from quiz(one.quiz)


def plan_page() -> Iterator[str]:
    yield "# The plan, the checklist, the milestones"
    yield "The commands tick each item by what is there."
    for name, ones in groupby(sections(), key=lambda one: one.list):
        yield f"## {LISTS[name]}"
        yield f"    lmworks learn {name}"
        for section in ones:
            yield f"### {markdown(section.title)}"
            yield bullets(map(plan_item, section.items))


def plan_item(item: Item) -> str:
    if item.reading:
        return f"[{markdown(item.text)}]({readings()[item.reading].link})"
    if item.exercises:
        return f"{markdown(item.text)} ({', '.join(link(exercises()[name], name) for name in item.exercises)})"
    means = [f"`{item.how}`"] if item.how else []
    means += [f"needs {markdown(item.needs)}"] if item.needs else []
    return f"{markdown(item.text)}: {'; '.join(means)}" if means else markdown(item.text)


# --- parts of pages --------------------------------------------------------------------------------------


def commands(exercise: Exercise) -> list[str]:
    return [f"lmworks learn check {exercise.id}", *([exercise.test] if exercise.test else [])]


def holes_of(exercise: Exercise) -> list[Hole]:
    return [hole for hole in course_holes().values() if hole.exercise == exercise.id]


def excerpt(hole: Hole, path: str) -> str:
    """From the line that begins the function, with the stub in place of the solution."""
    before, after = around(hole, path)
    stub = "\n".join(f"{hole.indentation}{line}" for line in stub_of(hole).splitlines())
    return dedent("\n".join([*before, stub, *after, ""]))


def around(hole: Hole, path: str) -> tuple[list[str], list[str]]:
    """The lines before and after what is written: of its function, or, where that is a whole one, of the next one."""
    lines = course_sources()[path].splitlines()
    start = hole.start - 1
    if not hole.indentation:
        following = "\n".join(lines[hole.stop :])
        function = re.search(r"^def .*\n(?:(?: .*)?\n)*", following, re.MULTILINE)
        return lines[start : hole.start], following[: function.end() if function else 0].rstrip().splitlines()
    while start and not is_outer_def(lines[start], hole):
        start -= 1
    return lines[start : hole.start], lines[hole.stop : hole.stop + 1]


def is_outer_def(line: str, hole: Hole) -> bool:
    inner = line.lstrip()
    return inner.startswith(("def ", "async def ")) and len(line) - len(inner) < len(hole.indentation)


def quiz(questions: Sequence[Question]) -> Iterator[str]:
    for number, one in enumerate(questions, 1):
        yield wrapped(f"**{number}.** {markdown(one.question)}")
        yield bullets(map(markdown, one.choices))
    yield from folded("Answers", [
        wrapped(f"**{number}.** {markdown(f'{one.choices[one.answer]}. {one.why}')}")
        for number, one in enumerate(questions, 1)
    ])  # fmt: skip


def folded(title: str, blocks: Iterable[str]) -> Iterator[str]:
    yield f"<details><summary>{title}</summary>"
    yield from blocks
    yield "</details>"


def link(exercise: Exercise, words: str = "") -> str:
    return f"[{markdown(words or exercise.about)}]({exercise.id}.md)"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(wrapped(line, "- ", "  ") for line in lines)


def wrapped(text: str, first: str = "", later: str = "") -> str:
    kept = BLOCK_START.sub("\0", " ".join(text.split()))
    lines = fill(kept, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False,
                 break_on_hyphens=False)  # fmt: skip
    return lines.replace("\0", " ")


def markdown(text: str) -> str:
    """Plain text with code between backticks, so that nothing else of it is markup; addresses become links."""
    parts = CODE_OR_LINK.split(text)
    return "".join(
        SPECIAL.sub(r"\\\g<0>", part) if not number % 2 else part if part.startswith("`") else f"<{part}>"
        for number, part in enumerate(parts)
    )
