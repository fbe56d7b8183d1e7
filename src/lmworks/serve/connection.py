"""One connection: a deadline in each of its states, and no more work at once than others can wait for.

    headers ─▶ body ─▶ answer ─▶ idle ─▶ headers …
                          └────▶ closing (what the client still sends is dropped)

Each arrow is due within seconds, whatever the client does: its headers, its body, the end of an idle connection, bytes
that it does not take, and a connection that was told to end. Limits on how many there may be, in all and from one
address, hold before anything of a request is read.
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
from .errors import body_of
from .keys import Settings
from .limits import Refusal

HEADER_SECONDS = 20.0  # for the headers of a request to arrive
GRACE_SECONDS = 5.0  # beyond that, for whoever reads the body to say so
WRITE_SECONDS = 30.0  # for a client to take what was written, or at least SLOWEST bytes of it a second
SLOWEST = 4096
LINGER_SECONDS = 2.0  # for a client to read an answer that came before it had sent all
SLICE = 4096  # bytes that are parsed at once: some hundred chunks, or headers
MAX_CHUNKS = 8192  # of one body: each costs as much as 4 KiB of it
MAX_HEADERS = 256
HEADERS_END = re.compile(rb"\n\r?\n")
SPARE_FILES = 128  # descriptors that are needed for other things than connections


class ConnectionLimiter:
    """How many connections there are, and from where."""

    def __init__(self, settings: Settings, processes: int = 1) -> None:
        self.settings, self.processes = settings, processes
        self.total = 0
        self.addresses: Counter[str] = Counter()
        self.files = open_files(settings.current().limits.connections + SPARE_FILES)

    def enter(self, address: str) -> Refusal | None:
        """Why this one is too many. It counts all the same, until it leaves."""
        self.total += 1
        self.addresses[address] += 1
        limits = self.settings.current().limits
        most = min(-(-limits.connections // self.processes), self.files - SPARE_FILES)
        if self.total > most:
            return too_many(f"the server has {most} connections, as many as it may have")
        each = -(-limits.connections_per_address // self.processes)
        if each and self.addresses[address] > each:
            return too_many(f"your address has {each} connections to this server, as many as it may have")
        return None

    def leave(self, address: str) -> None:
        self.total -= 1
        self.addresses[address] -= 1
        if not self.addresses[address]:
            del self.addresses[address]

    @property
    def overrun(self) -> bool:
        """Even those who are only told that they are too many are too many."""
        return self.total > 2 * self.settings.current().limits.connections


def too_many(message: str) -> Refusal:
    return Refusal(503, "too_many_connections", message, retry_after=1)


def open_files(wanted: int) -> int:
    """How many this process may have: as many as wanted, if the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def address_of(client: tuple[str, int] | None) -> str:
    """Whom to count a connection to. A host on IPv6 has a whole /64 of addresses to choose from."""
    if client is None:
        return ""
    try:
        found = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0]
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.IPv6Network((found, 64), strict=False))


class Framing(h11.Connection):
    """Refuses what is valid for h11 and costs too much, or may mean two things."""

    chunks = 0
    refusal: Refusal | None = None

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
            names = {name for name, _ in event.headers}
            if b"content-length" in names and b"transfer-encoding" in names:  # RFC 9112 6.1: request smuggling
                self.refuse(Refusal(400, "invalid_http", "a request has content-length or transfer-encoding, not both"))
        elif isinstance(event, h11.Data) and event.chunk_start:
            self.chunks += 1
            if self.chunks > MAX_CHUNKS:
                message = f"the body comes in more than {MAX_CHUNKS} chunks: send larger ones, or content-length"
                self.refuse(Refusal(413, "body_too_large", message))
        return event

    def refuse(self, refusal: Refusal) -> None:
        self.refusal = refusal
        raise h11.RemoteProtocolError(str(refusal))


class Wire:
    """The transport as uvicorn knows it. Closing it waits for a client that still sends; what it writes is watched."""

    def __init__(self, inner: asyncio.Transport, connection: Connection) -> None:
        self.inner, self.connection = inner, connection
        self.held = False  # uvicorn reads no more for now

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, data: bytes) -> None:
        self.inner.write(data)
        self.connection.wrote(len(data))

    def close(self) -> None:
        self.connection.hang_up()

    def is_closing(self) -> bool:
        return self.connection.left or self.inner.is_closing()

    def pause_reading(self) -> None:
        self.held = True
        self.settle()

    def resume_reading(self) -> None:
        self.held = False
        self.settle()

    def settle(self) -> None:
        """No more is read before what was read is parsed."""
        if self.inner.is_closing():
            return
        if not self.connection.left and (self.held or self.connection.unparsed):
            self.inner.pause_reading()
        else:
            self.inner.resume_reading()


