"""Where a call is required, a grammar makes the answer one call as JSON, whatever form the model is used to."""

from __future__ import annotations

from .base import Steps
from .json_calls import JSONCallParser


class RequiredCallParser(JSONCallParser):
    def run(self) -> Steps[None]:
        self.hold("")
        yield from self.blanks()
        if not (yield from self.json_call()):
            self.give_up()
        yield from self.text_until()
