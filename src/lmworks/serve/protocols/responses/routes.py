"""Routes of the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, TypeAdapter
from starlette.responses import Response
from typing_extensions import TypedDict

from ...body import LARGE_BODY_BYTES, read_body
from ...chat import make_generation
from ...generation_request import collect_output, identity
from ...openapi import STREAM, error_responses, request_body
from ...serving import Serving
from ...sse import encode_in_slices, start_stream, while_connected
from ..local import find_local
from .bodies import InputItem, ResponsesRequest
from .handler import ResponseHandler
from .store import Stored
from .translate import SCHEMA_FIELD, chat_request

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class ResponseObject(BaseModel):
    """The fields that every response has; the others are OpenAI's."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]


class DeletedResponse(TypedDict):
    id: str
    object: str
    deleted: bool


def add_responses_routes(app: FastAPI, serving: Serving) -> None:
    @app.post(
        "/v1/responses",
        name="create_response",
        openapi_extra=request_body(ResponsesRequest),
        response_model=ResponseObject,
        responses={200: {"content": STREAM}, **error_responses()},
    )
    async def create(request: Request) -> Response:
        """Create a response (OpenAI's Responses API)."""
        return await create_response(serving, request)

    @app.get(
        "/v1/responses/{response_id}",
        name="retrieve_response",
        response_model=ResponseObject,
        responses=error_responses(401, 404, 503),
    )
    async def retrieve(request: Request, response_id: str) -> Response:
        """A response that was stored."""
        caller = serving.authenticate(request)
        found: Stored = await serving.stored_responses("get", caller.tenant, response_id)
        return Response(await asyncio.to_thread(encode_in_slices, found.response), media_type="application/json")

    @app.delete("/v1/responses/{response_id}", name="delete_response", responses=error_responses(401, 404, 503))
    async def delete(request: Request, response_id: str) -> DeletedResponse:
        """Forget a response."""
        caller = serving.authenticate(request)
        await serving.stored_responses("delete", caller.tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}


async def create_response(serving: Serving, request: Request) -> Response:
    caller = serving.authenticate(request)
    body, raw = await read_body(serving, request, caller, ResponsesRequest)
    local, adapter = find_local(serving, caller, body.model)
    tenant, limits = caller.tenant, caller.limits
    own = (
        [{"type": "message", "role": "user", "content": body.input}]
        if isinstance(body.input, str)
        else [item.model_dump(exclude_none=True) for item in body.input]
    )
    earlier = await serving.stored_responses("conversation", tenant, body.previous_response_id, limits)
    chat = await make_generation(
        serving,
        caller,
        local,
        adapter,
        chat_request(body, ITEMS.validate_python([*earlier, *own]), limits),
        SCHEMA_FIELD,
    )
    handler = ResponseHandler(chat, body, len(raw) > LARGE_BODY_BYTES, **identity(body.continuation, "id", "created"))

    async def store() -> None:
        if body.store is not False and handler.done is not None:
            size = len(await asyncio.to_thread(encode_in_slices, [handler.done, own]))
            await serving.stored_responses("put", tenant, Stored(handler.done, own, size), limits)

    async def lines() -> AsyncGenerator[bytes, None]:
        async with aclosing(handler.stream()) as events:
            stored = False
            async for one in events:
                if handler.done is not None and not stored:
                    await store()  # before the client knows of its end
                    stored = True
                yield one

    if body.stream:
        return await start_stream(request, lines())
    output = await while_connected(request.receive, collect_output(chat.generation))
    content = await asyncio.to_thread(lambda: encode_in_slices(handler.full_response(output)))
    await store()
    return Response(content, media_type="application/json")
