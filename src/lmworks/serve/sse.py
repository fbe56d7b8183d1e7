"""Responses: JSON, server-sent events (SSE), and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import error_body, to_api_error
from .telemetry import log, log_fields_of

DONE = b"data: [DONE]\n\n"
STALLED_S = 30.0  # a client that reads nothing for so long is disconnected
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

SLICE = 256  # log-probabilities that are encoded at once

Found = TypeVar("Found")


def to_json(answer: Mapping[str, Any]) -> str:
    """JSON of a whole response, encoded list by list: the encoder holds the GIL."""
    parts = (f"{encode(name)}:{encode_in_slices(each)}" for name, each in answer.items() if name != "choices")
    return f'{{{",".join(parts)},"choices":[{",".join(map(encode_in_slices, answer["choices"]))}]}}'


def encode_in_slices(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{encode(name)}:{encode_in_slices(each)}' for name, each in value.items())}}}"
    if not isinstance(value, list):
        return encode(value)
    parts = (encode(value[at : at + SLICE])[1:-1] for at in range(0, len(value), SLICE))
    return f"[{','.join(parts)}]"


def sse_event(chunk: Any, to_text: Callable[[Any], str] = encode) -> bytes:
    """Three characters are escaped: they do not end a line in SSE, but many clients split there."""
    text = to_text(chunk)
    text = text.replace("\u0085", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return f"data: {text}\n\n".encode()


def named_event(name: str, data: Any, to_text: Callable[[Any], str] = encode) -> bytes:
    """An event of the APIs that name them."""
    return f"event: {name}\n".encode() + sse_event(data, to_text)


class EventStream(Response):
    """Sends events as they come. When the client disconnects, or they end, their generator is closed at once.

    An error on the way is a last line with an error object. A stream without `[DONE]` at its end is not complete.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.first, self.rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self.write(scope, send))
        except ClientDisconnect:
            log_fields_of(scope)["failed"] = "client_left"
        except TimeoutError:
            log_fields_of(scope)["failed"] = "client_stalled"
            raise ClientDisconnect from None
        finally:
            await self.rest.aclose()

    async def write(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self.put(send, self.first)
        try:
            async for one in self.rest:
                await self.put(send, one)
        except TimeoutError:
            raise
        except Exception as error:
            api_error = to_api_error(error)
            log_fields_of(scope)["failed"] = api_error.code
            if api_error.code == "internal_error":
                log.error("a stream failed", exc_info=error)
            await self.put(send, sse_event(error_body(api_error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def put(self, send: Send, one: bytes) -> None:
        """Times out where a client does not read."""
        async with asyncio.timeout(STALLED_S):
            await send({"type": "http.response.body", "body": one, "more_body": True})


async def start_stream(request: Request, lines: AsyncGenerator[bytes, None]) -> EventStream:
    """Waits for the first event: an error before it still has an HTTP status of its own."""
    try:
        return EventStream(await while_connected(request.receive, anext(lines)), lines)
    except BaseException:
        await lines.aclose()
        raise


async def while_connected(receive: Receive, work: Awaitable[Found]) -> Found:
    """The result; cancelled when the client disconnects, which raises ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        # Cancelled tasks have released what they held once these have ended.
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
