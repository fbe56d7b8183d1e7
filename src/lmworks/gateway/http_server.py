"""The clients' side of the hot path: HTTP/1.1 on asyncio's protocols, parsed by httptools (llhttp, nginx's pace).

A chunk of a stream goes from an upstream socket to a client's socket in one callback, without a task or a queue between
them: what frameworks of coroutines spend on each chunk is most of what a gateway would add to it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httptools

from ..serve.body import BODY_SECONDS, NestingLimiter
from ..serve.connection import HEADER_SECONDS, LINGER_SECONDS, MAX_HEADERS, SINGLE, WRITE_SECONDS
from ..serve.errors import error_json
from ..serve.limits import APIError
from ..serve.server import KEEP_ALIVE_S

HIGH_WATER = 256 * 2**10  # bytes that wait for a slow client before its server is paused
REASONS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class HTTPRequest:
    """One request, whole. Names of headers are in lower case; of several of one name the last counts."""

    method: str = ""
    target: bytes = b""  # as it was sent: path and query
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    client: str = ""  # its address

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("latin-1")

    def header(self, name: str) -> str | None:
        found = self.headers.get(name.encode())
        return None if found is None else found.decode("latin-1")


Handler = Callable[[HTTPRequest, "ClientConnection"], Awaitable[None]]


@dataclass(frozen=True)
class EdgeLimits:
    """What a client may send before anything of it is looked at."""

    body_bytes: int
    header_bytes: int
    connections: int
    depth: int
    values: int


class ClientConnection(asyncio.Protocol):
    """One client: requests one after the other, each given whole to `handle`, which answers through this object.

    `begin`, `write`, `end` send an answer as it comes; `respond` one that is known as a whole.
    """

    transport: asyncio.Transport

    def __init__(
        self, handle: Handler, limits: Callable[[], EdgeLimits], open_connections: set[ClientConnection]
    ) -> None:
        self.handle, self.limits, self.open_connections = handle, limits, open_connections
        self.loop = asyncio.get_running_loop()
        self.parser = httptools.HttpRequestParser(self)
        self.address = ""
        self.request = HTTPRequest()
        self.parts: list[bytes] = []
        self.size = 0  # of the headers, then of the body
        self.lines = 0  # of the headers
        self.nesting = NestingLimiter(0, 0)  # of the body
        self.task: asyncio.Task[None] | None = None
        self.waiting: list[bytes] = []  # what a client sent before its last answer had ended
        self.keep_alive = True
        self.chunked = False
        self.started = self.ended = False  # the answer
        self.closing = False  # this answer is the connection's last
        self.deadline: asyncio.TimerHandle | None = None
        self.stall: asyncio.TimerHandle | None = None
        self.paused = False  # the client reads too slowly
        self.on_pause: Callable[[bool], None] | None = None  # told when that changes

    # --- begin and end of the connection ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.set_write_buffer_limits(HIGH_WATER)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        self.open_connections.add(self)
        if len(self.open_connections) > self.limits().connections:
            self.refuse(APIError(503, "too_many_connections", "the gateway has too many connections", retry_after=1))
            return
        self.set_deadline(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.discard(self)
        self.set_deadline(None)
        if self.stall is not None:
            self.stall.cancel()
        if self.task is not None:
            self.task.cancel()

    def set_deadline(self, seconds: float | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def pause_writing(self) -> None:
        self.paused = True
        self.stall = self.loop.call_later(WRITE_SECONDS, self.transport.abort)
        if self.on_pause is not None:
            self.on_pause(True)

    def resume_writing(self) -> None:
        self.paused = False
        if self.stall is not None:
            self.stall.cancel()
        if self.on_pause is not None:
            self.on_pause(False)

    def shut(self) -> None:
        """No further requests: an idle connection is closed, another after its answer."""
        self.closing = True
        if self.task is None:
            self.transport.close()

    # --- reading ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.task is not None:  # pipelined: parsed when the answer before it has ended
            self.waiting.append(data)
            self.transport.pause_reading()
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.refuse(APIError(400, "invalid_http", "this server does not change protocols"))
        except httptools.HttpParserCallbackError as error:
            found = error.__context__
            self.refuse(found if isinstance(found, APIError) else APIError(500, "internal_error", "the gateway failed"))
        except httptools.HttpParserError:
            self.refuse(APIError(400, "invalid_http", "this is no valid HTTP request"))

    def on_message_begin(self) -> None:
        if self.task is not None:
            raise APIError(400, "invalid_http", "requests must not be pipelined: wait for the answer")
        self.request = HTTPRequest(client=self.address)
        self.parts, self.size, self.lines = [], 0, 0
        self.set_deadline(HEADER_SECONDS)

    def on_url(self, url: bytes) -> None:
        self.request.target += url
        self.count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.request.method:  # after the body: trailers change nothing
            return
        self.count(len(name) + len(value))
        name = name.lower()
        if name in SINGLE and name in self.request.headers:  # the next server may believe the other one
            raise APIError(400, "invalid_http", f"the header {name.decode()} is there twice")
        self.request.headers[name] = value
        self.lines += 1
        if self.lines > MAX_HEADERS:
            raise APIError(431, "headers_too_large", f"more than {MAX_HEADERS} headers")

    def count(self, more: int) -> None:
        self.size += more
        limit = self.limits().header_bytes
        if self.size > limit:
            raise APIError(431, "headers_too_large", f"the headers have more than {limit} bytes, the limit")

    def on_headers_complete(self) -> None:
        self.request.method = self.parser.get_method().decode("latin-1")
        self.keep_alive = self.parser.should_keep_alive()
        self.size = 0
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise APIError(400, "invalid_http", "this gateway speaks HTTP/1.1")
        if b"host" not in self.request.headers and version == "1.1":
            raise APIError(400, "invalid_http", "a request needs a host header")
        limits = self.limits()
        self.nesting = NestingLimiter(limits.depth, limits.values)
        declared = self.request.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > (limit := limits.body_bytes):
            raise APIError(413, "body_too_large", f"the body has more than {limit} bytes, the limit")
        if self.request.headers.get(b"expect", b"").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.set_deadline(BODY_SECONDS)

    def on_body(self, part: bytes) -> None:
        self.size += len(part)
        if self.size > (limit := self.limits().body_bytes):
            raise APIError(413, "body_too_large", f"the body has more than {limit} bytes, the limit")
        self.nesting.feed(part)
        self.parts.append(part)

    def on_message_complete(self) -> None:
        self.set_deadline(None)
        self.request.body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts = []
        self.started = self.ended = False
        self.task = self.loop.create_task(self.run())

    async def run(self) -> None:
        try:
            await self.handle(self.request, self)
        except asyncio.CancelledError:
            if not self.transport.is_closing():
                raise
        finally:
            self.on_pause = None
            self.finish()

    def finish(self) -> None:
        """After an answer: the next request of this client, or the end."""
        self.task = None
        if self.transport.is_closing():
            return
        if not self.ended or not self.keep_alive or self.closing:
            self.transport.close()
            return
        self.set_deadline(KEEP_ALIVE_S)
        if self.waiting:
            waiting, self.waiting = b"".join(self.waiting), []
            self.transport.resume_reading()
            self.data_received(waiting)

    # --- answers ------------------------------------------------------------------------------------------

    def begin(self, status: int, headers: Headers, length: int | None = None) -> None:
        """The head of an answer; without a `length` its body is sent in chunks."""
        self.transport.write(self.head(status, headers, length))

    def head(self, status: int, headers: Headers, length: int | None) -> bytes:
        self.started = True
        self.chunked = length is None
        framing = b"transfer-encoding: chunked\r\n" if length is None else b"content-length: %d\r\n" % length
        ending = b"" if self.keep_alive and not self.closing else b"connection: close\r\n"
        lines = b"".join(b"%b: %b\r\n" % line for line in headers)
        return b"".join((REASONS.get(status) or b"HTTP/1.1 %d \r\n" % status, lines, framing, ending, b"\r\n"))

    def write(self, data: bytes) -> None:
        if data and not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def end(self) -> None:
        self.ended = True
        if self.chunked and not self.transport.is_closing():
            self.transport.write(b"0\r\n\r\n")

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self.transport.write(self.head(status, headers, len(body)) + body)  # one system call
        self.end()

    def respond_json(self, status: int, content: Any, headers: Headers | None = None) -> None:
        body = json.dumps(content).encode()
        self.respond(status, [(b"content-type", b"application/json"), *(headers or [])], body)

    def respond_error(self, error: APIError, headers: Headers | None = None) -> None:
        more = list(headers or [])
        if error.retry_after is not None:
            more.append((b"retry-after", b"%d" % math.ceil(error.retry_after)))
        if error.status == 401:
            more.append((b"www-authenticate", b"Bearer"))
        more.append((b"content-type", b"application/json"))
        self.respond(error.status, more, error_json(error, self.request.path).encode())

    def refuse(self, error: APIError) -> None:
        """A request that is not read to its end: the answer, then nothing that the client still sends is looked at."""
        self.closing = True
        if self.task is not None:  # the one before it is answered, and told that it is the last
            self.transport.pause_reading()
            return
        self.respond_error(error)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.pause_reading()
        self.set_deadline(LINGER_SECONDS)
