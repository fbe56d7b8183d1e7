"""Open questions as data (interview.toml): what a good answer has, follow-ups, and a calculation by the planner."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

from ..spec.errors import SpecError, near_names, suggestion
from .quantity import parse_quantity, show_quantity
from .review import Card, due_names

FILE = Path(__file__).with_name("interview.toml")
TOLERANCE = 0.05  # relative, of an answer to a calculation
# Of a unit: by which factor an answer is off, and what its author mistook.
SLIPS = {
    "bytes": ((8, "Bits are not bytes."), (2**30 / 1e9, "GB or GiB? 1 GiB = 2³⁰ bytes = 1.074 GB.")),
    "share": ((100, "25 is 2,500 %: write 25 % or 0.25."),),
}


@dataclass(frozen=True)
class FollowUp:
    question: str
    answer: str


@dataclass(frozen=True)
class Calculation:
    ask: str  # with the names of drawn parameters in braces, as the formula
    unit: str
    formula: str
    draw: Mapping[str, list[Any]]
    mistakes: Mapping[str, str]  # a known wrong answer → what its author overlooked


@dataclass(frozen=True)
class OpenQuestion:
    id: str
    topic: str
    question: str
    rubric: tuple[str, ...]
    follow_ups: tuple[FollowUp, ...]
    exercises: tuple[str, ...] = ()
    calculation: Calculation | None = None

    @property
    def card(self) -> str:
        return f"interview/{self.id}"

    @property
    def calculation_card(self) -> str:
        return f"{self.card}/calculation"

    def scenario(self, turn: int) -> Scenario | None:
        """The calculation with parameters for this turn, the same ones each time."""
        if self.calculation is None:
            return None
        random = Random(f"{self.id}/{turn}")
        drawn = {name: random.choice(values) for name, values in self.calculation.draw.items()}
        return Scenario(self.id, self.calculation, turn, drawn)

    def next_scenario(self, cards: Mapping[str, Card]) -> Scenario | None:
        card = cards.get(self.calculation_card)
        return self.scenario(card.answers if card else 0)


@dataclass(frozen=True)
class Result:
    right: bool
    expected: float
    words: str
    formula: str
    cause: str = ""  # of a wrong answer that is known


@dataclass(frozen=True)
class Scenario:
    name: str
    calculation: Calculation
    turn: int
    drawn: Mapping[str, Any]

    @property
    def ask(self) -> str:
        return self.calculation.ask.format(**self.drawn)

    def grade(self, text: str) -> Result:
        from .interview_calculations import CALCULATIONS

        asked = self.calculation
        got, found = parse_quantity(text, asked.unit), CALCULATIONS[self.name](**self.drawn)
        formula = asked.formula.format(**self.drawn, **found.facts)
        words = show_quantity(found.expected, asked.unit)
        if is_near(got, found.expected):
            return Result(True, found.expected, words, formula)
        known = [name for name, value in found.wrong.items() if is_near(got, value)]
        closest = min(known, key=lambda name: abs(got - found.wrong[name]), default="")
        cause = asked.mistakes[closest] if closest else slip(got / found.expected, asked.unit)
        return Result(False, found.expected, words, formula, cause)


def is_near(got: float, expected: float) -> bool:
    return abs(got - expected) <= TOLERANCE * abs(expected)


def slip(ratio: float, unit: str) -> str:
    """What was mistaken, by how far off an answer is."""
    known = SLIPS.get(unit, ())
    return next((words for factor, words in known if is_near(ratio, factor) or is_near(ratio * factor, 1)), "")


# --- the questions ---------------------------------------------------------------------------------------


@functools.cache
def questions() -> dict[str, OpenQuestion]:
    return {table["id"]: question_of(table) for table in tomllib.loads(FILE.read_text())["questions"]}


def question_of(table: dict[str, Any]) -> OpenQuestion:
    own = {
        "rubric": tuple(table["rubric"]),
        "follow_ups": tuple(FollowUp(**one) for one in table["follow_ups"]),
        "exercises": tuple(table.get("exercises", ())),
        "calculation": Calculation(**table["calculation"]) if "calculation" in table else None,
    }
    return OpenQuestion(**{**table, **own})


def find_question(name: str) -> OpenQuestion:
    if name in questions():
        return questions()[name]
    near = suggestion(near_names(name, list(questions())))
    raise SpecError(f"no question {name!r}{near}; `lmworks learn interview --list` has them all")


def next_question(cards: Mapping[str, Card], day: date) -> OpenQuestion | None:
    """The one that is due for longest, else the first that was never answered."""
    by_card = {name: one for one in questions().values() for name in (one.card, one.calculation_card)}
    due = (by_card[name] for name in due_names(cards, day) if name in by_card)
    new = (one for one in questions().values() if one.card not in cards)
    return next(due, None) or next(new, None)


def score_of(question: OpenQuestion, said: Iterable[int]) -> float:
    """The share of the rubric's points that were made; points count from 1, and 0 stands for none."""
    made = set(said)
    if wrong := sorted(made - set(range(len(question.rubric) + 1))):
        raise SpecError(
            f"--said {wrong[0]}: the points of {question.id} are 1 to {len(question.rubric)}; 0 is none of them"
        )
    return len(made - {0}) / len(question.rubric)
