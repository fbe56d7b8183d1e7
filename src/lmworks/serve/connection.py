"""One HTTP connection: a deadline in each of its states, and parsing in slices so that others are served meanwhile.

    headers ─▶ body ─▶ answer ─▶ idle ─▶ headers …
                          └────▶ closing (what the client still sends is dropped)

Each transition has a timeout: headers, body, keep-alive, writes that the client does not read, and closing. Connection
limits, in all and per address, are checked before anything of a request is read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import resource
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .body import BODY_SECONDS
from .errors import error_body
from .keys import Settings
from .limits import APIError

HEADER_SECONDS = 20.0  # for the headers of a request to arrive
GRACE_SECONDS = 5.0  # beyond that, for the reader of the body to time out first
WRITE_SECONDS = 30.0  # for a client to read what was written, or at least SLOWEST bytes of it a second
SLOWEST = 4096
LINGER_SECONDS = 2.0  # for a client to read an answer that came before it had sent all
SLICE = 4096  # bytes that are parsed at once: some hundred chunks, or headers
MAX_CHUNKS = 8192  # of one body: each costs as much as 4 KiB of it
MAX_HEADERS = 256
HEADERS_END = re.compile(rb"\n\r?\n")
FOLDED = re.compile(rb"\n[ \t]|\r[^\n]")
MAX_CHUNK_DIGITS = 16
# Of these two say two things, and which one counts differs between servers.
SINGLE = {b"host", b"authorization", b"x-api-key", b"content-type", b"content-length", b"transfer-encoding"}
SPARE_FILES = 128  # descriptors that are needed for other things than connections


class ConnectionLimiter:
    """Counts open connections, in all and per client address."""

    def __init__(self, settings: Settings, processes: int = 1) -> None:
        self.settings, self.processes = settings, processes
        self.total = 0
        self.addresses: Counter[str] = Counter()
        self.files = raise_file_limit(settings.current().limits.connections + SPARE_FILES)

    def acquire(self, address: str) -> APIError | None:
        """The error where this connection exceeds a limit. It is counted all the same, until `release`."""
        self.total += 1
        self.addresses[address] += 1
        limits = self.settings.current().limits
        most = min(-(-limits.connections // self.processes), self.files - SPARE_FILES)
        if self.total > most:
            return connection_limit_error(f"the server has {most} connections, the limit")
        each = -(-limits.connections_per_address // self.processes)
        if each and self.addresses[address] > each:
            return connection_limit_error(f"your address has {each} connections to this server, the limit")
        return None

    def release(self, address: str) -> None:
        self.total -= 1
        self.addresses[address] -= 1
        if not self.addresses[address]:
            del self.addresses[address]

    @property
    def overloaded(self) -> bool:
        """Too many even to answer with an error: connections are aborted."""
        return self.total > 2 * self.settings.current().limits.connections


def connection_limit_error(message: str) -> APIError:
    return APIError(503, "too_many_connections", message, retry_after=1)


def raise_file_limit(wanted: int) -> int:
    """Raises the soft limit of open files to `wanted` where the hard limit allows it; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def client_address(client: tuple[str, int] | None) -> str:
    """The address that a connection is counted under. IPv6 hosts own a /64, so their prefix is used."""
    if client is None:
        return ""
    try:
        found = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0]
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.IPv6Network((found, 64), strict=False))


