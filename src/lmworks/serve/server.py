"""The web server: uvicorn, with errors in our form, patience that ends, and a shutdown that finishes its work."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..spec import LMWorksError
from .errors import body_of
from .limits import Refusal
from .logs import log
from .serving import Serving

HEADER_SECONDS = 20.0  # for the headers of a request to arrive
KEEP_ALIVE_S = 75  # longer than proxies keep idle connections: it is theirs to close them
LAST_WORDS_S = 5.0  # for those who were cut off to be told so


class Protocol(H11Protocol):
    """What is no HTTP is told so as an error object; who does not get to the point is not waited for."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.headers_came()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.headers_came()
        elif self.deadline is None and self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self.await_headers()  # another request has begun on this connection

    def await_headers(self) -> None:
        self.deadline = self.loop.call_later(HEADER_SECONDS, self.too_slow)

    def headers_came(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def too_slow(self) -> None:
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Called where the request cannot be read: its headers are too long, or it is something else."""
        refusal = Refusal(400, "invalid_http", "this is no valid HTTP request, or its headers are too long")
        content = json.dumps(body_of(refusal)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
        ]
        try:
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer is under way: there is no place for another
        self.transport.close()


class Server(uvicorn.Server):
    """SIGTERM or Ctrl-C: no more requests, those under way are finished, at most `seconds` long. Twice: at once."""

    def __init__(self, config: uvicorn.Config, serving: Serving, seconds: float) -> None:
        super().__init__(config)
        self.serving, self.seconds = serving, seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # the engine's process sees its wire end, and follows
        self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """The models first: nobody can connect before they are ready. Returns when all is over."""
        await self.serving.start()
        try:
            await super().serve(sockets)
        finally:
            await self.serving.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for one in sockets or ():  # connections of before must not keep the next server from this address
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("shutting down", extra={"seconds": self.seconds})
        draining = asyncio.create_task(self.serving.drain(self.seconds))
        await asyncio.sleep(0)  # `draining` is set before anything else comes in
        await super().shutdown(sockets)
        log.info("shut down", extra={"cut_off": await draining})


def bound(host: str, port: int) -> socket.socket:
    """Taken before models are loaded, which may take minutes. Port 0 is any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        # Or another server could take it, too, until one of them listens.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except (OSError, OverflowError) as error:
        found.close()
        raise LMWorksError(f"--host {host} --port {port}: {getattr(error, 'strerror', None) or error}") from None
    return found


def make_server(
    app: FastAPI,
    serving: Serving,
    drain_seconds: float = 30.0,
    tls_cert: str | None = None,
    tls_key: str | None = None,
) -> Server:
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=serving.settings.current().limits.header_bytes,
        timeout_graceful_shutdown=int(drain_seconds + LAST_WORDS_S),
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
    return Server(config, serving, drain_seconds)
