"""Hermes, Qwen 2.5 and 3, and many others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one a call."""

from __future__ import annotations

from ...data.chat_template import TOOL_CALL
from .base import Steps
from .json_calls import JSONCallParser

OPEN, CLOSE = TOOL_CALL


class HermesParser(JSONCallParser):
    def run(self) -> Steps[None]:
        while (yield from self.text_until(OPEN)):
            self.hold(OPEN)
            yield from self.blanks()
            if not (yield from self.json_call()):
                self.give_up()
                continue
            yield from self.blanks()
            if (yield from self.literal(CLOSE)):
                yield from self.blanks("\n")
