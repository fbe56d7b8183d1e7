"""Server-sent events as servers write them: where one ends, and what the gateway has to know of it.

Events are read, never written anew: what a client gets are the bytes that its server sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..serve.forward import LONGEST_LINE
from .exchange import Usage
from .http_client import UpstreamError

DATA = b"data:"
TOKENS = b": tokens "  # serve's `GenerationRequest.journal`
EVENTS = b": events "  # after TOKENS, in APIs that have several events for a token: how many belong to these
PROMPT = b": prompt "  # before a stream's first event: how many tokens its prompts have


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class UsageFields(msgspec.Struct):
    """OpenAI's two ways of naming them; Anthropic's are those of Responses."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Details | None = None
    cache_read_input_tokens: int | None = None  # Anthropic's input_tokens are without these two
    cache_creation_input_tokens: int | None = None

    def usage(self) -> Usage:
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = self.cache_read_input_tokens or 0
        prompt = (self.prompt_tokens or self.input_tokens or 0) + cached + (self.cache_creation_input_tokens or 0)
        found = details.cached_tokens if details is not None else cached
        return Usage(prompt, self.completion_tokens or self.output_tokens or 0, found or 0)


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Inner(msgspec.Struct):
    """The message or response that an event holds."""

    usage: UsageFields | None = None
    id: str = ""
    created_at: int = 0


class ErrorFields(msgspec.Struct):
    """Of OpenAI's error object: its type says whether the error is the client's."""

    type: str | None = None


class EventFields(msgspec.Struct):
    """Of a chunk of completions and chats, an event of Responses, or one of Anthropic's messages."""

    type: str = ""
    choices: list[Choice] = []
    usage: UsageFields | None = None
    error: ErrorFields | None = None
    id: str = ""
    created: int = 0
    sequence_number: int | None = None
    code: str | None = None  # of an event of Responses that is an error
    response: Inner | None = None
    message: Inner | str | None = None  # Anthropic's; of an error of Responses, a text

    @property
    def inner(self) -> Inner | None:
        return self.message if isinstance(self.message, Inner) else self.response

    @property
    def failed(self) -> bool:
        """The server could not finish its answer; another one may."""
        if self.error is not None:
            return self.error.type != "invalid_request_error"
        return self.type == "error" and self.code != "answer_failed"  # an error of Responses


EVENT = msgspec.json.Decoder(EventFields)
LAST_TYPES = {"message_stop", "response.completed", "response.failed", "response.incomplete"}


@dataclass(slots=True)
class StreamEvent:
    raw: bytes  # with the empty line after it
    fields: EventFields | None = None  # None: [DONE], a comment, or nothing that is known
    answer: int = 0  # in a stream of ours: the number of the answer that it belongs to, and its tokens
    tokens: list[int] | None = None
    prompt_tokens: int | None = None
    group: int = 1  # events that belong together, from this one on
    last: bool = False  # the answer is complete

    @property
    def only_usage(self) -> bool:
        """The chunk that `include_usage` asks for; Anthropic's events have a type, and say more than their usage."""
        fields = self.fields
        return fields is not None and fields.usage is not None and not fields.choices and not fields.type

    @property
    def empty(self) -> bool:
        """A chunk of OpenAI's that begins or ends an answer, and says nothing."""
        choices = self.fields.choices if self.fields is not None else []
        return bool(choices) and all(one.text == "" or (one.delta and one.delta.content == "") for one in choices)


class EventSplitter:
    """Bytes as they come → whole events. A server's lines may end in CR, LF or both; ours end in LF.

    Events that belong together come together: all of them are for the same tokens.
    """

    def __init__(self) -> None:
        self.held = b""
        self.group: list[StreamEvent] = []  # of which some are missing

    def feed(self, data: bytes) -> list[StreamEvent]:
        held = self.held + data if self.held else data
        if b"\r" in held:
            ends_in_cr = held.endswith(b"\r")
            held = held.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * ends_in_cr
        *whole, self.held = held.split(b"\n\n")
        if len(self.held) > LONGEST_LINE:
            raise UpstreamError("invalid", "the server sent an event without an end")
        return [event for one in whole if one for event in self.grouped(read_event(one))]

    def grouped(self, event: StreamEvent) -> list[StreamEvent]:
        if not self.group and event.group == 1:
            return [event]
        if self.group:
            event.answer, event.tokens = self.group[0].answer, []
        self.group.append(event)
        if len(self.group) < self.group[0].group:
            return []
        found, self.group = self.group, []
        return found


def count_in(comment: bytes, prefix: bytes, what: str) -> int:
    if not (count := comment[len(prefix) :]).isdigit():
        raise UpstreamError("invalid", f"the server's count of {what} is no number")
    return int(count)


def read_event(text: bytes) -> StreamEvent:
    """`text`: without the empty line that ends it."""
    if text.startswith(PROMPT):
        comment, _, text = text.partition(b"\n")
        found = read_event(text)
        found.prompt_tokens = count_in(comment, PROMPT, "prompt tokens")
        return found
    if text.startswith(TOKENS):
        comment, _, text = text.partition(b"\n")
        answer, *tokens = map(int, comment[len(TOKENS) :].split())
        found = read_event(text)
        found.answer, found.tokens = answer, tokens
        return found
    if text.startswith(EVENTS):
        comment, _, text = text.partition(b"\n")
        found = read_event(text)
        found.group = count_in(comment, EVENTS, "events")
        return found
    raw = text + b"\n\n"
    start = 0 if text.startswith(DATA) else text.find(b"\ndata:") + 1
    if not text.startswith(DATA, start):
        return StreamEvent(raw)
    data = text[start + len(DATA) :].strip()
    if data == b"[DONE]":
        return StreamEvent(raw, last=True)
    try:
        fields = EVENT.decode(data)
    except msgspec.MsgspecError:
        return StreamEvent(raw)
    return StreamEvent(raw, fields, last=fields.type in LAST_TYPES)