class StrictH11Connection(h11.Connection):
    """Rejects requests that are valid for h11 but too expensive, or ambiguous (request smuggling)."""

    chunks = 0
    before_chunk = False  # what comes next is the line of a chunk's size
    error: APIError | None = None

    def next_event(self) -> Any:
        self.check_lines()
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
            self.check_request(event)
        elif isinstance(event, h11.Data):
            self.before_chunk = event.chunk_end
        if isinstance(event, h11.EndOfMessage):
            self.before_chunk = False
        if isinstance(event, h11.Data) and event.chunk_start:
            self.chunks += 1
            if self.chunks > MAX_CHUNKS:
                message = f"the body comes in more than {MAX_CHUNKS} chunks: send larger ones, or content-length"
                self.reject(APIError(413, "body_too_large", message))
        return event

    def check_lines(self) -> None:
        """Lines that h11 reads generously: others may end them elsewhere."""
        if self.their_state is h11.IDLE:
            waiting, _ = self.trailing_data
            end = HEADERS_END.search(waiting)
            if FOLDED.search(waiting, 0, end.start() if end else len(waiting)):
                self.reject(invalid_http("a header goes on in a second line, or has a carriage return"))
        elif self.before_chunk:
            line = self.trailing_data[0].removeprefix(b"\r\n").partition(b"\n")[0]
            if b"\r" in line[:-1] or len(line.partition(b";")[0]) > MAX_CHUNK_DIGITS:
                self.reject(invalid_http("the size of a chunk is not a line of its own"))

    def check_request(self, request: h11.Request) -> None:
        names = [name for name, _ in request.headers]
        if b"content-length" in names and b"transfer-encoding" in names:  # RFC 9112 6.1: request smuggling
            self.reject(invalid_http("a request has content-length or transfer-encoding, not both"))
        twice = next((name for name in SINGLE if names.count(name) > 1), None)
        if twice is not None:
            self.reject(invalid_http(f"the header {twice.decode()} is there twice"))
        if request.http_version not in (b"1.1", b"1.0"):
            self.reject(invalid_http("this server speaks HTTP/1.1"))
        self.before_chunk = b"transfer-encoding" in names

    def reject(self, error: APIError) -> None:
        self.error = error
        raise h11.RemoteProtocolError(str(error))


def invalid_http(message: str) -> APIError:
    return APIError(400, "invalid_http", message)


class TransportProxy:
    """The transport that uvicorn sees: closing lingers while a client still sends, and writes have a timeout."""

    def __init__(self, inner: asyncio.Transport, connection: Connection) -> None:
        self.inner, self.connection = inner, connection
        self.paused = False  # uvicorn has paused reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, data: bytes) -> None:
        self.inner.write(data)
        self.connection.on_write(len(data))

    def close(self) -> None:
        self.connection.close_gracefully()

    def is_closing(self) -> bool:
        return self.connection.lingering or self.inner.is_closing()

    def pause_reading(self) -> None:
        self.paused = True
        self.update_reading()

    def resume_reading(self) -> None:
        self.paused = False
        self.update_reading()

    def update_reading(self) -> None:
        """Reading is paused until everything that was read is parsed."""
        if self.inner.is_closing():
            return
        if not self.connection.lingering and (self.paused or self.connection.unparsed):
            self.inner.pause_reading()
        else:
            self.inner.resume_reading()


