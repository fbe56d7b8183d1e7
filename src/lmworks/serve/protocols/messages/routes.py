"""Routes of the Messages API."""

from __future__ import annotations

import re
from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response
from typing_extensions import TypedDict

from ...body import Body, read_body
from ...chat import make_generation
from ...generation_request import collect_output, identity
from ...limits import APIError
from ...openapi import STREAM, error_responses, request_body
from ...prompts import chat_size, render_chat, tokenize_prompt
from ...serving import Caller, LocalModel, Serving
from ...sse import encode, start_stream, while_connected
from ..local import find_local
from .bodies import CountTokensRequest, MessagesRequest
from .errors import PATH, AnthropicErrorBody
from .handler import MessageHandler
from .translate import SCHEMA_FIELD, chat_request

VERSION, DATE = "anthropic-version", re.compile(r"\d{4}-\d{2}-\d{2}")  # of any date: answers are the same


class AnthropicMessage(BaseModel):
    """The fields that every message has; the others are Anthropic's."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]


class TokenCount(TypedDict):
    input_tokens: int


def add_messages_routes(app: FastAPI, serving: Serving) -> None:
    errors = error_responses(body=AnthropicErrorBody)

    @app.post(
        PATH,
        name="create_message",
        openapi_extra=request_body(MessagesRequest),
        response_model=AnthropicMessage,
        responses={200: {"content": STREAM}, **errors},
    )
    async def create(request: Request) -> Response:
        """Create a message (Anthropic's Messages API)."""
        caller, body, local, adapter = await read(serving, request, MessagesRequest)
        chat = await make_generation(serving, caller, local, adapter, chat_request(body), SCHEMA_FIELD)
        handler = MessageHandler(chat, body, **identity(body.continuation, "id"))
        if body.stream:
            return await start_stream(request, handler.stream())
        output = await while_connected(request.receive, collect_output(chat.generation))
        return Response(encode(handler.full_response(output)), media_type="application/json")

    @app.post(
        f"{PATH}/count_tokens",
        name="count_message_tokens",
        openapi_extra=request_body(CountTokensRequest),
        response_model=TokenCount,
        responses=errors,
    )
    async def count_tokens(request: Request) -> Response:
        """How many tokens a message's prompt has."""
        caller, body, local, _ = await read(serving, request, CountTokensRequest)
        chat = chat_request(body)
        ids, _ = await tokenize_prompt(serving, caller, local, chat_size(chat), render_chat, chat)
        caller.meter.charge_prompt(len(ids))
        return Response(encode({"input_tokens": len(ids)}), media_type="application/json")


async def read(serving: Serving, request: Request, kind: type[Body]) -> tuple[Caller, Body, LocalModel, str | None]:
    caller = serving.authenticate(request)
    version = request.headers.get(VERSION)
    if version is not None and not DATE.fullmatch(version):
        message = f"{VERSION}: {version[:40]!r} is no date, such as 2023-06-01"
        raise APIError(400, "invalid_request", message, VERSION)
    body, _ = await read_body(serving, request, caller, kind)
    local, adapter = find_local(serving, caller, body.model)  # type: ignore[attr-defined]
    return caller, body, local, adapter
