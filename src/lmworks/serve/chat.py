"""`/v1/chat/completions`: chat template, tools, response formats.

A model whose chat template knows tools writes `<tool_call>{"name": …, "arguments": {…}}</tool_call>` when it chooses
to. Where a call is required, the answer is held to a JSON schema instead, and is the call itself.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ..data.chat_template import TOOL_CALL
from ..engine.core.detokenizer import possible_start
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
from .prompts import chat_size, render_chat, tokenize_prompt
from .request_bodies import ChatRequest, ChosenTool, JSONFormat, ObjectFormat, Tool
from .response_bodies import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    TokenLogprob,
    TokenTexts,
    ToolCall,
    finite,
    top_tokens,
)
from .serving import Caller, LocalModel, Serving
from .sse import DONE, sse_event

OPEN, CLOSE = TOOL_CALL
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def tool_call(name: str, arguments: str) -> ToolCall:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def parse_call(text: str) -> ToolCall | None:
    """None: not a call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return tool_call(
        found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )


# --- required tool calls -----------------------------------------------------------------------------


def required_tools(body: ChatRequest) -> list[Tool]:
    """Tools of which one must be called; [] if the model may choose, or has none."""
    tools, choice = body.tools or [], body.tool_choice
    if choice in (None, "none", "auto"):
        return []
    if isinstance(choice, ChosenTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools:
        raise APIError(400, "invalid_request", "tool_choice names a tool that is not in tools", "tool_choice")
    return tools


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON schema of a call of one of these tools."""
    calls, ids = [], set[str]()
    for tool in tools:
        arguments = with_own_id(tool.function.parameters or ANY_OBJECT, ids)
        properties = {"name": {"const": tool.function.name}, "arguments": arguments}
        calls.append(ANY_OBJECT | {"properties": properties, "required": [*properties], "additionalProperties": False})
    return {"anyOf": calls}


def with_own_id(schema: dict[str, Any], ids: set[str]) -> dict[str, Any]:
    """A schema inside another, as a resource with an id of its own: `#` in its references is then the schema itself,
    not the whole, and no other schema's definitions are meant. Of two that bring the same id, the second gets another.
    """
    own = schema.get("$id")
    if not isinstance(own, str) or own in ids:
        own = f"urn:lmworks:tool:{len(ids)}"
    ids.add(own)
    found = schema | {"$id": own}
    if "draft-04" in str(found.get("$schema")):  # which knows no $id
        del found["$schema"]
    return found


# --- optional tool calls ------------------------------------------------------------------------------


@dataclass
class ToolCallParser:
    """Separates tool calls from text in a stream. An invalid call is passed on as text."""

    required: bool = False  # the answer is a call, and nothing else
    max_calls: int | None = None
    made: int = 0
    waiting: str = ""
    pieces: list[str] = field(default_factory=list)

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Text that may be shown, and calls that are complete."""
        self.waiting += text
        if self.required:
            return "", []
        shown, calls = "", list[ToolCall]()
        while OPEN in self.waiting:
            before, _, rest = self.waiting.partition(OPEN)
            inner, close, after = rest.partition(CLOSE)
            if not close:
                shown += before
                self.waiting = OPEN + rest
                return shown, calls
            call = parse_call(inner)
            shown += before if call else before + OPEN + inner + CLOSE
            calls += self.counted(call)
            self.waiting = after.lstrip("\n") if call else after
        keep = possible_start(self.waiting, (OPEN,))
        shown += self.waiting[: len(self.waiting) - keep]
        self.waiting = self.waiting[len(self.waiting) - keep :]
        return shown, calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The answer has ended."""
        rest, self.waiting = self.waiting, ""
        call = parse_call(rest.removeprefix(OPEN)) if self.required or rest.startswith(OPEN) else None
        return ("", self.counted(call)) if call else (rest, [])

    def counted(self, call: ToolCall | None) -> list[ToolCall]:
        if call is None or (self.max_calls is not None and self.made >= self.max_calls):
            return []
        self.made += 1
        return [call]


# --- the endpoint ----------------------------------------------------------------------------------------


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


# --- the response -------------------------------------------------------------------------------------------


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
