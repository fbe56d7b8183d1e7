"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

Values are plain text: what type they have is said by the function's schema. Texts are passed on as they come, other
values when they are complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .base import Arguments, Call, Parser, Steps, Text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of each function, by its name


class Qwen3CoderParser(Parser):
    def __init__(self, schemas: Schemas) -> None:
        self.schemas = schemas
        super().__init__()

    def run(self) -> Steps[None]:
        while found := (yield from self.text_until(OPEN, FUNCTION)):
            self.hold(found)
            if found == OPEN:
                yield from self.blanks()
            name = None
            if found == FUNCTION or (yield from self.literal(FUNCTION)):
                name = yield from self.short_text(">")
            if name is None or not name[0].strip():
                self.give_up()
                continue
            self.settle()
            yield from self.call(name[0].strip())
            yield from self.blanks()
            if (yield from self.literal(CLOSE)):
                yield from self.blanks("\n")

    def call(self, name: str) -> Steps[None]:
        """What breaks off stays open: arguments that look complete might be used."""
        self.emit(Call(name))
        self.emit(Arguments("{"))
        properties, between = self.schemas.get(name, {}).get("properties"), ""
        while True:
            yield from self.blanks()
            if not (yield from self.literal(PARAMETER)):
                break
            key = yield from self.short_text(">")
            if key is None:
                self.emit(Text(PARAMETER))
                break
            schema = properties.get(key[0].strip()) if isinstance(properties, Mapping) else None
            self.emit(Arguments(f"{between}{json.dumps(key[0].strip(), ensure_ascii=False)}: "))
            if not (yield from self.parameter(types_of(schema))):
                return
            between = ", "
        if (yield from self.text_until(FUNCTION_END)):
            self.emit(Arguments("}"))

    def parameter(self, types: set[str]) -> Steps[bool]:
        """Whether it has an end. A newline after the opening and one before the closing marker are not part of it."""
        yield from self.literal("\n")
        as_text = not types or types == {"string"}
        if as_text:
            self.emit(Arguments('"'))
        parts: list[str] = []
        closed = False
        while not closed:
            place = self.buffer.find(PARAMETER_END, self.at)
            closed = place >= 0
            if closed:
                parts.append(self.take(place).removesuffix("\n"))
                self.take(place + len(PARAMETER_END))
            else:  # a newline and a part of the marker may be there
                keep = 0 if self.ended else len(PARAMETER_END)
                parts.append(self.take(max(self.at, len(self.buffer) - keep)))
            if as_text:
                self.emit(Arguments(json.dumps(parts.pop(), ensure_ascii=False)[1:-1]))
            if not closed and not (yield from self.more()):
                break
        if as_text:
            self.emit(Arguments('"' if closed else ""))
        else:
            value = "".join(parts)
            self.emit(Arguments(json.dumps(converted(value, types), ensure_ascii=False) if closed else value))
        return closed


def types_of(schema: Any) -> set[str]:
    """Of a parameter; none: unknown."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else {each for each in given or () if isinstance(each, str)}
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        found |= {one for each in (options if isinstance(options, list) else ()) for one in types_of(each)}
    return found


def converted(value: str, types: set[str]) -> Any:
    """A value that is no text as the schema has it; text where it is not JSON."""
    if "string" in types:
        return None if value == "null" and "null" in types else value
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except (ValueError, RecursionError):
        return value
