"""From a server's stream to a client's, event by event; it outlives the server that a stream began with."""

from __future__ import annotations

import time
from typing import Any

from .exchange import Exchange
from .http_client import UpstreamError
from .prefix_continuation import is_text, rewritten
from .shadow import text_of
from .stream_events import EventFields, EventSplitter, Inner, StreamEvent

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamRelay:
    """Whole events only: of one that a server did not finish nothing is sent, so another can say it again."""

    def __init__(self, exchange: Exchange, hide_usage: bool) -> None:
        self.exchange, self.hide_usage = exchange, hide_usage
        self.splitter = EventSplitter()
        self.begun = False
        self.done = False  # the answer's last event was sent
        self.usage_shown = False  # a server that goes on counts again
        self.last_at = 0.0  # when something came, by the loop's clock
        self.journal: dict[int, list[int]] = {}  # tokens of each answer that the client has
        self.complete = True  # the journal has all of them
        self.identity: dict[str, Any] = {}  # of the answer: its id, and when it was created
        self.sequence = 0  # of Responses: the number of the next event
        self.texts: list[str] = []  # of the events that the client has
        self.plain = True  # they say nothing but their texts
        self.finished = False  # the answer has its finish_reason
        self.by_prefix = 0  # events of servers before this one, which was given their text as a prefix

    def feed(self, data: bytes) -> None:
        shown: list[bytes] = []
        self.last_at = self.exchange.connection.loop.time()
        try:
            for event in self.splitter.feed(data):
                if self.take(event):
                    shown.append(self.raw(event))
        finally:  # what came before an error is in the journal: another server will not say it again
            if shown:
                self.show(shown)

    def raw(self, event: StreamEvent) -> bytes:
        """As the client gets it: the bytes that came, unless the text so far was another server's."""
        named = self.by_prefix and event.fields is not None and event.fields.error is None
        return rewritten(event.raw, self.identity, self.by_prefix) if named else event.raw

    def show(self, events: list[bytes]) -> None:
        connection = self.exchange.connection
        if not self.begun:
            self.begin()
        connection.write(events[0] if len(events) == 1 else b"".join(events))

    def take(self, event: StreamEvent) -> bool:
        """Takes note of an event; False: it is not for the client."""
        exchange, fields = self.exchange, event.fields
        if self.done:
            return False  # nothing comes after an answer's end, not even another server's
        self.done = event.last
        if event.prompt_tokens is not None:
            exchange.prompt_tokens = event.prompt_tokens
        if fields is None:
            self.note_tokens(event)
            exchange.count()
            return bool(event.raw.strip())  # else it is a comment: tokens that nothing is said for yet
        if fields.failed:
            raise UpstreamError("failed", "the server ended its answer with an error")
        self.done = self.done or fields.error is not None
        if self.by_prefix and event.empty and not fields.choices[0].finish_reason:
            return False  # the client has the beginning
        self.note(event, fields)
        if exchange.text is not None:
            exchange.text += text_of(fields.choices)
        found = fields.usage or (fields.inner and fields.inner.usage)
        if found:
            before, exchange.usage = exchange.usage, found.usage()
            if before is not None and not exchange.usage.prompt_tokens:  # Anthropic counts them at the beginning
                exchange.usage.prompt_tokens = before.prompt_tokens
            exchange.usage.completion_tokens += self.by_prefix
            exchange.usage.prompt_tokens -= self.by_prefix
            exchange.usage_counts = not isinstance(fields.message, Inner)  # Anthropic's first event counts the prompt
        exchange.count()
        if event.only_usage:
            if self.hide_usage or self.usage_shown:
                return False
            self.usage_shown = True
        exchange.chunks += 1
        return True

    def note(self, event: StreamEvent, fields: EventFields) -> None:
        self.note_tokens(event)
        if event.tokens is None and (
            fields.choices or (fields.type.endswith("delta") and fields.type != "message_delta")
        ):
            self.complete = False
            self.exchange.generated += not event.empty
            self.exchange.unnamed += 1
        if not self.identity:
            inner = fields.inner
            id, created = (fields.id, fields.created) if inner is None else (inner.id, inner.created_at)
            self.identity = {"id": id, "created": created}
        if fields.sequence_number is not None:
            self.sequence = fields.sequence_number + 1
        if fields.choices:
            self.texts.append(text_of(fields.choices))
            self.plain = self.plain and is_text(fields)
            self.finished = self.finished or any(one.finish_reason for one in fields.choices)

    def note_tokens(self, event: StreamEvent) -> None:
        if event.tokens is not None:
            self.journal.setdefault(event.answer, []).extend(event.tokens)
            self.exchange.generated += len(event.tokens)

    def continuation(self, answers: int) -> dict[str, Any]:
        """What another server needs to go on: see `request_bodies.Continuation`."""
        found = [self.journal.get(number, []) for number in range(answers)]
        return {**self.identity, "answers": found} | ({"sequence": self.sequence} if self.sequence else {})

    def begin(self) -> None:
        exchange = self.exchange
        self.begun = True
        exchange.status = 200
        exchange.first_token = time.perf_counter() - exchange.began
        exchange.connection.begin(200, [*STREAM_HEADERS, *exchange.headers])

    def restart(self) -> None:
        """Another server answers: what the one before it had begun to say is dropped."""
        self.splitter = EventSplitter()
        if not self.begun:  # its tokens too
            self.journal.clear()
            self.exchange.generated = 0
