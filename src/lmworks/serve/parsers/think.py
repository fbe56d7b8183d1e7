"""Reasoning before the answer, between two markers: `<think>` … `</think>` of DeepSeek R1, Qwen 3 and many others.

Many templates write the opening marker themselves: then the answer begins with reasoning (`inside`). Newlines around
both markers are not part of the text; templates write them again.
"""

from __future__ import annotations

from .base import Parser, Reasoning, Steps


class ThinkParser(Parser):
    opening: str = "<think>"
    closing: str = "</think>"

    def __init__(self, inside: bool = False) -> None:
        self.inside = inside
        super().__init__()

    def run(self) -> Steps[None]:
        self.hold("")
        yield from self.blanks()
        if not (yield from self.literal(self.opening)) and not self.inside:
            self.give_up()
            yield from self.text_until()
            return
        self.settle()
        yield from self.blanks("\n")
        if (yield from self.text_until(self.closing, kind=Reasoning, trim=True)):
            yield from self.blanks("\n")
            yield from self.text_until()
