"""One message: its blocks, whole or as a stream of Anthropic's events."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ...backend import Usage
from ...chat import ChatGeneration, parts_of
from ...errors import to_api_error
from ...generation_request import CompletionOutput, RequestOutput, add_usage
from ...parsers.answer import AnswerParser
from ...parsers.base import Call, Piece, Reasoning, Text, parse_whole
from ...reasoning_tokens import count_reasoning_tokens
from ...sse import named_event
from ...telemetry import log
from .bodies import MessagesRequest
from .errors import anthropic_error


@dataclass
class MessageHandler:
    chat: ChatGeneration
    body: MessagesRequest
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    def full_response(self, found: RequestOutput) -> dict[str, Any]:
        (answer,) = found.answers
        parser = self.chat.parser()
        content = blocks(parse_whole(parser, answer.text), parser, self.id)
        called = any(block["type"] == "tool_use" for block in content)
        usage = self.final_usage(answer, found.usage)
        return self.message(content, found.usage) | self.ending(answer, called) | {"usage": usage}

    def final_usage(self, answer: CompletionOutput, usage: Usage) -> dict[str, Any]:
        thinking = count_reasoning_tokens(self.chat, answer)
        return usage_object(usage) | {"output_tokens_details": {"thinking_tokens": thinking}}

    def message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(usage),
        }

    def ending(self, answer: CompletionOutput, called: bool) -> dict[str, Any]:
        if answer.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if answer.stop_reason in (self.body.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Nothing is sent before the first token: a request that is rejected has an HTTP status of its own."""
        generation, usage, answer = self.chat.generation, Usage(0, 0, 0), CompletionOutput()
        begun_elsewhere = self.body.continuation is not None and self.body.continuation.id is not None
        known = Usage(len(generation.prompts[0]), 0, 0)
        begin = [] if begun_elsewhere else [{"type": "message_start", "message": self.message([], known)}]
        writer = BlockWriter(self.id)
        comment, last, sent = generation.prompt_comment(), b"", False
        try:
            async with aclosing(self.chat.events()) as events:
                async for event, pieces, parser in events:
                    usage = usage if event.final is None else add_usage(usage, event.final)
                    answer.add(event)
                    made = list(writer.add(pieces, parser))
                    written, begin = [*begin, *(() if event.replayed else made)], []
                    if event.finish_reason is not None:
                        delta = self.ending(answer, writer.calls > 0)
                        end = {"type": "message_delta", "delta": delta, "usage": self.final_usage(answer, usage)}
                        written += [*writer.close(), end, {"type": "message_stop"}]
                        last = comment + generation.group(event, [*map(put, written)])
                    elif not event.replayed and (shown := comment + generation.group(event, [*map(put, written)])):
                        yield shown
                        comment, sent = b"", True
            if last:
                yield last
        except Exception as error:
            if not sent:
                raise
            api_error = to_api_error(error)
            if api_error.code == "internal_error":
                log.error("a message failed", exc_info=error)
            self.chat.generation.caller.log_fields["failed"] = api_error.code
            yield put(dict(anthropic_error(api_error)))


def put(event: dict[str, Any]) -> bytes:
    return named_event(event["type"], event)


def usage_object(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what was found in a cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def blocks(pieces: Sequence[Piece], parser: AnswerParser, source: str) -> list[dict[str, Any]]:
    """A call whose arguments are no JSON object cannot be a block of its own: it is text."""
    reasoning, text, calls = parts_of(pieces)
    found: list[dict[str, Any]] = []
    if reasoning:
        found.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text:
        found.append({"type": "text", "text": text})
    for number, (name, arguments) in enumerate(calls):
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            given = None
        if isinstance(given, dict):
            id = parser.call_id(f"{source}/{number}")
            found.append({"type": "tool_use", "id": id, "name": name, "input": given})
        else:
            found.append({"type": "text", "text": f"{name}{arguments}"})
    return found


@dataclass
class BlockWriter:
    """Events of the blocks of one message. `source`: of the ids of its calls."""

    source: str
    open: str = ""  # the type of the block that is open
    count: int = 0  # of blocks
    calls: int = 0

    def add(self, pieces: Sequence[Piece], parser: AnswerParser) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            kind = "thinking" if isinstance(piece, Reasoning) else "text" if isinstance(piece, Text) else "tool_use"
            if isinstance(piece, Call) or kind != self.open:
                yield from self.close()
                self.open = kind
                self.count += 1
                yield self.block_event("content_block_start", content_block=self.begin(kind, piece, parser))
            if isinstance(piece, Call):
                self.calls += 1
            elif isinstance(piece, Text):
                yield self.block_event("content_block_delta", delta={"type": "text_delta", "text": piece.text})
            elif isinstance(piece, Reasoning):
                yield self.block_event("content_block_delta", delta={"type": "thinking_delta", "thinking": piece.text})
            else:
                partial = {"type": "input_json_delta", "partial_json": piece.text}
                yield self.block_event("content_block_delta", delta=partial)

    def begin(self, kind: str, piece: Piece, parser: AnswerParser) -> dict[str, Any]:
        if kind == "thinking":
            return {"type": kind, "thinking": "", "signature": ""}
        if kind == "text":
            return {"type": kind, "text": ""}
        return {
            "type": kind,
            "id": parser.call_id(f"{self.source}/{self.calls}"),
            "name": piece.name if isinstance(piece, Call) else "",
            "input": {},
        }

    def close(self) -> Iterator[dict[str, Any]]:
        if self.open:
            yield self.block_event("content_block_stop")
        self.open = ""

    def block_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": self.count - 1, **fields}
