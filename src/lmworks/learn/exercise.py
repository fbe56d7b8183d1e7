"""An exercise as data: learn/exercises/ID.toml."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..spec.errors import SpecError, near_names, suggestion

FOLDER = Path(__file__).parent / "exercises"
GUIDE = 15  # the first exercises, one program after another; those after them stand each for itself


@dataclass(frozen=True)
class Mutant:
    """A wrong answer that people give: one edit of the solution, and what its author believes."""

    find: str
    replace: str
    misconception: str
    part: str = ""  # of an exercise with several
    waits: bool = False  # a rank of it waits until the check gives up


@dataclass(frozen=True)
class Question:
    question: str
    choices: tuple[str, ...]
    answer: int  # which of the choices, from 0
    why: str


@dataclass(frozen=True)
class Exercise:
    id: str
    number: int
    title: str
    file: str
    phase: str
    concept: str
    difficulty: str  # with the lines of the reference
    insight: str
    task: str
    hints: tuple[str, str, str]
    mutants: tuple[Mutant, ...]
    quiz: tuple[Question, ...]
    read_first: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()
    requires: str = ""  # a package that only the extra `learn` brings
    if_stopped: str = ""  # what a crash or an endless wait of this exercise is usually caused by
    test: str = ""  # a command of the workspace that shows it at work

    @property
    def needs(self) -> str:
        """What has to be installed beside LMWorks."""
        return f'{self.requires.title()}; on Linux, `pip install "lmworks[learn]"` brings it' if self.requires else ""

    @property
    def about(self) -> str:
        return f"{self.number}. {self.title}"


class Exercises(Mapping[str, Exercise]):
    """By their IDs, in their order. A file is read when its exercise is asked for: `lmworks learn` needs one."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = {path.stem: path for path in sorted(paths, key=number_of)}
        self.read: dict[str, Exercise] = {}

    def __getitem__(self, name: str) -> Exercise:
        if name not in self.read:
            self.read[name] = load(self.paths[name])
        return self.read[name]

    def __contains__(self, name: object) -> bool:
        return name in self.paths

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


@functools.cache
def exercises() -> Exercises:
    return Exercises(list(FOLDER.glob("*.toml")))


def number_of(path: Path) -> int:
    """From its first line, without parsing the rest."""
    with path.open() as file:
        line = file.readline()
    if not (found := re.fullmatch(r"number = (\d+)\n", line)):
        raise ValueError(f"{path}: the first line has to be `number = …`")
    return int(found[1])


def load(path: Path) -> Exercise:
    table: dict[str, Any] = tomllib.loads(path.read_text())
    table["mutants"] = tuple(Mutant(**one) for one in table["mutants"])
    table["quiz"] = tuple(Question(**{**one, "choices": tuple(one["choices"])}) for one in table["quiz"])
    for field in fields(Exercise):
        if str(field.type).startswith("tuple[str") and field.name in table:
            table[field.name] = tuple(table[field.name])
    return Exercise(path.stem, **table)


def find_exercise(name: str, others: Iterable[str] = ()) -> Exercise:
    """By its ID or number. `others`: names of other things that would have been right here."""
    known = exercises()
    if name.isdecimal() and 1 <= int(name) <= len(known):
        return known[list(known)[int(name) - 1]]
    if name in known:
        return known[name]
    raise SpecError(
        f"no exercise {name!r}{suggestion(near_names(name, [*known, *others]))}; `lmworks learn list` has them all"
        f"{', `lmworks learn tracks` the lessons' if others else ''}"
    )