class Connection(H11Protocol):
    """uvicorn's protocol, with errors in our form."""

    wire: Wire

    def __init__(self, *given: Any, limiter: ConnectionLimiter, **named: Any) -> None:
        super().__init__(*given, **named)
        header_bytes = limiter.settings.current().limits.header_bytes
        self.conn: Framing = Framing(h11.SERVER, header_bytes)
        self.app_state = {**self.app_state, "unread": self.unread}
        self.limiter, self.address = limiter, ""
        self.deadline: asyncio.TimerHandle | None = None  # of headers, body, or the end
        self.left = False  # nothing that comes is listened to any more
        self.unparsed = b""
        self.lines, self.tail = 0, b""  # of headers: how many so far, and their last bytes
        self.written = 0
        self.taken = 0  # of that, by the client, when it was last looked at
        self.expected = 0  # how many more it should have taken by the next look
        self.watch: asyncio.TimerHandle | None = None

    # --- begin and end ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.wire = Wire(transport, self)
        super().connection_made(self.wire)  # type: ignore[arg-type]
        self.address = address_of(self.client)
        refusal = self.limiter.enter(self.address)
        self.due(HEADER_SECONDS)
        if refusal is not None:
            if self.limiter.overrun:
                transport.abort()
            else:
                self.refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limiter.leave(self.address)
        self.due(None)
        if self.watch is not None:
            self.watch.cancel()
        self.unparsed = b""
        super().connection_lost(exc)

    def hang_up(self, linger: bool = False) -> None:
        """A client that still sends would lose the answer if the connection were closed: it has a moment to read it."""
        transport = self.wire.inner
        if self.left or transport.is_closing():
            return
        if not (linger or self.unread() or self.unparsed):
            transport.close()
            return
        self.left, self.unparsed = True, b""
        self._unset_keepalive_if_required()
        if transport.can_write_eof():
            transport.write_eof()
        self.wire.settle()
        self.due(LINGER_SECONDS)

    def due(self, seconds: float | None) -> None:
        """The state that the connection is in ends within so many seconds, or the connection does."""
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = None if seconds is None else self.loop.call_later(seconds, self.wire.inner.abort)

    # --- what comes in ------------------------------------------------------------------------------------

    def unread(self) -> bool:
        """The client has not sent all of its request."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def data_received(self, data: bytes) -> None:
        if not self.left:
            self.unparsed += data
            self.parse()

    def parse(self) -> None:
        """A slice at a time: what others do comes in between."""
        if self.left or self.wire.inner.is_closing():
            return
        part, self.unparsed = self.unparsed[:SLICE], self.unparsed[SLICE:]
        if self.conn.their_state is h11.IDLE and self.too_many_headers(part):
            self.send_400_response("")
            return
        super().data_received(part)
        if self.unparsed and not self.left:
            self.loop.call_soon(self.parse)
        self.wire.settle()

    def too_many_headers(self, part: bytes) -> bool:
        """h11 takes as many as there is room for, and some microseconds for each."""
        seen = self.tail + part
        end = HEADERS_END.search(seen)
        self.lines += seen.count(b"\n", len(self.tail), end.start() if end else len(seen))
        self.tail = seen[-2:]
        return self.lines > MAX_HEADERS

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.left or self.wire.inner.is_closing():
            return
        if self.cycle is not before:
            self.lines, self.tail = 0, b""
            self.due(BODY_SECONDS + GRACE_SECONDS)
        if self.conn.their_state is h11.IDLE:
            if self.deadline is None and self.timeout_keep_alive_task is None:
                self.due(HEADER_SECONDS)  # another request has begun on this connection
        elif self.conn.their_state is not h11.SEND_BODY:
            self.due(None)

    # --- what goes out ------------------------------------------------------------------------------------

    def wrote(self, count: int) -> None:
        self.written += count
        if self.watch is None and self.wire.inner.get_write_buffer_size():
            self.look_later()

    def look_later(self) -> None:
        waiting = self.wire.inner.get_write_buffer_size()
        self.taken = self.written - waiting
        self.expected = min(waiting, int(SLOWEST * WRITE_SECONDS))
        self.watch = self.loop.call_later(WRITE_SECONDS, self.look)

    def look(self) -> None:
        """A client that does not read must not have us keep its answer."""
        self.watch = None
        waiting = self.wire.inner.get_write_buffer_size()
        if not waiting:
            return
        if self.written - waiting - self.taken < self.expected:
            self.wire.inner.abort()
        else:
            self.look_later()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.hang_up()

    def send_400_response(self, msg: str) -> None:
        """Called where the request cannot be read: its headers are too long, or it is something else."""
        self.refuse(
            self.conn.refusal
            or Refusal(400, "invalid_http", "this is no valid HTTP request, or its headers are too long")
        )

    def refuse(self, refusal: Refusal) -> None:
        content = json.dumps(body_of(refusal)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
            *([("retry-after", str(int(refusal.retry_after)))] if refusal.retry_after else []),
        ]
        head = h11.Response(status_code=refusal.status, headers=headers)
        try:
            for event in (head, h11.Data(content), h11.EndOfMessage()):
                self.wire.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer is under way: there is no place for another
        self.hang_up(linger=True)
