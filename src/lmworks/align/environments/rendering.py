"""Prompts and observations of episodes as tokens.

Tokens that were sampled are never tokenized again: an observation is what the chat template writes between the end of
the assistant's turn and the beginning of its next one, found on a conversation of two short messages. Only these tokens
are appended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...data.chat_template import Message, Tools
from ...data.chat_tokenizer import ChatTokenizer
from ...data.examples import Text
from ...spec.errors import SpecError
from .tool_calls import tool_instructions

ASKED, ANSWERED, SHOWN = "Well?", "Fine.", "Seen."
CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
BREAK = "\u200b"  # within the name of a special token, in an observation: a text must not forge a turn


@dataclass(frozen=True)
class Opening:
    """A conversation up to the end of an answer."""

    messages: list[Message]
    last: Message  # as which an observation follows
    text: str
    end: str  # the special token at its end; empty: the template has none


class EpisodeRenderer:
    def __init__(self, chat: ChatTokenizer, tools: Tools = ()) -> None:
        self.chat, self.tools = chat, tools
        self.openings: dict[bool, Opening] = {}

    def prompt(self, prompt: Text) -> list[int]:
        if isinstance(prompt, str):
            return [*self.chat.begin, *self.chat.encode(prompt)]
        shown = self.tools if self.shows_tools else ()
        messages = prompt if self.shows_tools or not self.tools else self.with_instructions(prompt)
        return self.chat.encode(self.chat.renderer.prompt(messages, shown))

    def observation(self, text: str, conversational: bool, answers_call: bool) -> list[int]:
        """The tokens after a turn of the assistant, up to its next one."""
        text = self.chat.renderer.special.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)
        if not conversational:
            return self.after(self.chat.eos_token, f"\n{text}\n")
        opening = self.opening(answers_call)
        whole = self.chat.renderer.prompt([*opening.messages, {**opening.last, "content": text}])
        if not whole.startswith(opening.text):
            raise SpecError(f"the chat template changes an answer once it is followed by {text[:40]!r}")
        return self.after(opening.end, whole[len(opening.text) :])

    def role(self, answers_call: bool) -> str:
        """As which an observation stands in a conversation: tool or user."""
        return str(self.opening(answers_call).last["role"])

    def after(self, end: str, text: str) -> list[int]:
        """Tokens of `text` after the token that ends a turn: no tokenizer takes it for the beginning of a text."""
        return self.chat.encode(end + text)[len(self.chat.encode(end)) :]

    def opening(self, answers_call: bool) -> Opening:
        if answers_call not in self.openings:
            self.openings[answers_call] = self.find_opening(answers_call)
        return self.openings[answers_call]

    def find_opening(self, answers_call: bool) -> Opening:
        """With a tool's message after a call, where the template has them, else with the user's."""
        asked, answered = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}
        result = {"role": "tool", "content": SHOWN, "name": "look", "tool_call_id": CALL["id"]}
        candidates: list[list[Message]] = [[asked, answered, {"role": "user", "content": SHOWN}]]
        if answers_call:
            candidates = [[asked, {**answered, "tool_calls": [CALL]}, result], [asked, answered, result], *candidates]
        renderer = self.chat.renderer
        for *messages, last in candidates:
            try:
                head, whole = renderer.conversation([asked, answered]), renderer.prompt([*messages, last])
            except SpecError:
                continue
            found = renderer.special.search(head, head.find(ANSWERED)) if ANSWERED in head else None
            end = found[0] if found else ""
            # Without such a token the turn ends where a conversation would; with it, where the token is: templates may
            # show an answer in another way once something follows.
            place = whole.find(end, whole.find(ANSWERED)) + len(end) if end else len(head)
            before = whole[:place]
            if ANSWERED in before and (end or before == head) and SHOWN in whole[place:]:
                return Opening(messages, last, before, end)
        raise SpecError(
            "align.environment: the chat template cannot go on after an answer (neither with a tool's message nor with "
            "the user's); name another one as data.chat_template"
        )

    @cached_property
    def shows_tools(self) -> bool:
        messages = [{"role": "user", "content": ASKED}]
        try:
            return self.chat.renderer.prompt(messages, self.tools) != self.chat.renderer.prompt(messages)
        except SpecError:
            return False

    def with_instructions(self, messages: list[Message]) -> list[Message]:
        """The tools in a system message, where the template does not show them."""
        text = tool_instructions(self.tools)
        if messages and messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]
