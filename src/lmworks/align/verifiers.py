"""Built-in rewards: verifiable answers, formats and lengths. Each documents the columns that it reads.

A sample whose column is null or missing gets None: no opinion. An answer, schema or test that cannot be read is an
error in the data, and raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ..spec.errors import SpecError
from .answers import Readings, completion_text, final_number, last_code, marked_answer, normalized, numbers_in
from .unit_tests import unit_tests

Completions = Sequence[Any]


def exact(completions: Completions, answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the marked answer, or the whole text without one, is `answer` (one text, or a list of those that count)
    after both are normalized: case, spaces, quotes, a final full stop."""
    return [
        None if gold is None else float(matches(completion_text(completion), gold))
        for completion, gold in zip(completions, answer, strict=True)
    ]


def matches(text: str, gold: Any) -> bool:
    marked = marked_answer(text)
    said = normalized(text if marked is None else marked)
    return any(said == normalized(str(one)) for one in (gold if isinstance(gold, list) else [gold]))


def numeric(
    completions: Completions, answer: Sequence[Any], *, tolerance: float = 1e-6, **columns: Any
) -> list[float | None]:
    """1 where the final number is `answer` (a number, or a text that holds one) within a relative `tolerance`."""
    return [
        None if gold is None else float(equal(final_number(completion_text(completion)), gold_number(gold), tolerance))
        for completion, gold in zip(completions, answer, strict=True)
    ]


def gold_number(gold: Any) -> Readings:
    if isinstance(gold, int | float):
        return (Fraction(str(gold)),)
    found = [readings for readings, _ in numbers_in(str(gold))]
    readings = final_number(str(gold)) if marked_answer(str(gold)) else found[0] if len(found) == 1 else ()
    if not readings:
        raise ValueError(f"answer {gold!r:.60} holds no single number")
    return readings


def equal(said: Readings, gold: Readings, tolerance: float) -> bool:
    return any(abs(one - other) <= Fraction(tolerance) * abs(other) for one in said for other in gold)


def json_schema(completions: Completions, schema: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the last code block, or the whole text without one, is JSON that `schema` (object or text) allows."""
    return [
        None if one is None else float(allows(one, completion_text(completion)))
        for completion, one in zip(completions, schema, strict=True)
    ]


def allows(schema: Any, text: str) -> bool:
    try:
        import jsonschema
        import referencing
    except ImportError:
        raise SpecError("align.rewards = 'json_schema' needs jsonschema: pip install 'lmworks[rewards]'") from None
    schema = json.loads(schema) if isinstance(schema, str) else schema
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    block = last_code(text)
    try:
        value = json.loads(text if block is None else block, parse_constant=refuse_constant)
        return kind(schema, registry=referencing.Registry()).is_valid(value)  # fetches nothing from a network
    except (ValueError, RecursionError):
        return False


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def format_pattern(completions: Completions, pattern: Sequence[Any] | str = "", **columns: Any) -> list[float | None]:
    """1 where the whole text matches the regular expression `pattern` (column or argument); '.' matches newlines."""
    patterns = [pattern] * len(completions) if isinstance(pattern, str) else pattern
    return [
        None if not one else float(re.fullmatch(one, completion_text(completion), re.DOTALL) is not None)
        for completion, one in zip(completions, patterns, strict=True)
    ]


def length(completions: Completions, *, words: int, **columns: Any) -> list[float | None]:
    """1 up to that many `words`, then falling, 0 from twice as many on."""
    counts = [len(completion_text(completion).split()) for completion in completions]
    return [min(1.0, max(0.0, 2.0 - count / words)) for count in counts]


VERIFIERS: Mapping[str, Callable[..., list[float | None]]] = {
    "exact": exact,
    "numeric": numeric,
    "json_schema": json_schema,
    "unit_tests": unit_tests,
    "format": format_pattern,
    "length": length,
}
