"""`/v1/chat/completions`: conversations through the model's chat template, with tools and shapes of the answer."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from ..engine.core.request import Logprob
from .backend import Event, Usage
from .generation_request import Job, Total, Whole, room, total, usage_object, wishes
from .limits import Refusal
from .openai_answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    TokenLogprob,
    ToolCall,
)
from .openai_types import ChatRequest, JSONFormat, ObjectFormat
from .prompts import converse, prompted, size_of_chat
from .serving import Caller, Local, Serving
from .sse import DONE, line
from .text_endpoint import answered
from .token_logprobs import TokenTexts, finite, likeliest
from .tool_calls import ANY_OBJECT, Reader, call_schema, chosen


async def chat(serving: Serving, request: Request) -> Response:
    return await answered(serving, request, ChatRequest, prepared)


async def prepared(serving: Serving, caller: Caller, local: Local, adapter: str | None, body: ChatRequest) -> Answering:
    ids = await prompted(serving, caller, local, size_of_chat(body), converse, body)
    caller.visit.work(len(ids))
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "invalid_request", "top_logprobs needs logprobs = true", "top_logprobs")
    params = wishes(
        body,
        caller,
        adapter=adapter,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=shape(body) or body.guided_json,
        max_tokens=room(caller, local, [ids], body.max_completion_tokens or body.max_tokens, None),
    )
    params = replace(params, stop=(*params.stop, *local.chat.stop))
    return Answering(Job(serving, caller, local, params, [ids], bool(body.stream)), body)


def shape(body: ChatRequest) -> dict[str, Any] | None:
    """A JSON schema that the answer must fit."""
    wanted, tools = body.response_format, chosen(body)
    if tools:
        return call_schema(tools)
    if isinstance(wanted, ObjectFormat):
        return ANY_OBJECT
    if isinstance(wanted, JSONFormat):
        return wanted.json_schema.schema_ or ANY_OBJECT
    return None


# --- the answer -------------------------------------------------------------------------------------------


@dataclass
class Answering:
    """One request, and the form in which it is answered."""

    job: Job
    body: ChatRequest
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def reader(self) -> Reader | None:
        """None: there are no tools, so nothing is a call."""
        if not self.body.tools or self.body.tool_choice == "none":
            return None
        return Reader(bool(chosen(self.body)), 1 if self.body.parallel_tool_calls is False else None)

    def logprobs(self, scored: Sequence[Logprob]) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        texts, most = self.job.local.token_texts, self.body.top_logprobs or 0
        return {"content": [token_logprob(texts, one, most) for one in scored], "refusal": None}

    def whole(self, found: Total) -> ChatCompletion:
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.body.model,
            "choices": [self.choice(index, answer) for index, answer in enumerate(found.answers)],
            "usage": usage_object(found.usage),
        }

    def choice(self, index: int, answer: Whole) -> ChatChoice:
        text, calls = answer.text, list[ToolCall]()
        if (reader := self.reader()) is not None:
            (text, calls), (rest, last) = reader.push(answer.text), reader.flush()
            text, calls = text + rest, calls + last
        message: ChatMessage = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(answer.logprobs),
            "finish_reason": finish(answer.finish_reason, bool(calls)),
        }

    async def lines(self) -> AsyncGenerator[bytes, None]:
        usage, told = Usage(0, 0, 0), bool(self.body.stream_options and self.body.stream_options.include_usage)
        readers: defaultdict[int, Reader | None] = defaultdict(self.reader)
        async with aclosing(self.job.events()) as events:
            async for _, event in events:
                usage = usage if event.final is None else total(usage, event.final)
                begins = event.index not in readers
                yield line(self.around([self.chunk(event, readers[event.index], begins)], told, None))
        if told:
            yield line(self.around([], told, usage))
        yield DONE

    def around(self, choices: list[ChunkChoice], told: bool, usage: Usage | None) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.body.model,
            "choices": choices,
        }
        if told:
            chunk["usage"] = None if usage is None else usage_object(usage)
        return chunk

    def chunk(self, event: Event, reader: Reader | None, begins: bool) -> ChunkChoice:
        """Its text may be empty: half a character, or what may become a call."""
        text, calls, before = event.text, list[ToolCall](), 0
        if reader is not None:
            before = reader.made
            text, calls = reader.push(event.text)
            if event.finish_reason is not None:
                rest, last = reader.flush()
                text, calls = text + rest, calls + last
        delta: Delta = {"role": "assistant"} if begins else {}
        if text or not calls:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": before + place, **call} for place, call in enumerate(calls)]
        ended = finish(event.finish_reason, reader is not None and reader.made > 0) if event.finish_reason else None
        logprobs = self.logprobs(event.logprobs or [])
        return {"index": event.index, "delta": delta, "logprobs": logprobs, "finish_reason": ended}


def finish(reason: str, called: bool) -> ChatFinish:
    return "tool_calls" if called and reason == "stop" else cast("ChatFinish", reason)


def token_logprob(texts: TokenTexts, found: Logprob, most: int) -> TokenLogprob:
    return {
        "token": texts.text(found.token),
        "logprob": finite(found.logprob),
        "bytes": as_list(texts.bytes(found.token)),
        "top_logprobs": [
            {"token": texts.text(token), "logprob": logprob, "bytes": as_list(texts.bytes(token))}
            for token, logprob in likeliest(found)[:most]
        ],
    }


def as_list(found: bytes | None) -> list[int] | None:
    return None if found is None else list(found)
