"""Which characters of a rendered conversation the assistant writes: what supervised fine-tuning trains on.

A template with {% generation %} says it itself. For one without, turn i is what the template adds for message i to the
generation prompt after the messages before it:

    prompt = render(messages[:i], add_generation_prompt=True)    what the model is given when it answers
    turn   = render(messages[:i + 1])                            must begin with prompt; the rest is what it must write

and `turn` must begin the rendering of the whole conversation. Where it does not, because the template shows a turn
otherwise once others follow (Qwen and DeepSeek drop earlier reasoning), the whole is not what the model will see and
write: the conversation becomes several texts, in each of which every trained turn stands as it is generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from ..spec.errors import SpecError
from .chat_template import GENERATED, Message, Render, Tools, compile_template

Span = tuple[int, int]  # characters [start, stop)
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# For templates that write today's date: data must not change from day to day. It is the date that Llama 3 falls
# back to.
DATE = datetime(2024, 7, 26)
REMEDY = "give a template with {% generation %} around assistant turns as data.chat_template"


class Untrainable(SpecError):
    """The template does not render these messages as the model would generate them."""


@dataclass(frozen=True)
class Rendered:
    """A text, and the parts of it that are trained."""

    text: str
    trained: tuple[Span, ...]


class TurnRenderer:
    """Renders conversations for training. `special`: names of special tokens."""

    def __init__(self, template: str, config: Mapping[str, Any], special: Iterable[str]) -> None:
        self.render = compile_template(template, config, now=lambda: DATE)
        self.marked: Render | None = None
        if GENERATION_TAG.search(template):
            self.marked = compile_template(template, config, marked=True, now=lambda: DATE)
        self.names = tuple(sorted(filter(None, special), key=len, reverse=True))
        self.special = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """What the model is given to answer `messages`."""
        return self.render(messages, tools)

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        return self.render(messages, tools, {"add_generation_prompt": False})

    def turns(self, messages: Sequence[Message], tools: Tools = (), first: int = 0) -> list[Rendered]:
        """Texts in which every assistant turn from message `first` on is trained once; usually one."""
        if self.marked is not None:
            return self.tagged_turns(self.marked, messages, tools, first)
        text = whole = self.conversation(messages, tools)
        done: list[Rendered] = []
        spans: list[Span] = []
        for number in reversed(range(first, len(messages))):
            if messages[number]["role"] != "assistant":
                continue
            prompt = self.prompt(messages[:number], tools)
            turn = whole if number + 1 == len(messages) else self.conversation(messages[: number + 1], tools)
            check_prompt(prompt, turn)
            check_content(messages[number], turn[len(prompt) :])
            stop = self.common_turn(turn, text, len(prompt))
            if stop is None:
                if spans:
                    done.insert(0, Rendered(text, tuple(spans)))
                text, spans, stop = turn, [], len(turn)
            spans.insert(0, (len(prompt), self.without_space(text, len(prompt), stop)))
        return [*([Rendered(text, tuple(spans))] if spans else []), *done]

    def tagged_turns(self, marked: Render, messages: Sequence[Message], tools: Tools, first: int) -> list[Rendered]:
        check_marks(messages)
        text, spans = read_marks(marked(messages, tools, {"add_generation_prompt": False}))
        for message in messages[first:]:
            if message["role"] == "assistant":
                check_content(message, text)
        before = 0
        if first:
            before = len(read_marks(marked(messages[:first], tools, {"add_generation_prompt": False}))[1])
        return [Rendered(text, spans[before:])]

    def common_turn(self, turn: str, text: str, prompt: int) -> int | None:
        """Where `turn` ends in `text`; None: it does not begin it.

        A template may close the last turn (Phi's end-of-text after <|end|>): what closes `text` too, and is nothing but
        special tokens, need not follow the turns before it, provided that they end with one as well.
        """
        if text.startswith(turn):
            return len(turn)
        common = 0
        for one, other in zip(self.pieces(turn), self.pieces(text), strict=False):
            if one != other:
                break
            common += len(one)
        closing, kept = turn[common:], turn[prompt:common].rstrip()
        if common > prompt and kept.endswith(self.names) and text.endswith(closing):
            return None if self.special.sub("", closing).strip() else common
        return None

    def pieces(self, text: str) -> list[str]:
        """Cut before and after special tokens."""
        cuts = [0, *(place for found in self.special.finditer(text) for place in found.span()), len(text)]
        return [text[start:stop] for start, stop in pairwise(cuts)]

    def without_space(self, text: str, start: int, stop: int) -> int:
        """The end of a turn without the white space that follows its end-of-turn token: nothing is sampled after it."""
        turn = text[start:stop].rstrip()
        if not turn.endswith(self.names):
            raise Untrainable(
                f"the chat template renders an assistant turn as {shorten(text[start:stop])!r}: the model would not "
                f"learn to stop, as no special token ends the turn; {REMEDY}"
            )
        return start + len(turn)


def shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:10]} … {text[-25:]}"


def check_prompt(prompt: str, turn: str) -> None:
    if turn.startswith(prompt):
        return
    common = next(
        (i for i, (one, other) in enumerate(zip(prompt, turn, strict=False)) if one != other),
        min(len(prompt), len(turn)),
    )
    raise Untrainable(
        f"the chat template ends the prompt for an answer with {shorten(prompt[common:])!r}, and the answered "
        f"conversation goes on with {shorten(turn[common:])!r} instead: the model would be trained on another text "
        f"than it is given; {REMEDY}"
    )


def check_content(message: Message, turn: str) -> None:
    """Templates of models that see images may skip a content that is a text; others trim it, or cut reasoning off."""
    end = str(message["content"]).strip()[-20:]
    if end not in turn:
        raise Untrainable(
            f"the chat template does not render the content of an assistant turn, which ends with {end!r}"
        )


def check_marks(value: Any) -> None:
    """The characters that mark what is generated must not be in a message."""
    if isinstance(value, str):
        if any(mark in value for mark in GENERATED):
            raise SpecError("a message has a noncharacter of Unicode (U+FDD0 or U+FDD1); remove it")
    elif isinstance(value, Mapping):
        check_marks(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            check_marks(one)


def read_marks(text: str) -> tuple[str, tuple[Span, ...]]:
    """The text without marks, and the outermost spans between them."""
    parts, spans, length, depth, start = [], [], 0, 0, 0
    for part in re.split(f"([{''.join(GENERATED)}])", text):
        if part == GENERATED[0]:
            start, depth = (length if not depth else start), depth + 1
        elif part == GENERATED[1]:
            depth -= 1
            if not depth and start < length:
                spans.append((start, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), tuple(spans)
