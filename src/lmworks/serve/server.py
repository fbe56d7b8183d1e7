"""The web server: uvicorn with connection limits, deadlines and a graceful shutdown that drains."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..spec import LMWorksError
from .connection import Connection, ConnectionLimiter
from .reload import has_terminal
from .serving import Serving
from .telemetry import log
from .tls import Certificates, TLSFiles, listening_context

KEEP_ALIVE_S = 75  # longer than proxies' own keep-alive, so that they close first
NOTICE_S = 3.0
CLOSE_GRACE_S = 5.0  # for clients that were cut off to read the error


class Server(uvicorn.Server):
    """SIGTERM or Ctrl-C: no more requests, those under way are finished, at most `seconds` long. Twice: at once."""

    def __init__(self, config: uvicorn.Config, serving: Serving, seconds: float) -> None:
        super().__init__(config)
        self.serving, self.seconds = serving, seconds
        self.notice = 0.0  # seconds between a failing /ready and closing the socket, for load balancers

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """With several processes, the engine host handles signals."""
        if self.serving.engine_host is not None:
            yield
            return
        if not has_terminal() and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, lambda *_: self.serving.check_files())
        with super().capture_signals():
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # the engine process sees its socket close, and ends
        self.should_exit = True
        self.notice = min(NOTICE_S, self.seconds) if sig == signal.SIGTERM else 0.0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the models, then accepts connections; returns after the shutdown."""
        await self.serving.start()
        await self.serving.workers.warm()
        if self.serving.batches is not None:
            app: Any = self.config.app
            self.serving.batches.start(self.serving, app)
        gc.collect()
        gc.freeze()  # startup objects stay: collecting them blocked the event loop for 0.3 s
        try:
            await super().serve(sockets)
        finally:
            await self.serving.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for one in sockets or ():  # connections in TIME_WAIT must not block the next server
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("shutting down", extra={"seconds": self.seconds})
        draining = asyncio.create_task(self.serving.drain(self.seconds))
        await asyncio.sleep(self.notice)  # new requests get `shutting_down`, and /ready is 503
        await super().shutdown(sockets)
        log.info("shut down", extra={"cut_off": await draining})


def bind_socket(host: str, port: int) -> socket.socket:
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
    tls: TLSFiles | None = None,
    *,
    processes: int = 1,
) -> Server:
    """One of so many `processes` on a socket: each takes its share of the connections."""
    protocol: Any = partial(Connection, limiter=ConnectionLimiter(serving.settings, processes))
    factory: Any = None
    if tls is not None:
        certificates = serving.certificates = Certificates(tls, server=True)
        factory = lambda *_: listening_context(tls, certificates.context)  # noqa: E731
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain_seconds + CLOSE_GRACE_S),
        ssl_context_factory=factory,
        proxy_headers=False,  # anybody can send X-Forwarded-For
    )
    return Server(config, serving, drain_seconds)
