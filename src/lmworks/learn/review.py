"""Spaced repetition by Leitner's boxes (S. Leitner, So lernt man lernen, 1972).

A card that is known moves up a box, one that is missed goes back to the first. A card of box n comes back after
2^(n − 1) days. An answer counts as known only on a day on which the card is due: what was read a moment ago is no sign
of memory. What is missed counts at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

DAYS = (1, 2, 4, 8, 16)  # after which a card of each box is due again
KNOWN, PARTIAL = 0.8, 0.5  # shares of what was asked: from KNOWN on a box up, from PARTIAL on it stays in its box


@dataclass(frozen=True)
class Card:
    """Of a quiz question, an interview question or its calculation."""

    due: date
    box: int = 1
    answers: int = 0  # which parameters of a calculation are drawn next

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Card:
        return cls(date.fromisoformat(table["due"]), min(max(1, int(table["box"])), len(DAYS)), int(table["answers"]))

    def to_dict(self) -> dict[str, Any]:
        return {"due": self.due.isoformat(), "box": self.box, "answers": self.answers}

    @property
    def text(self) -> str:
        return f"Box {self.box} of {len(DAYS)}; it comes back on {self.due}."


def today() -> date:
    return date.today()


def after_answer(card: Card | None, score: float, day: date) -> Card:
    """`card`: None where it is the first answer."""
    card = card or Card(day)
    answers = card.answers + 1
    if score < PARTIAL:
        return Card(day + timedelta(DAYS[0]), 1, answers)
    if day < card.due:
        return Card(card.due, card.box, answers)
    box = min(card.box + (score >= KNOWN), len(DAYS))
    return Card(day + timedelta(DAYS[box - 1]), box, answers)


def due_names(cards: Mapping[str, Card], day: date) -> list[str]:
    """Of cards that are due, longest first."""
    return sorted((name for name, card in cards.items() if card.due <= day), key=lambda name: cards[name].due)
