"""JSON schemas for structured output, checked before they are compiled: size, depth, definitions, oneOf."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...spec import SpecError
from .one_of import check_one_of

MAX_TEXT = 64 * 1024  # characters of a schema, a regex, a grammar, or all choices together
MAX_NESTING = 48  # levels of a schema; the library's own recursion is safe below 128
MAX_OPTIONAL = 256  # optional properties of one object: work grows with their square
SCHEMA_OPTIONS = {
    "whitespace_flexible": True,
    # Between two parts of a JSON text. With more, a model may fill its answer with blanks.
    "whitespace_pattern": r"[\x20\x0A]",
    "lenient": False,
    # Alternatives of oneOf that exclude each other are the same as those of anyOf; others are refused.
    "coerce_one_of": True,
}


def check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise SpecError(f"{name} must be text, not {type(text).__name__}")
    if len(text) > MAX_TEXT:
        raise SpecError(f"{name} has {len(text):,} characters: at most {MAX_TEXT:,} are compiled")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise SpecError(f"{name} holds half of a surrogate pair: it is not Unicode text")


def read_object(name: str, given: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """An object, or the text of one, whose size and depth are checked before it is parsed."""
    found: Any = given
    if isinstance(given, str):
        check_text(name, given)
        if text_depth(given) > MAX_NESTING:
            raise SpecError(f"{name} is nested more than {MAX_NESTING} levels deep")
        try:
            found = json.loads(given)
        except ValueError as error:
            raise SpecError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise SpecError(f"{name} must be an object, not {type(found).__name__}")
    return found


def checked_schema(schema: Mapping[str, Any] | str) -> str:
    """The schema as text, after limits on its size and depth were checked, and its oneOf."""
    schema = read_object("json_schema", schema)
    for part in parts(schema):
        if part is schema or "$id" in part:  # elsewhere it may be the name of a property
            check_definitions(part)
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, Mapping):
            needed = {each for each in required if isinstance(each, str)} if isinstance(required, list | tuple) else ()
            optional = len(properties.keys() - needed)
            if optional > MAX_OPTIONAL:
                raise SpecError(f"json_schema has an object of {optional} optional properties: {MAX_OPTIONAL} at most")
    try:
        text = json.dumps(schema, default=dict)
    except (TypeError, ValueError) as error:
        raise SpecError(f"json_schema cannot be written as JSON: {error}") from None
    check_text("json_schema", text)
    check_one_of(json.loads(text))
    return text


def check_definitions(schema: Mapping[str, Any]) -> None:
    """The library ignores malformed definitions, and reports them only where one is referenced."""
    for name in ("$defs", "definitions"):
        if not isinstance(found := schema.get(name, {}), Mapping):
            raise SpecError(f"json_schema: {name} must be an object, not {type(found).__name__}")


def text_depth(text: str) -> int:
    """Deepest nesting of brackets outside strings, counted before a recursive parser reads the text."""
    depth = deepest = 0
    # An unterminated string extends to the end of the text: linear time.
    for found in re.finditer(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', text, re.DOTALL):
        step = {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        depth += step
        deepest = max(deepest, depth)
    return deepest


def parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All objects of a schema, without recursion; raises if it is nested too deep (or cyclic) or has too many parts."""
    layer, seen = [schema], 0
    for _ in range(MAX_NESTING + 1):
        layer = [each for each in layer if isinstance(each, Mapping | list | tuple)]
        seen += len(layer)
        if seen > MAX_TEXT:
            raise SpecError(f"json_schema has more than {MAX_TEXT:,} parts")
        yield from (each for each in layer if isinstance(each, Mapping))
        layer = [inner for each in layer for inner in (each.values() if isinstance(each, Mapping) else each)]
        if not layer:
            return
    if any(isinstance(each, Mapping | list | tuple) for each in layer):
        raise SpecError(f"json_schema is nested more than {MAX_NESTING} levels deep")
