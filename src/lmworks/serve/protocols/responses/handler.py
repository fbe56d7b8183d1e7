"""One response: its object, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ...backend import Usage
from ...chat import ChatGeneration
from ...errors import to_api_error
from ...generation_request import CompletionOutput, RequestOutput, add_usage
from ...parsers.base import parse_whole
from ...reasoning_tokens import count_reasoning_tokens
from ...sse import encode, encode_in_slices, named_event
from ...telemetry import log
from .bodies import ResponsesRequest
from .writer import ItemWriter, Status


@dataclass
class ResponseHandler:
    """`items`: the input of this response alone, as it is stored."""

    chat: ChatGeneration
    body: ResponsesRequest
    large: bool = False  # its instructions and tools, which each whole response repeats, take milliseconds to encode
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    done: dict[str, Any] | None = None  # the response, when it is complete

    def full_response(self, found: RequestOutput) -> dict[str, Any]:
        (answer,) = found.answers
        parser = self.chat.parser()
        writer = ItemWriter(parser, self.id)
        for _ in writer.add(parse_whole(parser, answer.text)):
            pass
        return self.finished(writer, answer, found.usage)[0]

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Nothing is sent before the first token: a request that is rejected has an HTTP status of its own."""
        generation, usage, answer = self.chat.generation, Usage(0, 0, 0), CompletionOutput()
        begun_elsewhere = self.body.continuation
        number = 0 if begun_elsewhere is None else begun_elsewhere.sequence
        writer: ItemWriter | None = None
        comment, last, sent = generation.prompt_comment(), b"", False

        def numbered(event: dict[str, Any], to_text: Callable[[Any], str] = encode) -> bytes:
            nonlocal number
            number += 1
            return named_event(event["type"], event | {"sequence_number": number - 1}, to_text)

        async def whole(kind: str, response: dict[str, Any]) -> bytes:
            event = {"type": kind, "response": response}
            return await asyncio.to_thread(numbered, event, encode_in_slices) if self.large else numbered(event)

        try:
            begin = [] if number else ["response.created", "response.in_progress"]
            async with aclosing(self.chat.events()) as events:
                async for event, pieces, parser in events:
                    writer = writer or ItemWriter(parser, self.id)
                    usage = usage if event.final is None else add_usage(usage, event.final)
                    answer.add(event)
                    written = [await whole(kind, self.response([], "in_progress")) for kind in begin]
                    made, begin = list(writer.add(pieces)), []
                    written += map(numbered, () if event.replayed else made)
                    if event.finish_reason is not None:
                        response, ends = self.finished(writer, answer, usage)
                        written += map(numbered, ends)
                        written.append(await whole(f"response.{response['status']}", response))
                        last = comment + generation.group(event, written)
                    elif not event.replayed and (shown := comment + generation.group(event, written)):
                        yield shown
                        comment, sent = b"", True
            if last:
                yield last
        except Exception as error:
            if not sent or writer is None:
                raise
            api_error = to_api_error(error)
            if api_error.code == "internal_error":
                log.error("a response failed", exc_info=error)
            self.chat.generation.caller.log_fields["failed"] = api_error.code
            failed = {"code": "server_error", "message": str(api_error)}
            response = self.response(writer.items, "failed") | {"error": failed}
            yield numbered({"type": "error", "code": api_error.code, "message": str(api_error), "param": None})
            yield await whole("response.failed", response)

    def finished(
        self, writer: ItemWriter, answer: CompletionOutput, usage: Usage
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The response, and the events that end its last item."""
        status: Status = "incomplete" if answer.finish_reason == "length" else "completed"
        ends = list(writer.close(status))
        response = self.response(writer.items, status) | {"usage": self.usage(answer, usage)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        self.done = response
        return response, ends

    def usage(self, answer: CompletionOutput, usage: Usage) -> dict[str, Any]:
        reasoning = count_reasoning_tokens(self.chat, answer)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def response(self, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
        body, params = self.body, self.chat.generation.params
        given = body.model_dump(by_alias=True, exclude_none=True, include={"tool_choice", "text", "reasoning"})
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} | given.get("text", {}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [tool_object(dict(tool)) for tool in body.tools or ()],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def tool_object(tool: dict[str, Any]) -> dict[str, Any]:
    return tool | {"parameters": tool["parameters"] or {}, "strict": bool(tool["strict"])}
