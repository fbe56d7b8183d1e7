"""Many learners' workspaces, checked: points by exercise, as Gradescope's results.json and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec.errors import SpecError
from .checking.check import check_exercise
from .checking.verdict import BROKEN, Verdict
from .exercise import Exercise
from .workspace import Workspace

POINTS = 10  # of an exercise


@dataclass(frozen=True)
class Grade:
    learner: str
    verdicts: dict[Exercise, Verdict]

    def points(self, exercise: Exercise) -> int:
        return POINTS if self.verdicts[exercise].passed else 0

    @property
    def total(self) -> int:
        return sum(map(self.points, self.verdicts))

    @property
    def most(self) -> int:
        return POINTS * len(self.verdicts)

    def as_json(self) -> dict[str, Any]:
        verdicts = [one.as_json() for one in self.verdicts.values()]
        return {"learner": self.learner, "points": self.total, "of": self.most, "verdicts": verdicts}


def grades(folders: Sequence[Path], exercises: Sequence[Exercise]) -> Iterator[Grade]:
    """One after the other. Each is checked anew: what a progress file says does not count."""
    for folder in folders:
        if not folder.is_dir():
            raise SpecError(f"{folder} is no folder; name the learners' workspaces")
    for name, folder in zip(names_of(folders), folders, strict=True):
        workspace = Workspace(folder.resolve())
        yield Grade(name, {one: checked(workspace, one) for one in exercises})


def names_of(folders: Sequence[Path]) -> list[str]:
    """The folders' own; where two have the same, as they were given."""
    short = [folder.resolve().name for folder in folders]
    return [str(folder) if short.count(name) > 1 else name for name, folder in zip(short, folders, strict=True)]


def checked(workspace: Workspace, exercise: Exercise) -> Verdict:
    """Of a learner's folder, in which anything may be wrong."""
    try:
        refuse_links(workspace.folder)
        return check_exercise(workspace, exercise)
    except (SpecError, OSError) as error:
        return Verdict(exercise.id, BROKEN, str(error))


def refuse_links(folder: Path) -> None:
    """A check copies what it finds: a link could lead to files of the teacher's, or to a device without an end."""
    source = folder / "src"
    for path in (source, *source.rglob("*")):
        if path.is_symlink():
            raise SpecError(f"{path.relative_to(folder)} is a link; files are graded, not what they lead to")


def as_gradescope(one: Grade) -> dict[str, Any]:
    """https://gradescope-autograders.readthedocs.io/en/latest/specs/"""
    tests = [
        {
            "number": str(exercise.number),
            "name": exercise.title,
            "score": one.points(exercise),
            "max_score": POINTS,
            "status": "passed" if verdict.passed else "failed",
            "output": "\n".join(verdict.lines(exercise.about)),
            "output_format": "text",
            "visibility": "visible",
        }
        for exercise, verdict in one.verdicts.items()
    ]
    passed = sum(verdict.passed for verdict in one.verdicts.values())
    seconds = round(sum(verdict.seconds for verdict in one.verdicts.values()))
    output = f"{passed} of {len(tests)} exercises pass."
    return {"score": one.total, "execution_time": seconds, "output": output, "visibility": "visible", "tests": tests}


def as_csv(grades: Sequence[Grade]) -> str:
    """A row a learner: points in all, and of each exercise."""
    exercises = list(grades[0].verdicts)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["learner", "points", "of", *(one.id for one in exercises)])
    for one in grades:
        name = f"'{one.learner}" if one.learner[:1] in "=+-@" else one.learner  # no formula of a spreadsheet
        writer.writerow([name, one.total, one.most, *map(one.points, exercises)])
    return text.getvalue()
