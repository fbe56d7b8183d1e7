"""DeepSeek V3 and V3.1: calls between tokens of their own.

V3 and R1 of May 2025 write `function<｜tool▁sep｜>NAME`, and the arguments as a block of Markdown; V3.1 writes
`NAME<｜tool▁sep｜>{…}`.
"""

from __future__ import annotations

from .base import Arguments, Call, Parser, Steps

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
BLOCK, BLOCK_END = "```json\n", "\n```"


class DeepSeekV31Parser(Parser):
    def run(self) -> Steps[None]:
        while found := (yield from self.text_until(ALL, ONE)):
            self.hold(found)
            yield from self.blanks()
            if found == ALL and not (yield from self.literal(ONE)):
                self.give_up()
                continue
            if not (yield from self.call()):
                self.give_up()
                continue
            self.hold("")
            yield from self.blanks()
            if (yield from self.literal(ALL_END)) or (yield from self.peek()) == "<":
                self.settle()
                continue
            self.give_up()

    def call(self) -> Steps[bool]:
        """False: it is none; what was taken is held."""
        name = yield from self.short_text(SEPARATOR)
        if name is None or not name[0].strip():
            return False
        self.settle()
        self.emit(Call(name[0].strip()))
        yield from self.text_until(ONE_END, kind=Arguments)
        return True


class DeepSeekV3Parser(DeepSeekV31Parser):
    def call(self) -> Steps[bool]:
        kind = yield from self.short_text(SEPARATOR)
        name = None if kind is None else (yield from self.short_text(BLOCK))
        if name is None or not name[0].strip():
            return False
        self.settle()
        self.emit(Call(name[0].strip()))
        if (yield from self.text_until(BLOCK_END, kind=Arguments)):
            yield from self.text_until(ONE_END)
        return True
