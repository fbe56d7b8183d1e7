"""`samples.jsonl`: a few answers of about a hundred rounds of an online method, with their rewards.

    {"round": 0, "step": 1, "answers": [{"prompt": …, "answer": …, "reward": 0.5, "rewards": {…}, …}]}

A round that is sampled again after a rewind or a resume is written again: its last line counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from .jsonl import read_lines

MOST_ROUNDS = 100  # with samples, about


class Sample(TypedDict):
    """One answer. Texts are what the model has seen and written: never trust them, least of all as HTML."""

    prompt: str
    answer: str
    reward: float | None  # None: no reward function has an opinion
    rewards: dict[str, float]  # by source
    tokens: int
    ended: bool  # by end-of-text, not by its length


def has_samples(number: int, rounds: int) -> bool:
    """Whether samples of round `number` are kept, in a run of so many rounds: the first, the last, and some between."""
    return number % max(1, rounds // MOST_ROUNDS) == 0 or number == rounds - 1


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The rounds in order, each once."""
    return [line for _, line in sorted({line["round"]: line for line in read_lines(path)}.items())]


def spread(rounds: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The first, the last, and as many between as make `count`."""
    if len(rounds) <= count:
        return list(rounds)
    return [rounds[round(index * (len(rounds) - 1) / (count - 1))] for index in range(count)]


def by_source(sample: Mapping[str, Any]) -> str:
    """Rewards of an answer as text, e.g. 'exact 1, format 0.2'."""
    found = sample["rewards"].items()
    numbers = {name: value if isinstance(value, str) else f"{value:.3g}" for name, value in found}  # "nan" is a word
    return ", ".join(f"{short_source(name)} {number}" for name, number in numbers.items())


def short_source(name: str) -> str:
    """A function of a file without the folders before it."""
    return name.rpartition("/")[2] or name


def printable(text: str) -> str:
    """What a model wrote must not move the cursor, colour the terminal or turn the direction of text around."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)
