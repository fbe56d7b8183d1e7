"""What the learner has done: .learn/progress.json in the workspace."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ..spec.errors import SpecError
from ..spec.files import write_whole
from .exercise import Exercise
from .verdict import Verdict


@dataclass
class Record:
    """Of one exercise."""

    tries: int = 0
    hints: int = 0
    passed: str = ""  # when it first did, ISO 8601
    gave_up: bool = False  # its solution was asked for before it passed


@dataclass
class Progress:
    file: Path
    exercises: dict[str, Record] = field(default_factory=dict)
    answers: dict[str, bool] = field(default_factory=dict)  # question → right at the last time

    @classmethod
    def load(cls, workspace: Path) -> Progress:
        file = workspace / ".learn" / "progress.json"
        if not file.exists():
            return cls(file)
        try:
            table = json.loads(file.read_text())
            records = {name: Record(**one) for name, one in table["exercises"].items()}
            return cls(file, records, dict(table["answers"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(f"{file} is not a progress file ({error}); move it away to begin anew") from None

    def of(self, exercise: str) -> Record:
        return self.exercises.setdefault(exercise, Record())

    def save(self) -> None:
        table = {"exercises": {name: asdict(one) for name, one in self.exercises.items()}, "answers": self.answers}
        write_whole(self.file, json.dumps(table, indent=2) + "\n")


@contextmanager
def change_progress(workspace: Path) -> Iterator[Progress]:
    """Reads, lets the caller change, and writes, one process at a time."""
    folder = workspace / ".learn"
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            progress = Progress.load(workspace)
            yield progress
            progress.save()
    except OSError as error:
        raise OSError(
            error.errno, f"progress is not written: {error.strerror}", str(error.filename or folder)
        ) from None


# --- what a command or the page records ------------------------------------------------------------------


def record_verdict(workspace: Path, verdict: Verdict) -> Progress:
    with change_progress(workspace) as progress:
        record = progress.of(verdict.exercise)
        record.tries += verdict.tried
        if verdict.passed and not record.passed:
            record.passed = datetime.now(UTC).isoformat(timespec="seconds")
    return progress


def take_hint(workspace: Path, exercise: Exercise) -> int:
    """How many of them are seen now: the next one, too."""
    with change_progress(workspace) as progress:
        record = progress.of(exercise.id)
        record.hints = min(record.hints + 1, len(exercise.hints))
    return record.hints


def record_answers(workspace: Path, asked: str, right: list[bool]) -> None:
    """Of the quiz of an exercise or a reading."""
    with change_progress(workspace) as progress:
        progress.answers |= {f"{asked}/{number}": one for number, one in enumerate(right)}
