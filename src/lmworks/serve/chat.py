"""`/v1/chat/completions`: chat template, tools, response formats."""

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
from .generation_request import (
    CompletionOutput,
    GenerationRequest,
    RequestOutput,
    add_usage,
    resolve_max_tokens,
    sampling_params,
    usage_object,
)
from .limits import APIError
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
from .prompts import chat_size, render_chat, tokenize_prompt
from .serving import Caller, LocalModel, Serving
from .sse import DONE, sse_event
from .text_endpoint import handle_request
from .token_logprobs import TokenTexts, finite, top_tokens
from .tool_calls import ANY_OBJECT, ToolCallParser, call_schema, required_tools


async def chat(serving: Serving, request: Request) -> Response:
    return await handle_request(serving, request, ChatRequest, make_handler)


async def make_handler(
    serving: Serving, caller: Caller, local: LocalModel, adapter: str | None, body: ChatRequest
) -> ChatHandler:
    ids = await tokenize_prompt(serving, caller, local, chat_size(body), render_chat, body)
    caller.meter.charge_prompt(len(ids))
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "invalid_request", "top_logprobs needs logprobs = true", "top_logprobs")
    params = sampling_params(
        body,
        caller,
        adapter=adapter,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=response_schema(body) or body.guided_json,
        max_tokens=resolve_max_tokens(caller, local, [ids], body.max_completion_tokens or body.max_tokens, None),
    )
    params = replace(params, stop=(*params.stop, *local.chat.stop))
    return ChatHandler(GenerationRequest(serving, caller, local, params, [ids], bool(body.stream)), body)


def response_schema(body: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema of the answer."""
    wanted, tools = body.response_format, required_tools(body)
    if tools:
        return call_schema(tools)
    if isinstance(wanted, ObjectFormat):
        return ANY_OBJECT
    if isinstance(wanted, JSONFormat):
        return wanted.json_schema.schema_ or ANY_OBJECT
    return None


# --- the answer -------------------------------------------------------------------------------------------


@dataclass
class ChatHandler:
    """One request, and the format of its response."""

    generation: GenerationRequest
    body: ChatRequest
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def parser(self) -> ToolCallParser | None:
        """None: there are no tools to call."""
        if not self.body.tools or self.body.tool_choice == "none":
            return None
        return ToolCallParser(bool(required_tools(self.body)), 1 if self.body.parallel_tool_calls is False else None)

    def logprobs(self, scored: Sequence[Logprob]) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        texts, most = self.generation.local.token_texts, self.body.top_logprobs or 0
        return {"content": [token_logprob(texts, one, most) for one in scored], "refusal": None}

    def full_response(self, found: RequestOutput) -> ChatCompletion:
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.body.model,
            "choices": [self.choice(index, answer) for index, answer in enumerate(found.answers)],
            "usage": usage_object(found.usage),
        }

    def choice(self, index: int, answer: CompletionOutput) -> ChatChoice:
        text, calls = answer.text, list[ToolCall]()
        if (parser := self.parser()) is not None:
            (text, calls), (rest, last) = parser.push(answer.text), parser.flush()
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

    async def stream(self) -> AsyncGenerator[bytes, None]:
        usage, include_usage = Usage(0, 0, 0), bool(self.body.stream_options and self.body.stream_options.include_usage)
        parsers: defaultdict[int, ToolCallParser | None] = defaultdict(self.parser)
        async with aclosing(self.generation.events()) as events:
            async for _, event in events:
                usage = usage if event.final is None else add_usage(usage, event.final)
                is_first = event.index not in parsers
                yield sse_event(
                    self.make_chunk([self.chunk(event, parsers[event.index], is_first)], include_usage, None)
                )
        if include_usage:
            yield sse_event(self.make_chunk([], include_usage, usage))
        yield DONE

    def make_chunk(self, choices: list[ChunkChoice], include_usage: bool, usage: Usage | None) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.body.model,
            "choices": choices,
        }
        if include_usage:
            chunk["usage"] = None if usage is None else usage_object(usage)
        return chunk

    def chunk(self, event: Event, parser: ToolCallParser | None, is_first: bool) -> ChunkChoice:
        """Its text may be empty: half a character, or what may become a call."""
        text, calls, before = event.text, list[ToolCall](), 0
        if parser is not None:
            before = parser.made
            text, calls = parser.push(event.text)
            if event.finish_reason is not None:
                rest, last = parser.flush()
                text, calls = text + rest, calls + last
        delta: Delta = {"role": "assistant"} if is_first else {}
        if text or not calls:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": before + place, **call} for place, call in enumerate(calls)]
        ended = finish(event.finish_reason, parser is not None and parser.made > 0) if event.finish_reason else None
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
            for token, logprob in top_tokens(found)[:most]
        ],
    }


def as_list(found: bytes | None) -> list[int] | None:
    return None if found is None else list(found)
