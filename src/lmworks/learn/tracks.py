"""Tracks through the course: lessons in the order of a study plan, as data (learn/tracks/).

A lesson has an idea, a picture, formulas, what to read, commands that show it, exercises, a quiz and deliverables. It
is done when each of its items is: they are ticked like those of the plan, by what is there.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec.errors import SpecError, near_names, suggestion
from .evidence import Workplace
from .exercise import Question, exercises
from .goals import Item, Tick, question, quiz_command, quiz_found, readings, tick
from .progress import Progress
from .summaries import summary_found

FOLDER = Path(__file__).parent / "tracks"


@dataclass(frozen=True)
class Formula:
    formula: str
    means: str


@dataclass(frozen=True)
class Command:
    run: str
    shows: str
    needs: str = ""  # what not every machine has

    @property
    def what(self) -> str:
        return f"{self.shows} Needs {self.needs}." if self.needs else self.shows


@dataclass(frozen=True)
class Explained:
    """A question that one should be able to answer, and a short answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Deliverable:
    text: str
    how: str
    leaves: str  # a file of the workspace; `*` stands for any part of a name
    holds: tuple[str, ...] = ()  # words that have to stand in it
    needs: str = ""

    @property
    def item(self) -> Item:
        return Item(self.text, how=self.how, needs=self.needs, leaves=self.leaves, holds=self.holds)


@dataclass(frozen=True)
class Lesson:
    id: str
    title: str
    part: str  # of the plan: Days 1 to 3, Layer 2, Section 7
    idea: tuple[str, ...]  # paragraphs
    picture: str  # a name of PICTURES
    caption: str
    formulas: tuple[Formula, ...]
    explain: tuple[Explained, ...]
    commands: tuple[Command, ...]
    quiz: tuple[Question, ...]
    readings: tuple[str, ...] = ()
    exercises: tuple[str, ...] = ()
    deliverables: tuple[Deliverable, ...] = ()

    @property
    def items(self) -> tuple[Item, ...]:
        """All but its quiz."""
        return (
            *(Item(readings()[name].title, reading=name) for name in self.readings),
            *(Item(exercises()[name].about, exercises=(name,)) for name in self.exercises),
            *(one.item for one in self.deliverables),
        )


@dataclass(frozen=True)
class Track:
    id: str
    title: str
    about: str
    lessons: tuple[str, ...]
    summaries: bool = False  # each reading ends in a summary of a page


@functools.cache
def tracks() -> dict[str, Track]:
    tables = tomllib.loads((FOLDER / "tracks.toml").read_text())["tracks"]
    return {one["id"]: Track(**{**one, "lessons": tuple(one["lessons"])}) for one in tables}


def lesson_names() -> list[str]:
    return [name for track in tracks().values() for name in track.lessons]


@functools.cache
def lesson(name: str) -> Lesson:
    if name not in lesson_names():
        known = [*lesson_names(), *tracks()]
        raise SpecError(f"no lesson {name!r}{suggestion(near_names(name, known))}; `lmworks learn tracks` has them all")
    table: dict[str, Any] = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    for key, kind in (("formulas", Formula), ("explain", Explained), ("commands", Command)):
        table[key] = tuple(kind(**one) for one in table.get(key, ()))
    table["deliverables"] = tuple(
        Deliverable(**{**one, "holds": tuple(one.get("holds", ()))}) for one in table.get("deliverables", ())
    )
    table["quiz"] = tuple(map(question, table["quiz"]))
    for key in ("idea", "readings", "exercises"):
        table[key] = tuple(table.get(key, ()))
    return Lesson(name, **table)


def track_of(name: str) -> Track:
    """That the lesson is of."""
    return next(track for track in tracks().values() if name in track.lessons)


def neighbours(one: Lesson) -> list[tuple[str, Lesson]]:
    """("before" or "next", the lesson there)."""
    names = track_of(one.id).lessons
    at = names.index(one.id)
    around = [("before", name) for name in names[:at][-1:]] + [("next", name) for name in names[at + 1 :][:1]]
    return [(way, lesson(name)) for way, name in around]


def find_track(name: str) -> Track:
    if name not in tracks():
        raise SpecError(
            f"no track {name!r}{suggestion(near_names(name, [*tracks()]))}; there are {', '.join(tracks())}"
        )
    return tracks()[name]


def lesson_ticks(one: Lesson, workspace: Path, progress: Progress) -> list[Tick]:
    place, answered = Workplace(workspace), quiz_found(one.id, one.quiz, progress)
    own = Tick(one.title, "The quiz of the lesson", answered.done, answered.what, quiz_command(one.id), "")
    written = [summary_tick(one, name, workspace) for name in one.readings] if track_of(one.id).summaries else []
    return [*(tick(item, one.title, place, progress) for item in one.items), *written, own]


def summary_tick(one: Lesson, reading: str, workspace: Path) -> Tick:
    found = summary_found(workspace, reading)
    text = f"A summary: {readings()[reading].title}"
    return Tick(one.title, text, found.done, found.what, f"lmworks learn summary {reading}", "")
