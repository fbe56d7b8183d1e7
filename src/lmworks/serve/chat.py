"""`/v1/chat/completions`: chat template, tools, response formats.

An answer is taken apart by the parsers of its model (`serve.parsers`): reasoning, text, tool calls. Where a call is
required, the answer is held to a JSON schema instead, and is the call itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ..engine.core.request import Logprob
from .backend import Event, Usage
from .generation_request import (
    CompletionOutput,
    GenerationRequest,
    RequestOutput,
    add_usage,
    identity,
    prompt_logprobs_object,
    resolve_max_tokens,
    resolve_priority,
    sampling_params,
    shape_fields,
    token_texts,
    truncation,
    usage_object,
)
from .limits import APIError, check_at_most
from .parsers.answer import AnswerForm, AnswerParser
from .parsers.base import Arguments, Call, Piece, Reasoning, Text, parse_whole
from .prompts import chat_size, render_chat, tokenize_prompt
from .request_bodies import GUIDED, SCHEMA_FIELD, ChatRequest, JSONFormat, ObjectFormat
from .response_bodies import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    FunctionDelta,
    TokenLogprob,
    TokenTexts,
    ToolCall,
    ToolCallDelta,
    finite,
    top_tokens,
)
from .serving import Caller, LocalModel, Serving
from .sse import DONE, sse_event
from .tool_choice import ANY_OBJECT, allowed_tools, call_schema, required_tools

SHAPES = (*GUIDED, "structured_outputs")


# --- from the request to the engine -----------------------------------------------------------------------


@dataclass(frozen=True)
class ChatGeneration:
    """A chat request that is ready to be computed: every protocol of chats is a translation to this."""

    generation: GenerationRequest
    form: AnswerForm
    prompt_end: str

    def parser(self) -> AnswerParser:
        """For one answer."""
        return self.form.parser(self.prompt_end)

    async def events(self) -> AsyncGenerator[tuple[Event, list[Piece], AnswerParser], None]:
        """Events as they come, with the pieces that are certain by then."""
        parsers: dict[int, AnswerParser] = {}
        async with aclosing(self.generation.events()) as events:
            async for _, event in events:
                parser = parsers.get(event.index) or parsers.setdefault(event.index, self.parser())
                pieces = parser.push(event.text)
                yield event, pieces if event.finish_reason is None else pieces + parser.flush(), parser


async def make_generation(
    serving: Serving,
    caller: Caller,
    local: LocalModel,
    adapter: str | None,
    body: ChatRequest,
    schema_field: str = SCHEMA_FIELD,
) -> ChatGeneration:
    """`schema_field`: where the client's body has the schema of the answer."""
    required = required_tools(body)
    schema = call_schema(required) if required else response_schema(body)
    structured = schema is not None or any(getattr(body, name) is not None for name in SHAPES)
    form = answer_form(local, body, bool(required))
    _, closing = markers = form.reasoning_markers()
    size = chat_size(body)
    ids, prompt_end = await tokenize_prompt(serving, caller, local, size, render_chat, body, markers, structured)
    caller.meter.charge_prompt(len(ids))
    if (most := truncation(body, local, body.max_completion_tokens or body.max_tokens)) is not None:
        ids = ids[-most:]
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "invalid_request", "top_logprobs needs logprobs = true", "top_logprobs")
    check_at_most(body.top_logprobs or 0, caller.limits.logprobs, "top_logprobs")
    reasons = structured and closing is not None and not prompt_end.rstrip().endswith(closing)
    params = sampling_params(
        body,
        caller,
        serving.sampling_defaults(local),
        adapter=adapter,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure_after=closing if reasons else None,
        max_tokens=resolve_max_tokens(caller, local, [ids], body.max_completion_tokens or body.max_tokens, None),
        **({} if schema is None else {"json_schema": schema}),
    )
    params = replace(params, stop=(*params.stop, *local.chat.stop))
    if form.special:
        params = replace(params, skip_special_tokens=False)
    generation = GenerationRequest(
        serving,
        caller,
        local,
        params,
        [ids],
        bool(body.stream),
        priority=resolve_priority(body, caller),
        continuation=body.continuation,
        kv_remote=body.kv_transfer_params.remote if body.kv_transfer_params is not None else None,
        shape_fields=shape_fields(body, "tools" if required else schema_field),
    )
    return ChatGeneration(generation, form, prompt_end)


def answer_form(local: LocalModel, body: ChatRequest, required: bool) -> AnswerForm:
    tools = allowed_tools(body)
    schemas = {tool.function.name: tool.function.parameters or ANY_OBJECT for tool in tools} if tools else None
    return AnswerForm(local.parsers, schemas, required, 1 if body.parallel_tool_calls is False else None)


def response_schema(body: ChatRequest) -> Mapping[str, Any] | None:
    """The JSON schema of the text."""
    wanted = body.response_format
    if isinstance(wanted, ObjectFormat):
        return ANY_OBJECT
    if isinstance(wanted, JSONFormat):
        return wanted.json_schema.schema_ or ANY_OBJECT
    return None


