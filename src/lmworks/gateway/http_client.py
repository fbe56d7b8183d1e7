"""The servers' side of the hot path: connections to one server, kept alive, each with one request at a time."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from ..spec import SpecError

MAX_IDLE = 256  # connections that are kept for later


class UpstreamError(Exception):
    """A server that cannot be reached, or was lost before its answer had ended."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind  # connect, lost, invalid, timeout


class Receiver(Protocol):
    """Who is told of an answer, in callbacks. After `failed` or `complete` there are none."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def data(self, part: bytes) -> None: ...

    def complete(self) -> None: ...

    def failed(self, error: UpstreamError) -> None: ...


class ServerConnection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.receiver: Receiver | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[bytes, bytes] = {}
        self.untouched = True  # nothing of this answer has come
        self.served = 0  # answers so far
        self.lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.pool.forget(self)
        if self.receiver is None:
            return
        if isinstance(exc, ssl.SSLError):
            self.fail(UpstreamError("connect", f"the server broke off TLS: {exc.reason}"))
            return
        if self.ended_by_closing():
            return
        # A server may close an idle connection while a request is on its way: that is no failure of the server.
        kind = "stale" if self.untouched and self.served else "lost"
        # With TLS 1.3 a server says only now that it does not believe our certificate; some just hang up.
        why = " (at once: is the certificate one that it believes?)" if self.untouched and self.pool.tls else ""
        self.fail(UpstreamError(kind, f"the server closed the connection before its answer had ended{why}"))

    def ended_by_closing(self) -> bool:
        """An answer without length or chunks ends with its connection."""
        framed = b"content-length" in self.headers or b"chunked" in self.headers.get(b"transfer-encoding", b"")
        if self.untouched or framed:
            return False
        self.on_message_complete()
        return True

    def send(self, request: bytes, receiver: Receiver) -> None:
        self.receiver, self.untouched, self.headers = receiver, True, {}
        self.transport.write(request)

    def abort(self) -> None:
        """The answer is not wanted any more: its server sees the connection close, and stops."""
        self.receiver = None
        self.transport.abort()

    def pause(self, paused: bool) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading() if paused else self.transport.resume_reading()

    def fail(self, error: UpstreamError) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.failed(error)

    # --- httptools ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.receiver is None:
            self.transport.abort()  # it answers what nobody asked
            return
        self.untouched = False
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(UpstreamError("invalid", f"the server did not answer in HTTP: {error}"))
            self.transport.abort()

    def on_message_begin(self) -> None:
        if self.receiver is None:  # an answer too many, after one that was asked for: it must not be the next one's
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self.receiver is not None and self.parser.get_status_code() >= 200:
            self.receiver.head(self.parser.get_status_code(), self.headers)

    def on_body(self, part: bytes) -> None:
        if self.receiver is not None:
            self.receiver.data(part)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() < 200:  # 100 Continue
            self.headers = {}
            return
        receiver, self.receiver = self.receiver, None
        self.served += 1
        if not self.lost and not self.transport.is_closing():
            if self.parser.should_keep_alive():
                self.transport.resume_reading()  # its client may have been too slow for the last bytes
                self.pool.release(self)
            else:
                self.transport.close()
        if receiver is not None:
            receiver.complete()


class ConnectionPool:
    """Connections to one address."""

    def __init__(
        self, url: str, connect_seconds: float = 5.0, tls: Callable[[], ssl.SSLContext] = ssl.create_default_context
    ) -> None:
        """`tls` is asked at each connection to an https address: certificates change."""
        parts = urlsplit(url)
        self.tls = tls if parts.scheme == "https" else None
        self.tls_name: str | None = None  # in the server's certificate; None: its host
        self.host, self.port = parts.hostname or "", parts.port or (443 if self.tls else 80)
        self.host_header = parts.netloc.rpartition("@")[2].encode()
        self.connect_seconds = connect_seconds
        self.idle: deque[ServerConnection] = deque()
        self.closed = False

    async def acquire(self, fresh: bool = False) -> ServerConnection:
        while self.idle and not fresh:
            connection = self.idle.pop()
            if not connection.lost and not connection.transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_seconds):
                _, connection = await loop.create_connection(
                    lambda: ServerConnection(self),
                    self.host,
                    self.port,
                    ssl=self.tls() if self.tls else None,
                    server_hostname=self.tls_name if self.tls else None,
                )
        except TimeoutError:
            raise UpstreamError("connect", f"no connection within {self.connect_seconds:g} s") from None
        except (OSError, SpecError) as error:
            raise UpstreamError("connect", f"no connection: {getattr(error, 'strerror', None) or error}") from None
        return connection

    def release(self, connection: ServerConnection) -> None:
        if self.closed or len(self.idle) >= MAX_IDLE:
            connection.transport.close()
        else:
            self.idle.append(connection)

    def forget(self, connection: ServerConnection) -> None:
        if connection in self.idle:
            self.idle.remove(connection)

    def close(self) -> None:
        self.closed = True
        while self.idle:
            self.idle.pop().transport.close()

    def encode(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b"") -> bytes:
        """A request as bytes."""
        lines = b"".join(b"%b: %b\r\n" % line for line in headers)
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode(), path.encode(), self.host_header)
        length = b"content-length: %d\r\n" % len(body) if body or method == "POST" else b""
        return b"".join((head, lines, length, b"\r\n", body))


class WholeAnswer:
    """A receiver that keeps everything."""

    def __init__(self) -> None:
        self.status, self.headers = 0, dict[bytes, bytes]()
        self.parts: list[bytes] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.headers = status, headers

    def data(self, part: bytes) -> None:
        self.parts.append(part)

    def complete(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def failed(self, error: UpstreamError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


async def fetch(
    pool: ConnectionPool, method: str, path: str, headers: list[tuple[bytes, bytes]], seconds: float, body: bytes = b""
) -> WholeAnswer:
    """A whole answer; raises UpstreamError."""
    try:
        async with asyncio.timeout(seconds):
            connection, answer = await pool.acquire(), WholeAnswer()
            try:
                connection.send(pool.encode(method, path, headers, body), answer)
                await answer.ended
            except BaseException:
                connection.abort()
                raise
            return answer
    except TimeoutError:
        raise UpstreamError("timeout", f"no answer within {seconds:g} s") from None
