"""Calls that are JSON: `{"name": …, "arguments": {…}}`, with their arguments passed on while they come.

The scanner finds where a value ends; it does not judge it. Arguments that are not JSON are passed on as they are, as
OpenAI's API does: a client checks them anyway.
"""

from __future__ import annotations

import json
import re

from .base import Arguments, Call, Parser, Steps

ARGUMENTS = ("arguments", "parameters")
IN_STRING, BETWEEN, SCALAR_END = re.compile(r'["\\]'), re.compile(r'["\[\]{}]'), re.compile(r"[\s,\]}]")


class JSONCallParser(Parser):
    """What parsers of JSON calls have in common."""

    def json_call(self) -> Steps[bool]:
        """Takes an object that is a call. False: it is none; what was taken is held, and nothing was emitted."""
        if not (yield from self.literal("{")):
            return False
        name: str | None = None
        arguments: str | None = None
        begun = False
        while True:
            yield from self.blanks()
            if (yield from self.literal("}")):
                break
            key = yield from self.string()
            yield from self.blanks()
            if key is None or not (yield from self.literal(":")):
                return begun
            yield from self.blanks()
            if key == "name" and not begun:
                name = yield from self.string()
                if not name:
                    return False
            elif key in ARGUMENTS and name is not None and not begun:
                self.begin(name)
                begun = True
                yield from self.arguments()
            else:
                value = yield from self.value()
                arguments = value if key in ARGUMENTS else arguments
            yield from self.blanks()
            yield from self.literal(",")
        if not begun and name is not None:
            self.begin(name)
            self.emit(Arguments(plain(arguments)))
        return begun or name is not None

    def begin(self, name: str) -> None:
        self.settle()
        self.emit(Call(name))

    def arguments(self) -> Steps[None]:
        """Of a call that was emitted: an object as it comes, anything else (a string of JSON, null) when complete."""
        if (yield from self.peek()) == "{":
            yield from self.value(show=True)
        else:
            self.emit(Arguments(plain((yield from self.value()))))

    def string(self) -> Steps[str | None]:
        """Takes a string, and returns its value. None: there is none."""
        if (yield from self.peek()) != '"':
            return None
        text = yield from self.value()
        try:
            found = json.loads(text, strict=False)
        except ValueError:
            return None
        return found if isinstance(found, str) else None

    def value(self, show: bool = False) -> Steps[str]:
        """Takes a value up to its end. `show`: emits it as arguments as it comes, and returns nothing."""
        parts: list[str] = []
        depth, quoted = 0, False

        def through(end: int) -> None:
            taken = self.take(end)
            if show:
                self.emit(Arguments(taken))
            else:
                parts.append(taken)

        if (yield from self.peek()) not in ("{", "[", '"'):
            while (found := SCALAR_END.search(self.buffer, self.at)) is None:
                through(len(self.buffer))
                if not (yield from self.more()):
                    break
            through(found.start() if found else len(self.buffer))
            return "".join(parts)
        while True:
            found = (IN_STRING if quoted else BETWEEN).search(self.buffer, self.at)
            escape = found is not None and found[0] == "\\"
            if found is None or (escape and found.end() == len(self.buffer)):
                through(found.start() if found else len(self.buffer))
                if not (yield from self.more()):
                    through(len(self.buffer))
                    return "".join(parts)
                continue
            through(found.end() + escape)
            if found[0] == '"':
                quoted = not quoted
            elif not escape:
                depth += 1 if found[0] in "[{" else -1
            if not quoted and depth <= 0:
                return "".join(parts)


def plain(arguments: str | None) -> str:
    """Arguments that are a string of JSON, or left out."""
    if arguments is None or arguments.strip() in ("", "null"):
        return "{}"
    if not arguments.startswith('"'):
        return arguments
    try:
        return str(json.loads(arguments, strict=False))
    except ValueError:
        return arguments
