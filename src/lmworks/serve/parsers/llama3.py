"""Llama 3.1 and later: an answer that is `{"name": …, "parameters": {…}}`, several of them with `;` between.

`<|python_tag|>` may stand before. What follows it and is no JSON is code for a built-in tool: text.
"""

from __future__ import annotations

from .base import Steps
from .json_calls import JSONCallParser

TAG = "<|python_tag|>"


class Llama3Parser(JSONCallParser):
    special = True

    def run(self) -> Steps[None]:
        while True:
            self.hold("")
            yield from self.blanks()
            if (yield from self.literal(TAG)):
                yield from self.blanks()
            if not (yield from self.json_call()):
                break
            yield from self.blanks()
            if not (yield from self.literal(";")):
                break
        self.give_up()
        if (yield from self.text_until(TAG)):
            self.hold(TAG)
            yield from self.blanks()
            if not (yield from self.json_call()):
                self.give_up()
            yield from self.text_until()
