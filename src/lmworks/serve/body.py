"""Request bodies: size and nesting are bounded while they are read, item counts before they are validated.

Bodies of more than LARGE_BODY_BYTES are parsed in a worker process (`serve.workers`), off the event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import Request

from .limits import APIError, Limits
from .request_bodies import (
    GUIDED,
    SCHEMA_FIELD,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
)
from .serving import Caller, Serving
from .workers import PromptProcessor

BODY_SECONDS = 60.0  # for a body to arrive
LARGE_BODY_BYTES = 65_536  # bytes that take milliseconds to parse
MAX_DETOKENIZED = 2**18  # tokens of /detokenize: they pass between processes, which holds the GIL
MAX_GRAMMAR_CHARS = 65_536  # of a schema, a regex or all choices together: the engine compiles no more
MAX_TOOLS_CHARS = 2**20  # of all tools together: more would block the event loop, and is no prompt
# With its end. It matches at every quote outside of strings, also where the string has no end: so time is linear.
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+("|\\?\Z)', re.DOTALL)
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
OPENING = b"[{"

Body = TypeVar("Body", bound=BaseModel)


class NestingLimiter:
    """Limits the nesting of JSON and its number of objects, lists and strings, fed part by part.

    Numbers are not counted: prompts may be token ids.
    """

    def __init__(self, depth: int, values: int) -> None:
        self.max_depth, self.max_values = depth, values
        self.depth = self.containers = self.quotes = 0
        self.open = b""  # the beginning of a string that the last part did not end

    def feed(self, part: bytes) -> None:
        """Raises APIError. Invalid JSON may pass: the parser reports it."""
        self.quotes += part.count(b'"') - part.count(b'\\"')
        self.check()
        text = self.open + part
        *rest, last = STRING.split(text)  # what is outside of strings, and between two of those the end of a string
        self.open = b'"' + rest[-1] if rest and rest[-1] != b'"' else b""
        outside = b"".join(rest[::2]) + last
        brackets = outside.translate(None, NO_BRACKETS)
        self.containers += brackets.count(b"[") + brackets.count(b"{")
        self.check()
        for bracket in brackets:
            self.depth += 1 if bracket in OPENING else -1
            if self.depth > self.max_depth:
                raise APIError(400, "limit_exceeded", f"the body is nested deeper than {self.max_depth} levels")

    def check(self) -> None:
        if self.containers + self.quotes // 2 > self.max_values:
            raise APIError(400, "limit_exceeded", f"more than {self.max_values} objects, lists and strings")


async def read_body(serving: Serving, request: Request, caller: Caller, kind: type[Body]) -> tuple[Body, bytes]:
    """The validated body, and its bytes. The request is charged from here on."""
    raw = await receive_body(request, caller)
    if len(raw) <= LARGE_BODY_BYTES:
        return parse(None, raw, kind, caller.limits), raw
    return await serving.workers.run(caller.key.name, None, parse, raw, kind, caller.limits), raw


async def receive_body(request: Request, caller: Caller) -> bytes:
    limits = caller.limits
    if not request.headers.get("content-type", "application/json").lower().startswith("application/json"):
        raise APIError(415, "unsupported_media_type", "the body must be JSON: send content-type: application/json")
    if (declared := request.headers.get("content-length", "0")).isdecimal() and int(declared) > limits.body_bytes:
        raise too_large(limits.body_bytes)
    await caller.meter.start()
    raw, nesting = bytearray(), NestingLimiter(limits.depth, limits.values)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                caller.meter.bytes = len(raw)
                if len(raw) > limits.body_bytes:
                    raise too_large(limits.body_bytes)
                nesting.feed(part)
    except TimeoutError:
        raise APIError(408, "body_timeout", f"the body did not arrive within {BODY_SECONDS:g} s") from None
    return bytes(raw)


def too_large(limit: int) -> APIError:
    return APIError(413, "body_too_large", f"the body has more than {limit} bytes, the limit")


def parse(_: PromptProcessor | None, raw: bytes, kind: type[Body], limits: Limits) -> Body:
    """In this process or in a worker. Token ids become arrays, which are cheap to pickle."""
    found = parse_json(raw)
    if isinstance(found, dict):
        check_counts(found, limits)
    body = kind.model_validate(found)
    if b"NaN" in raw or b"Infinity" in raw:
        parse_json(raw, allow_inf_nan=False)  # in a schema they would not be JSON
    if isinstance(body, CompletionRequest):
        body.prompt = pack_token_ids(body.prompt)
    if isinstance(body, EmbeddingRequest) or (isinstance(body, ClassifyRequest) and body.input is not None):
        body.input = pack_token_ids(body.input)
    if isinstance(body, DetokenizeRequest):
        body.tokens = pack_token_ids(body.tokens)
    return body


def parse_json(raw: bytes, allow_inf_nan: bool = True) -> Any:
    try:
        return from_json(raw, allow_inf_nan=allow_inf_nan)
    except ValueError as error:
        raise APIError(400, "invalid_json", f"the body is no JSON: {error}") from None


def pack_token_ids(prompt: Any) -> Any:
    """Lists of token ids as arrays; texts as they are."""
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
        return array("i", prompt)
    return [pack_token_ids(one) for one in prompt] if isinstance(prompt, list) else prompt


# --- counts -----------------------------------------------------------------------------------------------


def check_counts(body: dict[str, Any], limits: Limits) -> None:
    """Before validation, templates and tokenizers, whose cost grows with the number of items."""
    for param, count, limit, what in item_counts(body, limits):
        if count > limit:
            raise APIError(400, "limit_exceeded", f"{param} has {count} {what}: at most {limit} are allowed", param)


def item_counts(body: dict[str, Any], limits: Limits) -> Iterator[tuple[str, int, int, str]]:
    prompt, messages = body.get("prompt"), items(body.get("messages"))
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    yield "prompt", len(cast("list[Any]", prompt)) if several else 1, limits.prompts, "prompts"
    for field in ("input", "documents", "text_1", "text_2"):
        texts = body.get(field)
        several = isinstance(texts, list) and texts and not isinstance(texts[0], int | dict)
        yield field, len(cast("list[Any]", texts)) if several else 1, limits.prompts, "texts"
    yield "messages", len(messages), limits.messages, "messages"
    for field, what in (("content", "parts of messages"), ("tool_calls", "tool calls")):
        yield (
            "messages",
            sum(len(items(one.get(field))) for one in messages if isinstance(one, dict)),
            limits.messages,
            what,
        )
    given = items(body.get("input"))
    given = (
        given if isinstance(given, list) and given and isinstance(given[0], dict) else ()
    )  # else texts, or token ids
    yield "input", len(given), limits.messages, "items"
    parts = (one.get(field) for one in given if isinstance(one, dict) for field in ("content", "output", "summary"))
    yield "input", sum(len(items(each)) for each in parts), limits.messages, "parts of items"
    yield "system", len(items(body.get("system"))), limits.messages, "blocks"
    results = (one.get("content") for message in messages if isinstance(message, dict) for one in parts_in(message))
    yield "messages", sum(len(items(each)) for each in results), limits.messages, "blocks of results"
    yield "stop_sequences", len(items(body.get("stop_sequences"))), limits.stop, "strings"
    yield "tools", len(items(body.get("tools"))), limits.tools, "tools"
    yield "stop", len(items(body.get("stop"))), limits.stop, "strings"
    yield "stop_token_ids", len(items(body.get("stop_token_ids"))), limits.stop, "tokens"
    yield "logit_bias", len(items(body.get("logit_bias"))), limits.logit_bias, "tokens"
    yield "bad_words", len(items(body.get("bad_words"))), limits.bad_words, "texts"
    yield "allowed_token_ids", len(items(body.get("allowed_token_ids"))), MAX_DETOKENIZED, "tokens"
    yield "metadata", len(items(body.get("metadata"))), limits.metadata, "entries"
    yield "tokens", len(items(body.get("tokens"))), MAX_DETOKENIZED, "tokens"
    yield "tools", characters(body.get("tools")), MAX_TOOLS_CHARS, "characters"
    yield "chat_template_kwargs", characters(body.get("chat_template_kwargs")), MAX_GRAMMAR_CHARS, "characters"
    for param, found in grammar_fields(body):
        yield param, characters(found), MAX_GRAMMAR_CHARS, "characters"


def parts_in(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def items(found: Any) -> Any:
    return found if isinstance(found, list | dict) else ()


def grammar_fields(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields that the engine compiles to a grammar."""
    yield from ((param, body[param]) for param in GUIDED if param in body)
    if isinstance(shapes := body.get("structured_outputs"), dict):
        yield from ((f"structured_outputs.{name}", shape) for name, shape in shapes.items())
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and isinstance(wanted.get("json_schema"), dict):
        yield SCHEMA_FIELD, wanted["json_schema"].get("schema")
    for name in ("text", "output_config"):
        options = body.get(name)
        if isinstance(options, dict) and isinstance(options.get("format"), dict):
            yield f"{name}.format.schema", options["format"].get("schema")


def characters(found: Any) -> int:
    return len(found) if isinstance(found, str) else len(json.dumps(found, separators=(",", ":")))
