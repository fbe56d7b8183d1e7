"""Validation of the JSON of a checkpoint.

A digest shows that bytes are those that were hashed, not that they are valid: who can write a checkpoint can hash it,
too. So type and range of every field are checked before it is used as a size, an address or a name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Never

from ...spec import CheckpointError


class DamagedError(CheckpointError):
    """A checkpoint that cannot be used; an older one may be."""


def json_object(text: bytes, path: Path | str) -> dict[str, Any]:
    """The JSON object of a file, without duplicate keys."""
    try:
        found = json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        malformed(path, "its JSON is nested too deeply")
    except ValueError as error:  # no JSON, no UTF-8, a key twice, a number of thousands of digits
        malformed(path, f"it cannot be read as JSON ({error})")
    if not isinstance(found, dict):
        malformed(path, f"it holds {short_repr(found)} instead of a JSON object")
    return found


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.80} comes twice")
    return table


def expect(true: bool, path: Path | str, what: str) -> None:
    if not true:
        malformed(path, what)


def malformed(path: Path | str, what: str) -> Never:
    raise DamagedError(f"{path} is malformed: {what}")


def is_int(value: object, least: int = 0) -> bool:
    """An integer; JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def short_repr(value: object) -> str:
    """At most 80 characters."""
    return f"{value!r:.80}"
