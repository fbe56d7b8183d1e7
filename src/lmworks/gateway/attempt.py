"""One try of a request at one server: its answer up to the first event, then whoever relays it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from .http_client import ServerConnection, UpstreamError
from .servers import Server

Headers = dict[bytes, bytes]


class Sink(Protocol):
    """Where a stream goes once it has begun."""

    def feed(self, data: bytes) -> None: ...


class Attempt:
    """`begun` is done when the answer's first bytes are there, of an error or a whole answer when all are.

    Until then another server can still be asked: nothing has been sent to the client.
    """

    def __init__(self, server: Server) -> None:
        loop = asyncio.get_running_loop()
        self.server = server
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.connection: ServerConnection | None = None
        self.status = 0
        self.headers: Headers = {}
        self.streams = False
        self.parts: list[bytes] = []  # before there is a sink
        self.sink: Sink | None = None
        self.counted = False

    async def start(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Sends the request; raises UpstreamError where no connection can be had."""
        self.server.open += 1
        self.counted = True
        fresh = False
        while True:
            self.connection = await self.server.connections.acquire(fresh)
            self.connection.send(self.server.connections.encode(method, path, headers, body), self)
            try:
                await self.begun
                return
            except UpstreamError as error:
                if error.kind != "stale":
                    raise
                fresh, self.begun = True, asyncio.get_running_loop().create_future()

    def relay_to(self, sink: Sink) -> None:
        """What has come, and what comes from now on."""
        self.sink = sink
        parts, self.parts = self.parts, []
        if parts:
            self.forward(b"".join(parts))

    def forward(self, data: bytes) -> None:
        try:
            if self.sink is not None:
                self.sink.feed(data)
        except UpstreamError as error:
            if self.connection is not None:
                self.connection.abort()
            self.failed(error)

    def pause(self, paused: bool) -> None:
        if self.connection is not None and self.connection.receiver is self:
            self.connection.pause(paused)

    def close(self) -> None:
        """Its server is not waited for any more; one that has not finished sees the connection close."""
        if self.counted:
            self.counted = False
            self.server.open -= 1
        if self.connection is not None and self.connection.receiver is self:
            self.connection.abort()
        for future in (self.begun, self.ended):
            if future.done() and not future.cancelled():
                future.exception()  # seen: asyncio does not complain about it
            future.cancel()

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)

    # --- as the connection's receiver --------------------------------------------------------------------

    def head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.streams = status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def data(self, part: bytes) -> None:
        if self.sink is not None:
            self.forward(part)
            return
        self.parts.append(part)
        if self.streams and not self.begun.done():
            self.begun.set_result(None)

    def complete(self) -> None:
        resolve(self.ended)
        resolve(self.begun)

    def failed(self, error: UpstreamError) -> None:
        if not self.begun.done():
            self.begun.set_exception(error)
        elif not self.ended.done():
            self.ended.set_exception(error)


def resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
