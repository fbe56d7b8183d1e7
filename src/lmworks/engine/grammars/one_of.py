"""oneOf in JSON schemas: exactly one alternative matches.

An answer is written token by token, and only its end shows whether a second alternative matches too. So oneOf is served
where its alternatives exclude each other, and is then the same as anyOf; one whose alternatives may overlap is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from ...spec import SpecError

MAX_PAIRS = 4096  # of alternatives in one schema
MAX_REFERENCES = 16  # that follow one another
TYPES = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}


def check_one_of(root: Mapping[str, Any]) -> None:
    """Raises SpecError for alternatives that are not known to exclude each other."""
    pairs = 0
    for alternatives in one_ofs(root):
        pairs += len(alternatives) * (len(alternatives) - 1) // 2
        if pairs > MAX_PAIRS:
            raise SpecError(f"json_schema: oneOf has more than {MAX_PAIRS} pairs of alternatives: use anyOf")
        for (i, one), (j, other) in combinations(enumerate(alternatives), 2):
            if not disjoint(resolved(one, root), resolved(other, root), root):
                raise SpecError(
                    f"json_schema: alternatives {i} and {j} of a oneOf may both match, which cannot be ruled out while "
                    "an answer is written: use anyOf, or alternatives that differ in type, in a constant, or in a "
                    "required property"
                )


def one_ofs(root: Any) -> Iterator[list[Any]]:
    """All lists of alternatives, without recursion. Where a value is data and not a schema, none is meant."""
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(part.get("oneOf"), list):
                yield part["oneOf"]
            waiting += [value for name, value in part.items() if name not in ("const", "enum", "default", "examples")]
        elif isinstance(part, list):
            waiting += part


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a local reference stands for; others, and endless ones, stand for anything."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        path = schema["$ref"]
        if not isinstance(path, str) or not path.startswith("#"):
            return {}
        schema = root
        for name in path[1:].split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name, {}) if isinstance(schema, Mapping) else {}
    return {}


def disjoint(one: Any, other: Any, root: Mapping[str, Any]) -> bool:
    """Whether no value matches both: by their types, their constants, or by a property that tells them apart."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one is False or other is False
    if types_of(one).isdisjoint(types_of(other)):
        return True
    first, second = constants(one), constants(other)
    if first is not None and second is not None:
        return first.isdisjoint(second)
    if types_of(one) & types_of(other) != {"object"}:
        return False
    return any(tells_apart(name, one, other, root) for name in required(one) | required(other))


def tells_apart(name: str, one: dict[str, Any], other: dict[str, Any], root: Mapping[str, Any]) -> bool:
    """A property that both require with different values, or that one requires and the other does not allow."""
    if name in required(one) and name in required(other):
        mine, theirs = (resolved(properties(each).get(name, {}), root) for each in (one, other))
        first, second = constants(mine), constants(theirs)
        if first is not None and second is not None and first.isdisjoint(second):
            return True
        if types_of(mine).isdisjoint(types_of(theirs)):
            return True
    lacking = other if name in required(one) else one
    return (
        lacking.get("additionalProperties") is False
        and name not in properties(lacking)
        and not lacking.get("patternProperties")
    )


def types_of(schema: Any) -> set[str]:
    """The types of JSON that may match. A whole number is a number too."""
    every = {"null", "boolean", "string", "array", "object", "integer", "fraction"}
    if not isinstance(schema, dict):
        return every
    if (values := constants(schema)) is not None:
        return {type_of(json.loads(value)) for value in values}
    named = schema.get("type")
    names = {named} if isinstance(named, str) else {each for each in named or () if isinstance(each, str)}
    if "number" in names:
        names |= {"integer", "fraction"}
    return names & every if names else every


def type_of(value: Any) -> str:
    for name, kind in TYPES.items():
        if isinstance(value, kind):
            return name
    return "integer" if value == int(value) else "fraction"


def constants(schema: Any) -> set[str] | None:
    """The only values that match, as JSON; None: they are not listed."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(normal(value), sort_keys=True) for value in values}


def normal(value: Any) -> Any:
    """1.0 is the same number as 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def required(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def properties(schema: dict[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}
