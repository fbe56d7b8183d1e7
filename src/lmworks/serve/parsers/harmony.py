"""gpt-oss: messages of channels:
`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`.

`analysis` is reasoning, `final` and a `commentary` without recipient are text, and a message to `functions.NAME` is a
call. `<|call|>` and `<|return|>` end an answer, so they are seldom part of it.
"""

from __future__ import annotations

import re

from .base import Arguments, Call, Parser, Reasoning, Steps, Text

CHANNEL, START, MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyParser(Parser):
    closing, special = f"{CHANNEL}final{MESSAGE}", True

    def __init__(self, tools: bool = True) -> None:
        self.tools = tools
        super().__init__()

    def run(self) -> Steps[None]:
        """An answer may begin anywhere after `<|start|>assistant`, which a prompt ends with."""
        self.hold("")
        header = (yield from self.literal(" to=")) or (yield from self.literal(MESSAGE))
        if header and "".join(self.held or ()) == MESSAGE:
            self.settle()
            yield from self.body("")
        elif header:
            yield from self.message()
        else:
            self.give_up()
        while found := (yield from self.text_until(CHANNEL, START)):
            self.hold(found)
            yield from self.message()

    def message(self) -> Steps[None]:
        """Its header, of which something was taken, and its body."""
        header = yield from self.short_text(MESSAGE)
        if header is None:
            self.give_up()
            return
        known = "".join(self.held or ())
        self.settle()
        yield from self.body(known)

    def body(self, header: str) -> Steps[None]:
        recipient = RECIPIENT.search(header)
        if recipient and self.tools:
            self.emit(Call(recipient[1]))
            kind: type[Text] | type[Reasoning] | type[Arguments] = Arguments
        else:
            kind = Reasoning if f"{CHANNEL}analysis" in header else Text
        yield from self.text_until(*ENDS, kind=kind)
