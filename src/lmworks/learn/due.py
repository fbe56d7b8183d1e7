"""What is to be reviewed today: quiz questions that were missed, interview questions and their calculations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from .exercise import Question
from .interview import questions
from .quizzes import find_quiz, page_of_quiz, quiz_names
from .review import Card, due_names


@dataclass(frozen=True)
class Asked:
    """What a card asks, and where it is answered."""

    kind: str  # quiz, interview or calculation
    id: str
    text: str

    @property
    def command(self) -> str:
        return f"lmworks learn {'quiz' if self.kind == 'quiz' else 'interview'} {self.id}"

    @property
    def page(self) -> str:
        """Of `lmworks learn serve`."""
        if self.kind != "quiz":
            return f"interview/{self.id}"
        return f"{page_of_quiz(self.id)}/{self.id}"


@dataclass(frozen=True)
class Due:
    asked: Asked
    card: Card

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.asked), "command": self.asked.command, **self.card.to_dict()}


def due_today(cards: Mapping[str, Card], day: date) -> list[Due]:
    return [Due(asked, cards[name]) for name in due_names(cards, day) if (asked := asked_by(name, cards))]


def next_day(cards: Mapping[str, Card]) -> date | None:
    """On which the first of the cards is due."""
    return min((card.due for name, card in cards.items() if asked_by(name, cards)), default=None)


def asked_by(name: str, cards: Mapping[str, Card]) -> Asked | None:
    """None where the course does not have it any more."""
    of, _, rest = name.partition("/")
    if of == "interview":
        return open_question(rest, cards)
    quiz = quiz_of(of)
    if not rest.isdecimal() or int(rest) >= len(quiz):
        return None
    return Asked("quiz", of, quiz[int(rest)].question)


def open_question(rest: str, cards: Mapping[str, Card]) -> Asked | None:
    name, _, part = rest.partition("/")
    asked = questions().get(name)
    if asked is None:
        return None
    if not part:
        return Asked("interview", name, asked.question)
    scenario = asked.next_scenario(cards)
    return Asked("calculation", name, scenario.ask) if scenario else None


def quiz_of(name: str) -> tuple[Question, ...]:
    return find_quiz(name).quiz if name in quiz_names() else ()
