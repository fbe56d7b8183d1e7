"""A minimal asynchronous HTTP client for streamed answers, timed as bytes arrive.

At thousands of tokens a second a full-featured client would measure itself. The clock is read once per socket read,
before parsing; every request has its own connection. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..spec import LMWorksError, SpecError

BROKEN_STREAM = "the stream broke off"


@dataclass(frozen=True)
class Target:
    """A server address, resolved once."""

    host: str
    port: int
    path: str  # before /v1
    address: str
    family: int
    tls: ssl.SSLContext | None = None
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Target:
        """http://host:port, with or without /v1 at its end."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpecError(f"--url {url!r}: write http://HOST:PORT or https://HOST[:PORT]")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise SpecError("the API key has characters that are not allowed in a header")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        try:
            port = parts.port or (443 if tls else 80)
            found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            raise SpecError(f"--url {url!r}: {error}") from None
        # localhost may resolve to several addresses: take the one that accepts connections.
        family, _, _, _, address = next((one for one in found if accepts_connections(one[0], one[4])), found[0])
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, path, str(address[0]), family, tls, key)

    def head(self, method: str, path: str, length: int) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"host: {host}:{self.port}",
            "connection: close",
            "accept-encoding: identity",
            "user-agent: lmworks-bench",
            *([f"authorization: Bearer {self.key}"] if self.key else []),
            *(["content-type: application/json", f"content-length: {length}"] if method == "POST" else []),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def accepts_connections(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.settimeout(2.0)
        return trial.connect_ex(address) == 0


@dataclass
class Reply:
    """The response. Times are of `time.perf_counter`."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # of events with tokens
    ended: float = 0.0
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: str | None = None  # in the stream or instead of a stream
    done: bool = False  # data: [DONE]
    body: bytearray = field(default_factory=bytearray)  # if it is not a stream

    @property
    def streams(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def document(self) -> Any:
        """The body as JSON; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def event(self, data: bytes, now: float) -> None:
        """One `data:` line of the stream."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = "an event of the stream is not JSON"
            return
        if isinstance(event, dict) and "error" in event:
            self.error = error_text(event)
            return
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if has_tokens(choice):
                self.times.append(now)


def has_tokens(choice: dict[str, Any]) -> bool:
    """An incomplete character counts although it has no text; events with only "role" or "finish_reason" do not."""
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else [value for key, value in delta.items() if key != "role" and value]
    return bool(text) or not (choice.get("finish_reason") or (delta is not None and delta.get("role")))


def error_text(document: Any) -> str:
    """The message of an OpenAI error object, or the text of another document."""
    error = document.get("error", document) if isinstance(document, dict) else document
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:200]


class HttpExchange(asyncio.Protocol):
    """Sends a request on connect and reads the response: HTTP/1.1, chunked, with a length, or until close."""

    def __init__(self, request: bytes, done_future: asyncio.Future[None]) -> None:
        self.request, self.done_future = request, done_future
        self.reply = Reply()
        self.buffer = bytearray()  # raw bytes
        self.lines = bytearray()  # the incomplete line of the stream
        self.body = False  # the head has been read
        self.chunked = False
        self.remaining = 0  # bytes of this chunk, or of the body (−1: to the end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.done_future.done():
            return
        self.buffer += data
        try:
            if not self.body and not self.read_head():
                return
            self.read_chunks(now) if self.chunked else self.read_plain(now)
        except ValueError:
            self.reply.error = "the response is not HTTP"
            self.finish(now)

    def connection_lost(self, error: Exception | None) -> None:
        now = time.perf_counter()
        if not self.done_future.done() and (self.remaining != -1 or error is not None):
            self.reply.error = self.reply.error or (BROKEN_STREAM if self.body else "the connection was closed")
        self.finish(now)

    def finish(self, now: float) -> None:
        if not self.done_future.done():
            self.reply.ended = now
            self.done_future.set_result(None)

    def read_head(self) -> bool:
        head, gap, rest = self.buffer.partition(b"\r\n\r\n")
        if not gap:
            return False
        status, *lines = head.decode("latin-1").split("\r\n")
        version, code, *_ = status.split(" ")
        if not version.startswith("HTTP/"):
            raise ValueError
        self.buffer = rest
        if code.startswith("1"):  # 100 Continue: the response follows
            return self.read_head()
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.reply.status, self.reply.headers, self.body = int(code), headers, True
        self.chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self.remaining = 0 if self.chunked else int(headers.get("content-length", -1))
        return True

    def read_plain(self, now: float) -> None:
        self.take(self.buffer, now)
        if self.remaining != -1:
            self.remaining -= len(self.buffer)
        self.buffer = bytearray()
        if self.remaining == 0:
            self.finish(now)

    def read_chunks(self, now: float) -> None:
        """A chunk is its size in hex, its bytes and CRLF; a chunk of size 0 ends the body."""
        place, buffer = 0, self.buffer
        while True:
            if self.remaining > 2:  # remaining bytes of the chunk, with its CRLF
                part = buffer[place : place + self.remaining - 2]
                self.take(part, now)
                place += len(part)
                self.remaining -= len(part)
            if self.remaining:
                if self.remaining > 2 or len(buffer) - place < self.remaining:
                    break
                place += self.remaining
                self.remaining = 0
            end = buffer.find(b"\r\n", place)
            if end < 0:
                break
            size = int(bytes(buffer[place:end]).partition(b";")[0], 16)
            place = end + 2
            if size == 0:
                self.finish(now)
                break
            self.remaining = size + 2
        del buffer[:place]

    def take(self, data: bytes | bytearray, now: float) -> None:
        """A piece of the body."""
        if not (self.reply.streams and self.reply.status == 200):
            self.reply.body += data
            return
        *lines, self.lines = (self.lines + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.reply.event(bytes(line[5:].strip()), now)
        if self.reply.done:
            self.finish(now)  # some servers keep the connection open


async def exchange(target: Target, method: str, path: str, body: bytes = b"", timeout: float = 600.0) -> Reply:
    """A request and its response. Failures are in `error`; nothing is raised."""
    loop = asyncio.get_running_loop()
    done_future: asyncio.Future[None] = loop.create_future()
    protocol = HttpExchange(target.head(method, path, len(body)) + body, done_future)
    reply = protocol.reply
    transport = None
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await loop.create_connection(
                lambda: protocol,
                target.address,
                target.port,
                family=target.family,
                ssl=target.tls,
                server_hostname=target.host if target.tls else None,
            )
            await done_future
    except TimeoutError:
        reply.error = f"no end after {timeout:g} s"
    except OSError as error:
        reply.error = f"cannot connect: {error.strerror or error}"
    finally:
        if transport is not None:
            transport.abort()
    reply.ended = reply.ended or time.perf_counter()
    return reply


async def post(target: Target, path: str, body: bytes, timeout: float = 600.0) -> Reply:
    """A streamed request. A response that is not a stream, or that ends early, is an error."""
    reply = await exchange(target, "POST", path, body, timeout)
    if reply.error is None and reply.status != 200:
        reply.error = error_text(reply.document() or f"status {reply.status}")
    elif reply.error is None and not reply.streams:
        reply.error = f"not a stream, but {reply.headers.get('content-type', 'nothing')!r}"
    elif reply.error is None and not (reply.done or reply.finish_reason):
        reply.error = BROKEN_STREAM
    return reply


async def first_model(target: Target) -> str:
    """The name of the server's first model; also checks that the server answers."""
    reply = await exchange(target, "GET", "/v1/models", timeout=10.0)
    where = f"{target.host}:{target.port}{target.path}/v1/models"
    if reply.error is None and reply.status == 200:
        with suppress(LookupError, TypeError):
            return str(reply.document()["data"][0]["id"])
        raise LMWorksError(f"{where} names no model: give one with --model")
    message = reply.error or f"status {reply.status}: {error_text(reply.document())}"
    raise LMWorksError(f"{where}: {message}")
