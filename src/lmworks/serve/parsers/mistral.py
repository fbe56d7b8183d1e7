"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since 2025 `[TOOL_CALLS]name[ARGS]{…}` for each call.
Its reasoning stands between [THINK] and [/THINK].
"""

from __future__ import annotations

import string

from .base import Call, Steps, named_id
from .json_calls import JSONCallParser
from .think import ThinkParser

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralThinkParser(ThinkParser):
    opening, closing, special = "[THINK]", "[/THINK]", True


class MistralParser(JSONCallParser):
    special = True

    @staticmethod
    def call_id(source: str) -> str:
        """Its templates refuse all but nine letters and digits."""
        number, characters = int(named_id(source), 16), string.ascii_letters + string.digits
        return "".join(characters[number // len(characters) ** place % len(characters)] for place in range(9))

    def run(self) -> Steps[None]:
        found = yield from self.text_until(MARKER)
        while found:
            self.hold(MARKER)
            yield from self.blanks()
            if not (yield from self.array() if (yield from self.peek()) == "[" else self.named()):
                self.give_up()
            found = yield from self.text_until(MARKER)

    def array(self) -> Steps[bool]:
        """False: its first item is no call."""
        yield from self.literal("[")
        called = False
        while True:
            yield from self.blanks()
            if called:
                self.hold("")
            if not (yield from self.json_call()):
                if called:
                    self.give_up()
                return called
            called = True
            yield from self.blanks()
            if (yield from self.literal("]")):
                return True
            yield from self.literal(",")

    def named(self) -> Steps[bool]:
        found = yield from self.short_text(ARGS, CALL_ID, "{")
        if found is not None and found[1] == CALL_ID:
            after = yield from self.short_text(ARGS, "{")
            found = after and (found[0], after[1])
        if found is None or not found[0].strip():
            return False
        self.settle()
        self.emit(Call(found[0].strip()))
        if found[1] == "{":
            self.at -= 1  # it is the first of the arguments
        yield from self.blanks()
        yield from self.arguments()
        return True