# --- the response -------------------------------------------------------------------------------------------


async def make_handler(
    serving: Serving, caller: Caller, local: LocalModel, adapter: str | None, body: ChatRequest
) -> ChatHandler:
    chat = await make_generation(serving, caller, local, adapter, body)
    return ChatHandler(chat, body, **identity(body.continuation, "id", "created"))


@dataclass
class ChatHandler:
    """One request, and the format of its response."""

    chat: ChatGeneration
    body: ChatRequest
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def generation(self) -> GenerationRequest:
        return self.chat.generation

    def logprobs(self, scored: Sequence[Logprob]) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        texts, most = token_texts(self.body, self.generation.local), self.body.top_logprobs or 0
        return {"content": [token_logprob(texts, one, most) for one in scored], "refusal": None}

    def full_response(self, found: RequestOutput) -> ChatCompletion:
        completion: ChatCompletion = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.body.model,
            "choices": [self.choice(index, answer) for index, answer in enumerate(found.answers)],
            "usage": usage_object(found.usage),
        }
        if self.body.prompt_logprobs is not None:
            texts = token_texts(self.body, self.generation.local)
            completion["prompt_logprobs"] = prompt_logprobs_object(texts, found.prompt_logprobs.get(0) or [])
        if self.body.return_token_ids:
            completion["prompt_token_ids"] = list(self.generation.prompts[0])
        return completion

    def choice(self, index: int, answer: CompletionOutput) -> ChatChoice:
        message = chat_message(self.chat.parser(), answer.text, f"{self.id}/{index}")
        choice: ChatChoice = {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(answer.logprobs),
            "finish_reason": finish(answer.finish_reason, "tool_calls" in message),
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.tokens
        return choice

    async def stream(self) -> AsyncGenerator[bytes, None]:
        usage, include_usage = Usage(0, 0, 0), bool(self.body.stream_options and self.body.stream_options.include_usage)
        writers: dict[int, DeltaWriter] = {}
        comment = self.generation.prompt_comment()
        async with aclosing(self.chat.events()) as events:
            async for event, pieces, parser in events:
                usage = usage if event.final is None else add_usage(usage, event.final)
                is_first = event.index not in writers
                writer = writers.setdefault(event.index, DeltaWriter(parser, f"{self.id}/{event.index}"))
                choice = self.chunk(event, writer.delta(pieces, is_first), parser)
                made = self.make_chunk([choice], include_usage, None)
                if self.body.return_token_ids and len(writers) == 1 and is_first:
                    made["prompt_token_ids"] = list(self.generation.prompts[0])
                if not event.replayed:
                    yield comment + self.generation.journal(0, event) + sse_event(made)
                    comment = b""
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

    def chunk(self, event: Event, delta: Delta, parser: AnswerParser) -> ChunkChoice:
        ended = finish(event.finish_reason, parser.calls > 0) if event.finish_reason else None
        logprobs = self.logprobs(event.logprobs or [])
        choice: ChunkChoice = {"index": event.index, "delta": delta, "logprobs": logprobs, "finish_reason": ended}
        if self.body.return_token_ids:
            choice["token_ids"] = event.tokens
        return choice


def chat_message(parser: AnswerParser, text: str, source: str) -> ChatMessage:
    """`source`: of the ids of its calls."""
    reasoning, content, calls = parts_of(parse_whole(parser, text))
    message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
    if not content and (calls or reasoning):
        message["content"] = None
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [
            tool_call(parser.call_id(f"{source}/{number}"), *call) for number, call in enumerate(calls)
        ]
    return message


def parts_of(pieces: Sequence[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text, and the calls: names and arguments."""
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls: list[tuple[str, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, Call):
            calls.append((piece.name, []))
        elif isinstance(piece, Arguments):
            calls[-1][1].append(piece.text)
    return reasoning, text, [(name, "".join(parts)) for name, parts in calls]


def tool_call(call_id: str, name: str, arguments: str) -> ToolCall:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass
class DeltaWriter:
    """The deltas of one answer. `source`: of the ids of its calls."""

    parser: AnswerParser
    source: str
    calls: int = 0

    def delta(self, pieces: Sequence[Piece], is_first: bool) -> Delta:
        """Its text may be empty: half a character, or what may become a call."""
        delta: Delta = {"role": "assistant"} if is_first else {}
        found: list[ToolCallDelta] = []
        reasoning = text = ""
        for piece in pieces:
            if isinstance(piece, Text):
                text += piece.text
            elif isinstance(piece, Reasoning):
                reasoning += piece.text
            elif isinstance(piece, Call):
                begun: FunctionDelta = {"name": piece.name, "arguments": ""}
                id = self.parser.call_id(f"{self.source}/{self.calls}")
                found.append({"index": self.calls, "id": id, "type": "function", "function": begun})
                self.calls += 1
            elif found:
                found[-1]["function"]["arguments"] += piece.text
            else:
                found.append({"index": self.calls - 1, "function": {"arguments": piece.text}})
        if reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        if text or not (found or reasoning):
            delta["content"] = text
        if found:
            delta["tool_calls"] = found
        return delta


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
