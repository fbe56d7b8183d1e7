"""A fact in a long text, asked for at its end: by length and by depth, with distractors of the same form (RULER)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ..problem import Problem
from .format import Format

if TYPE_CHECKING:
    from ..suite import Suite

FILLER = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.",
)  # fmt: skip
KEYS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "islet", "jetty", "knoll", "lagoon",
    "meadow", "north", "oasis", "prairie", "quarry", "river", "summit", "tundra", "upland", "valley", "willow",
)  # fmt: skip


def needles(suite: Suite, limit: int) -> list[Problem]:
    found: list[Problem] = []
    for length in suite.needles.lengths:
        for depth in suite.needles.depths:
            for repeat in range(suite.needles.repeats):
                found.append(haystack(length, depth, suite.needles.keys, repeat))
    return found[: limit or None]


def haystack(length: int, depth: float, keys: int, repeat: int) -> Problem:
    draw = random.Random(f"{length} {depth} {keys} {repeat}")
    facts = [(key, str(draw.randint(1_000_000, 9_999_999))) for key in draw.sample(KEYS, keys)]
    lines: list[str] = []
    words = 0
    while words < length:
        lines.append(FILLER[len(lines) % len(FILLER)])
        words += len(lines[-1].split())
    asked, number = facts[0]
    for key, value in facts[1:]:
        lines.insert(draw.randint(0, len(lines)), sentence(key, value))
    lines.insert(round(depth * len(lines)), sentence(asked, number))
    text = " ".join(lines)
    return Problem(
        id=f"{length}/{depth:g}/{repeat}",
        prompt=f"{text}\n\nWhat is the special number of {asked}? The special number of {asked} is",
        answer=number,
        group=f"{length} words, depth {depth:g}",
    )


def sentence(key: str, value: str) -> str:
    return f"The special number of {key} is {value}."


NEEDLE = Format(
    "numbers hidden in a long text, by length and depth; several keys: all but one distract",
    ("contains",),
    build=needles,
    stop=(".", "\n"),
)
