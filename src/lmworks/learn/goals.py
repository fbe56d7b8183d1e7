"""The study plan, the checklist and the milestones as data (goals.toml, readings), and what of them is done."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .evidence import EVIDENCE, Found, Workplace, file_found
from .exercise import Question
from .progress import Progress

FOLDER = Path(__file__).parent
LISTS = {"plan": "The study plan by days", "checklist": "The checklist", "milestones": "The milestones"}


@dataclass(frozen=True)
class Reading:
    id: str
    title: str
    link: str
    quiz: tuple[Question, ...]


@dataclass(frozen=True)
class Item:
    """Done by exactly one of: a reading's quiz, exercises that pass, evidence, a file that is left."""

    text: str
    reading: str = ""
    exercises: tuple[str, ...] = ()
    evidence: str = ""
    leaves: str = ""  # a file of the workspace; `*` stands for any part of a name
    holds: tuple[str, ...] = ()  # words that have to stand in it
    how: str = ""  # a command that does it
    needs: str = ""  # what not every machine has


@dataclass(frozen=True)
class Section:
    list: str
    title: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Tick:
    section: str
    item: str
    done: bool
    found: str  # where it was seen, or what is missing
    how: str
    needs: str
    link: str = ""


@functools.cache
def readings() -> dict[str, Reading]:
    files = sorted((FOLDER / "readings").glob("*.toml"))
    tables = [one for file in files for one in tomllib.loads(file.read_text())["readings"]]
    return {one["id"]: Reading(**{**one, "quiz": tuple(map(question, one["quiz"]))}) for one in tables}


def question(table: dict[str, Any]) -> Question:
    return Question(**{**table, "choices": tuple(table["choices"])})


@functools.cache
def sections() -> tuple[Section, ...]:
    tables = tomllib.loads((FOLDER / "goals.toml").read_text())["sections"]
    return tuple(
        Section(one["list"], one["title"], tuple(
            Item(**{**item, "exercises": tuple(item.get("exercises", ()))}) for item in one["items"]))
        for one in tables
    )  # fmt: skip


def ticks(kind: str, workspace: Path, progress: Progress) -> list[Tick]:
    """Of one of LISTS, by looking at what is there now."""
    place = Workplace(workspace)
    return [
        tick(item, section.title, place, progress)
        for section in sections() if section.list == kind
        for item in section.items
    ]  # fmt: skip


def tick(item: Item, section: str, place: Workplace, progress: Progress) -> Tick:
    if item.reading:
        reading = readings()[item.reading]
        found = quiz_found(reading.id, reading.quiz, progress)
        return Tick(section, item.text, found.done, found.what, quiz_command(reading.id), item.needs, reading.link)
    if item.exercises:
        found, how = exercises_found(item.exercises, progress)
        return Tick(section, item.text, found.done, found.what, how, item.needs)
    found = file_found(place, item.leaves, item.holds) if item.leaves else EVIDENCE[item.evidence](place)
    return Tick(section, item.text, found.done, found.what, item.how, item.needs)


def quiz_command(name: str) -> str:
    return f"lmworks learn quiz {name}"


def quiz_found(name: str, quiz: tuple[Question, ...], progress: Progress) -> Found:
    given = [progress.answers.get(f"{name}/{number}") for number in range(len(quiz))]
    if given.count(None) == len(given):
        return Found(False)
    return Found(all(given), f"{given.count(True)} of {len(given)} answered right")


def exercises_found(names: tuple[str, ...], progress: Progress) -> tuple[Found, str]:
    left = [name for name in names if not progress.of(name).passed]
    what = f"{len(names) - len(left)} of {len(names)} pass"
    ahead = f"lmworks learn check {left[0]}" if left else ""
    return Found(not left, what if len(left) < len(names) else ""), ahead
