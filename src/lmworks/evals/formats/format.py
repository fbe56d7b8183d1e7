"""What a format is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..problem import Problem

if TYPE_CHECKING:
    from ..suite import Suite

GENERATE, CHOOSE, SCORE, HELD_OUT = "generate", "choose", "score", "held-out loss"


@dataclass(frozen=True)
class Format:
    about: str
    metrics: Sequence[str]
    fields: Sequence[str] = ()  # that every row has
    read: Callable[[dict[str, Any], str, Suite], Problem] | None = None  # row, its place, suite
    build: Callable[[Suite, int], list[Problem]] | None = None  # not row by row; at most so many (0: all)
    stop: Sequence[str] = ()  # texts that end an answer
    task: str = GENERATE  # what the model is asked for
    gold: Callable[[dict[str, Any]], str] | None = None  # what a solved example adds to its prompt


def filled(template: str, own: str, row: dict[str, Any]) -> str:
    """A suite's template, where it has one. Braces in the data are not read again."""
    if not template:
        return own
    for name, value in {**row, "prompt": own}.items():
        template = template.replace(f"{{{name}}}", str(value))
    return template
