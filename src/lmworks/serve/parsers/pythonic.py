"""Llama 3.2 and 4: an answer that is a list of Python calls, `[f(city="Rome"), g(n=3)]`.

A call is passed on when it is complete, as its arguments have to be read as Python. `<|python_start|>` and
`<|python_end|>` may stand around the list.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from .base import Arguments, Call, Parser, Steps

START, END = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"[A-Za-z_][\w.]*\Z")
QUOTE, BRACKET = re.compile(r"""["'\\]"""), re.compile(r"""["'()\[\]{}]""")
MAX_DEPTH = 64  # of brackets: Python's own parser recurses


class PythonicParser(Parser):
    special = True

    def run(self) -> Steps[None]:
        self.hold("")
        yield from self.blanks()
        if (yield from self.literal(START)):
            yield from self.blanks()
        if (yield from self.literal("[")):
            while (yield from self.call()):
                self.hold("")
                yield from self.blanks()
                if (yield from self.literal("]")):
                    self.settle()
                    yield from self.blanks()
                    yield from self.literal(END)
                    break
                yield from self.literal(",")
                yield from self.blanks()
        self.give_up()
        yield from self.text_until()

    def call(self) -> Steps[bool]:
        """False: it is none; what was taken is held."""
        name = yield from self.short_text("(")
        if name is None or not NAME.match(name[0].strip()):
            return False
        text = yield from self.parenthesis()
        arguments = None if text is None else keywords(text)
        if arguments is None:
            return False
        self.settle()
        self.emit(Call(name[0].strip()))
        self.emit(Arguments(arguments))
        return True

    def parenthesis(self) -> Steps[str | None]:
        """Takes the text up to the parenthesis that closes; None: it does not, or is nested too deep."""
        parts: list[str] = []
        depth, quote = 1, ""
        while depth:
            found = (QUOTE if quote else BRACKET).search(self.buffer, self.at)
            escape = found is not None and found[0] == "\\"
            if found is None or (escape and found.end() == len(self.buffer)):
                parts.append(self.take(found.start() if found else len(self.buffer)))
                if not (yield from self.more()):
                    return None
                continue
            parts.append(self.take(found.end() + escape))
            if quote:
                quote = "" if found[0] == quote else quote
            elif found[0] in "\"'":
                quote = found[0]
            else:
                depth += 1 if found[0] in "([{" else -1
            if depth > MAX_DEPTH:
                return None
        return "".join(parts)[:-1]


def keywords(text: str) -> str | None:
    """Keyword arguments as JSON; None: they are not literals."""
    try:
        called = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(called, ast.Call) or called.args:
            return None
        found: dict[str, Any] = {str(each.arg): ast.literal_eval(each.value) for each in called.keywords if each.arg}
        return None if len(found) < len(called.keywords) else json.dumps(found, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
