"""A fact in a long text, asked for at its end: by length and by depth, with distractors of the same form (RULER).

Four kinds: a number among sentences, several numbers of one key, a line of words that is to be copied, and a constant
of a module that another file of the same repository uses.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..problem import Problem
from .format import Format

if TYPE_CHECKING:
    from ..suite import Needles, Suite

FILLER = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.",
)  # fmt: skip
CODE_FILLER = tuple(
    f"# file: {name}.py\ndef {name}(x):\n    return x + {number}\n"
    for number, name in enumerate(("grass", "sky", "sun", "moon", "rain"), 1)
)
KEYS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "islet", "jetty", "knoll", "lagoon",
    "meadow", "north", "oasis", "prairie", "quarry", "river", "summit", "tundra", "upland", "valley", "willow",
)  # fmt: skip
COPIED_WORDS = 5


@dataclass(frozen=True)
class Task:
    """How a fact is said, and asked for."""

    filler: tuple[str, ...]
    between: str
    value: Callable[[random.Random], str]
    fact: str  # of {key}, {KEY} and {value}
    question: str


def number(draw: random.Random) -> str:
    return str(draw.randint(1_000_000, 9_999_999))


TASKS = {
    "number": Task(
        FILLER,
        " ",
        number,
        "The special number of {key} is {value}.",
        "\n\nWhat is the special number of {key}? The special number of {key} is",
    ),
    "numbers": Task(
        FILLER,
        " ",
        number,
        "One of the special numbers of {key} is {value}.",
        "\n\nWhat are all special numbers of {key}? The special numbers of {key} are",
    ),
    "copy": Task(
        FILLER,
        " ",
        lambda draw: " ".join(draw.sample(KEYS, COPIED_WORDS)),
        "The line of {key} reads: {value}.",
        "\n\nRepeat the line of {key}. The line of {key} reads:",
    ),
    "repository": Task(
        CODE_FILLER,
        "\n",
        number,
        "# file: {key}.py\n{KEY}_LIMIT = {value}\n",
        "\n# file: test_{key}.py\nfrom {key} import {KEY}_LIMIT\n\nassert {KEY}_LIMIT ==",
    ),
}


def needles(suite: Suite, limit: int) -> list[Problem]:
    found: list[Problem] = []
    for length in suite.needles.lengths:
        for depth in suite.needles.depths:
            for repeat in range(suite.needles.repeats):
                found.append(haystack(length, depth, repeat, suite.needles))
    return found[: limit or None]


def haystack(length: int, depth: float, repeat: int, asked_for: Needles) -> Problem:
    """The first of the key's values lies at `depth`, its others and other keys anywhere."""
    task = TASKS[asked_for.task]
    draw = random.Random(f"{length} {depth} {asked_for.keys} {repeat}")
    facts = [(key, task.value(draw)) for key in draw.sample(KEYS, asked_for.keys)]
    lines: list[str] = []
    words = 0
    while words < length:
        lines.append(task.filler[len(lines) % len(task.filler)])
        words += len(lines[-1].split())
    asked, value = facts[0]
    values = [value, *(task.value(draw) for _ in range(asked_for.values - 1))]
    for key, other in [*facts[1:], *((asked, other) for other in values[1:])]:
        lines.insert(draw.randint(0, len(lines)), filled(task.fact, key, other))
    lines.insert(round(depth * len(lines)), filled(task.fact, asked, value))
    return Problem(
        id=f"{length}/{depth:g}/{repeat}",
        prompt=task.between.join(lines) + filled(task.question, asked, value),
        answer=value if len(values) == 1 else values,
        group=group_name(length, depth),
    )


def filled(text: str, key: str, value: str) -> str:
    return text.format(key=key, KEY=key.upper(), value=value)


def group_name(length: int, depth: float) -> str:
    return f"{length} words, depth {depth:g}"


def length_and_depth(group: str) -> tuple[int, float]:
    """The inverse of `group_name`."""
    length, _, depth = group.partition(" words, depth ")
    return int(length), float(depth)


NEEDLE = Format(
    "facts hidden in a long text, by length and depth; several keys: all but one distract",
    ("contains",),
    build=needles,
    stop=(".", "\n"),
)
