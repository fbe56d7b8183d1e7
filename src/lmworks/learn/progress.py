"""What the learner has done: .learn/progress.json in the workspace."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ..spec.errors import SpecError
from ..spec.files import write_whole
from . import review
from .checking.verdict import Verdict
from .exercise import Exercise
from .review import Card


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
    cards: dict[str, Card] = field(default_factory=dict)  # what comes back, by its question (review.py)

    @classmethod
    def load(cls, workspace: Path) -> Progress:
        file = workspace / ".learn" / "progress.json"
        if not file.exists():
            return cls(file)
        try:
            table = json.loads(file.read_text())
            records = {name: Record(**one) for name, one in table["exercises"].items()}
            answers = dict(table["answers"])
            missed = {name: Card(review.today()) for name, right in answers.items() if not right}  # of older files
            cards = {name: Card.from_dict(one) for name, one in table.get("cards", {}).items()}
            return cls(file, records, answers, missed | cards)
        except ValueError as error:
            raise SpecError(f"{file} is not a progress file ({error}); move it away to begin anew") from None
        except (KeyError, TypeError, AttributeError):
            raise SpecError(
                f"{file} is not a progress file (it needs tables `exercises` and `answers`, with the keys that "
                "`lmworks learn` writes); move it away to begin anew"
            ) from None

    def of(self, exercise: str) -> Record:
        return self.exercises.setdefault(exercise, Record())

    def due(self) -> list[str]:
        """Names of the cards that are due today."""
        return review.due_names(self.cards, review.today())

    def answer(self, name: str, score: float) -> None:
        """Of a card: the share of it that was known."""
        self.cards[name] = review.after_answer(self.cards.get(name), score, review.today())

    def save(self) -> None:
        table = {
            "exercises": {name: asdict(one) for name, one in self.exercises.items()},
            "answers": self.answers,
            "cards": {name: one.to_dict() for name, one in self.cards.items()},
        }
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
    """Of the quiz of an exercise or a reading. What was missed comes back."""
    with change_progress(workspace) as progress:
        for number, one in enumerate(right):
            name = f"{asked}/{number}"
            progress.answers[name] = one
            if not one or name in progress.cards:
                progress.answer(name, float(one))


def record_scores(workspace: Path, scores: Mapping[str, float]) -> Progress:
    """Of cards of the interview."""
    with change_progress(workspace) as progress:
        for name, score in scores.items():
            progress.answer(name, score)
    return progress