class Connection(H11Protocol):
    """uvicorn's h11 protocol with deadlines, connection limits and JSON errors."""

    proxy: TransportProxy

    def __init__(self, *given: Any, limiter: ConnectionLimiter, **named: Any) -> None:
        super().__init__(*given, **named)
        header_bytes = limiter.settings.current().limits.header_bytes
        self.conn: StrictH11Connection = StrictH11Connection(h11.SERVER, header_bytes)
        self.app_state = {**self.app_state, "unread": self.request_incomplete}
        self.limiter, self.address = limiter, ""
        self.deadline: asyncio.TimerHandle | None = None  # of headers, body, or the end
        self.lingering = False  # input is dropped until the connection is closed
        self.unparsed = b""
        self.lines, self.tail = 0, b""  # of headers: how many so far, and their last bytes
        self.written = 0
        self.delivered = 0  # of those, read by the client at the last check
        self.expected = 0  # how many more it must have read by the next check
        self.write_timer: asyncio.TimerHandle | None = None

    # --- begin and end ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.proxy = TransportProxy(transport, self)
        super().connection_made(self.proxy)  # type: ignore[arg-type]
        self.address = client_address(self.client)
        error = self.limiter.acquire(self.address)
        self.set_deadline(HEADER_SECONDS)
        if error is not None:
            if self.limiter.overloaded:
                transport.abort()
            else:
                self.send_error(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limiter.release(self.address)
        self.set_deadline(None)
        if self.write_timer is not None:
            self.write_timer.cancel()
        self.unparsed = b""
        super().connection_lost(exc)

    def close_gracefully(self, linger: bool = False) -> None:
        """A client that still sends would lose the answer to a reset: half-close, and linger for LINGER_SECONDS."""
        transport = self.proxy.inner
        if self.lingering or transport.is_closing():
            return
        if not (linger or self.request_incomplete() or self.unparsed):
            transport.close()
            return
        self.lingering, self.unparsed = True, b""
        self._unset_keepalive_if_required()
        if transport.can_write_eof():
            transport.write_eof()
        self.proxy.update_reading()
        self.set_deadline(LINGER_SECONDS)

    def set_deadline(self, seconds: float | None) -> None:
        """Aborts the connection unless its current state ends within so many seconds; None: no deadline."""
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = None if seconds is None else self.loop.call_later(seconds, self.proxy.inner.abort)

    # --- reading ----------------------------------------------------------------------------------------

    def request_incomplete(self) -> bool:
        """The client has not sent all of its request."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def data_received(self, data: bytes) -> None:
        if not self.lingering:
            self.unparsed += data
            self.parse()

    def parse(self) -> None:
        """One slice at a time, so that the event loop serves other connections in between."""
        if self.lingering or self.proxy.inner.is_closing():
            return
        part, self.unparsed = self.unparsed[:SLICE], self.unparsed[SLICE:]
        if self.conn.their_state is h11.IDLE and self.too_many_headers(part):
            self.send_400_response("")
            return
        super().data_received(part)
        if self.unparsed and not self.lingering:
            self.loop.call_soon(self.parse)
        self.proxy.update_reading()

    def too_many_headers(self, part: bytes) -> bool:
        """h11 has no limit on the number of headers, and takes microseconds for each."""
        seen = self.tail + part
        end = HEADERS_END.search(seen)
        self.lines += seen.count(b"\n", len(self.tail), end.start() if end else len(seen))
        self.tail = seen[-2:]
        return self.lines > MAX_HEADERS

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.lingering or self.proxy.inner.is_closing():
            return
        if self.cycle is not before:
            self.lines, self.tail = 0, b""
            self.set_deadline(BODY_SECONDS + GRACE_SECONDS)
        if self.conn.their_state is h11.IDLE:
            if self.deadline is None and self.timeout_keep_alive_task is None:
                self.set_deadline(HEADER_SECONDS)  # another request has begun on this connection
        elif self.conn.their_state is not h11.SEND_BODY:
            self.set_deadline(None)

    # --- writing ------------------------------------------------------------------------------------------

    def on_write(self, count: int) -> None:
        self.written += count
        if self.write_timer is None and self.proxy.inner.get_write_buffer_size():
            self.schedule_write_check()

    def schedule_write_check(self) -> None:
        waiting = self.proxy.inner.get_write_buffer_size()
        self.delivered = self.written - waiting
        self.expected = min(waiting, int(SLOWEST * WRITE_SECONDS))
        self.write_timer = self.loop.call_later(WRITE_SECONDS, self.check_writes)

    def check_writes(self) -> None:
        """Aborts a connection whose client does not read its answer."""
        self.write_timer = None
        waiting = self.proxy.inner.get_write_buffer_size()
        if not waiting:
            return
        if self.written - waiting - self.delivered < self.expected:
            self.proxy.inner.abort()
        else:
            self.schedule_write_check()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.close_gracefully()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn where a request cannot be parsed."""
        self.send_error(
            self.conn.error
            or APIError(400, "invalid_http", "this is no valid HTTP request, or its headers are too long")
        )

    def send_error(self, error: APIError) -> None:
        content = json.dumps(error_body(error)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
            *([("retry-after", str(int(error.retry_after)))] if error.retry_after else []),
        ]
        head = h11.Response(status_code=error.status, headers=headers)
        try:
            for event in (head, h11.Data(content), h11.EndOfMessage()):
                self.proxy.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # a response has begun: no second one can be sent
        self.close_gracefully(linger=True)
