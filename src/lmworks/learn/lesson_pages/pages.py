"""Lesson pages as Markdown, for a docs site: one an exercise, the readings, the plan, and an index.

All of it comes from the exercises, goals.toml, readings and tracks: the same input gives the same pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import dedent

from ...spec.files import write_whole
from ..course_files import course_holes, course_sources
from ..exercise import Exercise, exercises
from ..goals import LISTS, Item, readings, sections
from ..holes import Hole
from ..interview import OpenQuestion, questions
from ..tracks import lesson as track_lesson
from ..tracks import lesson_names, tracks
from ..workspace import stub_of
from .cheat_sheet import cheat_sheet_page
from .markdown import bullets, folded, link, markdown, quiz_blocks, wrapped
from .tracks import track_files, track_lesson_page, track_page, tracks_overview

MADE = "<!-- made: lmworks learn export --pages -->"


def write_pages(folder: Path) -> None:
    """All pages; those of exercises that are no more are removed."""
    made = {**pages(), **track_files()}
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("*.md"), *folder.glob("pictures/*.svg")):
        ours = path.suffix == ".svg" or path.read_text().startswith(MADE)
        if ours and path.relative_to(folder).as_posix() not in made:
            path.unlink()
    for name, page in made.items():
        write_whole(folder / name, page)


def pages() -> dict[str, str]:
    """File name → text."""
    found = {f"{one.id}.md": lesson_page(one) for one in exercises().values()}
    found |= {"index.md": index_page(), "plan.md": plan_page(), "readings.md": readings_page()}
    found |= {f"track_{one.id}.md": track_page(one) for one in tracks().values()}
    found |= {f"{name}.md": track_lesson_page(track_lesson(name)) for name in lesson_names()}
    found |= {"interview.md": interview_page()}
    found |= {"cheatsheet.md": cheat_sheet_page()}
    return {name: "\n\n".join([MADE, *blocks]) + "\n" for name, blocks in found.items()}


# --- pages: blocks of Markdown ---------------------------------------------------------------------------


def index_page() -> Iterator[str]:
    every = exercises().values()
    yield "# The course, lesson by lesson"
    yield wrapped(
        f"{len(every)} exercises on the real code. `lmworks learn init DIR` makes a workspace, `lmworks learn` in it "
        "says what is next; [the course](../course.md) tells how it works. [The plan](plan.md) has the days, the "
        "checklist and the milestones, [the readings](readings.md) have questions to answer afterwards, "
        "[the interview](interview.md) has open ones, [the cheat sheet](cheatsheet.md) rules of thumb with numbers."
    )
    yield "## Tracks"
    yield tracks_overview()
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
    yield from quiz_blocks(exercise.quiz)
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
        yield f"    lmworks learn quiz {one.id}\n    lmworks learn summary {one.id}"
        yield from quiz_blocks(one.quiz)


def interview_page() -> Iterator[str]:
    yield "# Interview"
    yield wrapped(
        "Answer a question aloud or on paper, then open its rubric. `lmworks learn interview` asks them one by one, "
        "brings back what was missed, and grades calculations, with other figures each time."
    )
    for topic, ones in groupby(questions().values(), key=lambda one: one.topic):
        yield f"## {markdown(topic)}"
        for one in ones:
            yield from open_question(one)


def open_question(question: OpenQuestion) -> Iterator[str]:
    yield f"### {markdown(question.question)}"
    yield f"    lmworks learn interview {question.id}"
    if scenario := question.scenario(turn=0):
        yield wrapped(f"**Calculation:** {markdown(scenario.ask)}")
    yield from folded("What a good answer says", [bullets(map(markdown, question.rubric))])
    for one in question.follow_ups:
        yield from folded(markdown(one.question), [wrapped(markdown(one.answer))])
    if question.exercises:
        yield wrapped(f"Exercises: {', '.join(link(exercises()[name], name) for name in question.exercises)}")


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
