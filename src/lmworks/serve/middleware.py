"""Where every request comes in and goes out: it gets an id, is counted and logged, and whatever fails is answered."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import refusal_of, response_of
from .limits import Refusal
from .logs import Facts, facts_of, log, request_id
from .serving import VISIT, Serving
from .tracing import Tracing

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
QUIET = {"/health", "/ready", "/metrics"}  # asked for every few seconds
PART_BYTES = 65_536
LEFT = 499  # the client did, before there was an answer: nobody receives this status, logs and metrics have it


@dataclass
class Seen:
    """What went out."""

    status: int = 0
    began: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)


class Door:
    def __init__(
        self,
        app: ASGIApp,
        serving: Serving,
        tracing: Tracing | None = None,
        local: bool = False,
        origins: Sequence[str] = (),
    ) -> None:
        self.app, self.serving, self.tracing = app, serving, tracing
        self.local, self.origins = local, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, facts, seen = Headers(scope=scope), facts_of(scope), Seen()
        facts["request_id"] = request_id(headers.get("x-request-id"))

        unread: Callable[[], bool] = scope.get("state", {}).get("unread", lambda: False)

        async def out(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = facts["request_id"]
                if unread() or self.serving.draining:
                    sent["connection"] = "close"  # what is left of the request is not read, or there will be no other
            for part in parts(message):
                await send(part)

        try:
            await self.inside(scope, receive, out, seen)
        finally:
            if VISIT in scope:
                scope[VISIT].leave()
            self.close(scope, headers, facts, seen)

    async def inside(self, scope: Scope, receive: Receive, send: Send, seen: Seen) -> None:
        try:
            self.look(scope)
            await self.app(scope, receive, send)
        except ClientDisconnect:
            seen.status = seen.status or LEFT
        except Exception as error:
            if refusal_of(error).code == "internal_error":
                log.error("a request failed", extra={"request_id": facts_of(scope)["request_id"]}, exc_info=error)
            if not seen.status:
                await response_of(error)(scope, receive, send)

    def look(self, scope: Scope) -> None:
        """What can be told of a request by its headers."""
        config = self.serving.settings.current()
        if self.local and not config.keys:
            check_local(Headers(scope=scope), self.origins)
        limit = config.limits.header_bytes
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limit:
            raise Refusal(431, "headers_too_large", f"the headers have more than {limit} bytes, as many as may be sent")

    def close(self, scope: Scope, headers: Headers, facts: Facts, seen: Seen) -> None:
        took = time.perf_counter() - seen.clock
        path = route_of(scope)
        facts["status"] = seen.status or LEFT
        method = scope["method"] if scope["method"] in METHODS else "OTHER"  # a stranger may invent any number of them
        self.serving.counts.requests.labels(method, path, str(facts["status"])).inc()
        self.serving.counts.seconds.labels(path).observe(took)
        if path not in QUIET:
            log.info("request", extra={**facts, "method": method, "path": path, "seconds": round(took, 6)})
        if self.tracing is not None and path not in QUIET:
            self.tracing.record(f"{method} {path}", facts, headers, seen.began, seen.began + took)


def check_local(headers: Headers, origins: Sequence[str]) -> None:
    """A server for this machine, without keys: any page in a browser here could reach it.

    By a name that its author lets stand for this machine (DNS rebinding), which Host tells; or as another origin.
    """
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and not loopback(host):
        message = f"this server is for this machine: it does not answer to the name {host[:80]!r}, only to localhost"
        raise Refusal(403, "foreign_host", message)
    if origin is not None and origin not in origins and origin.partition("://")[2] != host:
        message = f"pages of {origin[:80]!r} may not use this server: start it with --cors ORIGIN, or with keys"
        raise Refusal(403, "foreign_origin", message)


def loopback(host: str) -> bool:
    """Of a Host header, with or without a port."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def parts(message: Message) -> Iterator[Message]:
    """A large body, bit by bit: each waits until the client has taken those before it."""
    body = message.get("body", b"")
    for start in range(0, len(body) - PART_BYTES, PART_BYTES):
        yield {"type": message["type"], "body": body[start : start + PART_BYTES], "more_body": True}
    if len(body) > PART_BYTES:
        message = {**message, "body": body[(len(body) - 1) // PART_BYTES * PART_BYTES :]}
    yield message


def route_of(scope: Scope) -> str:
    """The route that was taken. What a stranger wrote after our address is content, too, and stays out of logs."""
    route: Any = scope.get("route")
    return route.path if route is not None else "(none)"
