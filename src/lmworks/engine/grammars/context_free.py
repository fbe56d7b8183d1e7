"""Grammars beyond schemas and regexes, as llguidance reads them (Lark): context-free ones, and structural tags.

A structural tag is free text in which certain strings (triggers) begin a tag, whose content fits a JSON schema:

    {"type": "structural_tag", "triggers": ["<function="],
     "structures": [{"begin": "<function=add>", "schema": {…}, "end": "</function>"}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...spec import SpecError
from .schemas import SCHEMA_OPTIONS, check_text, checked_schema, read_object
from .token_bytes import import_llguidance

MAX_TAGS = 64
TAG = "structural_tag"


def as_lark(grammar: str) -> str:
    """Lark as it is, and EBNF as llama.cpp and xgrammar write it (`root ::= …`) in Lark."""
    check_text("grammar", grammar)
    import_llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the library raises several kinds
        raise SpecError(
            f"grammar is neither Lark nor EBNF (root ::= …): {' '.join(str(error).split())[:200]}"
        ) from None


def tag_grammar(tag: Mapping[str, Any] | str) -> str:
    """Triggers are text: a special token is not part of an answer."""
    given = read_object(TAG, tag)
    if unknown := given.keys() - {"type", "structures", "triggers"}:
        raise SpecError(f"{TAG}: {min(map(str, unknown))!r:.40} is not known: give structures and triggers")
    triggers: Any = given.get("triggers")
    structures: Any = given.get("structures")
    if not isinstance(triggers, list | tuple) or not all(isinstance(each, str) and each for each in triggers):
        raise SpecError(f"{TAG}: triggers must be a list of texts, none of them empty")
    if not isinstance(structures, list | tuple) or not 0 < len(structures) <= MAX_TAGS:
        raise SpecError(f"{TAG}: structures must be a list of 1 to {MAX_TAGS} tags")
    tags = [one_tag(each, triggers) for each in structures]
    return str(import_llguidance().StructTag.to_grammar(tags, assume_special=False))


def one_tag(structure: Any, triggers: Sequence[str]) -> Any:
    if not isinstance(structure, Mapping) or structure.keys() != {"begin", "schema", "end"}:
        raise SpecError(f"{TAG}: a structure has begin, schema and end")
    begin, end = structure["begin"], structure["end"]
    if not isinstance(begin, str) or not isinstance(end, str):
        raise SpecError(f"{TAG}: begin and end of a structure are texts")
    check_text(TAG, begin + end)
    trigger = next((each for each in triggers if begin.startswith(each)), None)
    if trigger is None:
        raise SpecError(f"{TAG}: begin = {begin!r:.60} starts with none of the triggers")
    schema = json.loads(checked_schema(structure["schema"]))
    return import_llguidance().StructTag(
        trigger=trigger, begin=begin, grammar=schema | {"x-guidance": SCHEMA_OPTIONS}, end=end
    )
