"""Problems of a suite: rows read, fields checked, solved examples put in front."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from ..spec.errors import DataError, SpecError
from .formats import FORMATS
from .formats.format import CHOOSE, HELD_OUT, SCORE, Format
from .problem import Problem
from .rows import field_of, read_rows
from .suite import Suite


def load_problems(suite: Suite, limit: int = 0) -> list[Problem]:
    """The first `limit` of them (0: all)."""
    format = FORMATS[suite.format]
    if format.task == HELD_OUT:
        return []
    if format.read is None:
        assert format.build is not None
        if format.task == SCORE and not suite.data:
            raise SpecError(f"suite {suite.name}: no data; give --data FILE")
        found = format.build(suite, limit)
    else:
        found = with_shots(suite, format, list(islice(read_problems(suite, format), limit or None)))
    if not found:
        raise DataError(f"suite {suite.name}: {suite.data or 'its data'} holds no problems")
    check_problems(suite, found)
    return found


def read_problems(suite: Suite, format: Format, source: str = "") -> Iterator[Problem]:
    assert format.read is not None
    if not (source or suite.data):
        raise SpecError(f"suite {suite.name}: no data; give --data FILE")
    for place, row in read_rows(source or suite.data):
        known = renamed(suite, row)
        for name in format.fields:
            field_of(known, name, place)
        try:
            problem = format.read(known, place, suite)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{place} does not fit format {suite.format!r}: {type(error).__name__} {error}") from None
        check_texts(problem, place)
        yield problem


def check_texts(problem: Problem, place: str) -> None:
    for name in ("prompt", "suffix", "before", "after", "tests"):
        value = getattr(problem, name)
        if not isinstance(value, str | None):
            raise DataError(f"{place}: {name} is {str(value)[:60]!r} ({type(value).__name__}), and has to be a text")


def renamed(suite: Suite, row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **{ours: row[theirs] for ours, theirs in suite.fields.items() if theirs in row}}


def with_shots(suite: Suite, format: Format, problems: list[Problem]) -> list[Problem]:
    """Solved examples in front of each prompt: the first rows of `shots_data`."""
    if not suite.shots:
        return problems
    if not suite.shots_data:
        raise SpecError(f"suite {suite.name}: shots = {suite.shots} needs shots_data, a file of solved examples")
    solved = list(islice(read_problems(suite, format, suite.shots_data), suite.shots))
    if len(solved) < suite.shots:
        raise DataError(f"suite {suite.name}: shots_data = {suite.shots_data!r} holds {len(solved)} of {suite.shots}")
    gap = " " if format.task != CHOOSE else ""
    shown = "".join(f"{one.prompt}{gap}{one.answer}\n\n" for one in solved)
    return [replace(one, prompt=shown + one.prompt) for one in problems]


def check_problems(suite: Suite, problems: list[Problem]) -> None:
    seen: set[str] = set()
    for one in problems:
        if one.id in seen:
            raise DataError(f"suite {suite.name}: two problems are called {one.id!r}")
        seen.add(one.id)
    if suite.metrics[0] == "pass" and not any(one.tests.strip() or one.cases for one in problems):
        raise DataError(f"suite {suite.name}: its problems hold no tests; metrics = ['exact'] compares texts instead")
