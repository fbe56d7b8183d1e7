"""The outermost middleware: request ids, header checks, error responses, metrics, logs and traces."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..observability.families import exemplar
from ..observability.tracing import Tracing, trace_id_of
from .errors import error_response, to_api_error
from .limits import APIError
from .serving import ANSWER_HEADERS, METER, Serving
from .telemetry import LogFields, log, log_fields_of, request_id

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
QUIET = {"/health", "/ready", "/metrics"}  # polled every few seconds: not logged
PART_BYTES = 65_536
CLIENT_CLOSED_REQUEST = 499  # as nginx logs it: the client left before the response


@dataclass
class ResponseInfo:
    """Status and start time of one response."""

    status: int = 0
    began: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)


class RequestMiddleware:
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
        headers, log_fields, response = Headers(scope=scope), log_fields_of(scope), ResponseInfo()
        log_fields["request_id"] = request_id(headers.get("x-request-id"))

        request_incomplete: Callable[[], bool] = scope.get("state", {}).get("unread", lambda: False)

        async def send_response(message: Message) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = log_fields["request_id"]
                sent.update(scope.get(ANSWER_HEADERS, {}))
                if request_incomplete() or self.serving.draining:
                    sent["connection"] = "close"  # the rest of the request is not read, or the server drains
            for part in split_body(message):
                await send(part)

        try:
            await self.call_app(scope, receive, send_response, response)
        finally:
            if METER in scope:
                scope[METER].release()
            self.record(scope, headers, log_fields, response)

    async def call_app(self, scope: Scope, receive: Receive, send: Send, response: ResponseInfo) -> None:
        try:
            self.check_headers(scope)
            await self.app(scope, receive, send)
        except ClientDisconnect:
            response.status = response.status or CLIENT_CLOSED_REQUEST
        except Exception as error:
            if to_api_error(error).code == "internal_error":
                log.error("a request failed", extra={"request_id": log_fields_of(scope)["request_id"]}, exc_info=error)
            if not response.status:
                await error_response(error, scope["path"])(scope, receive, send)

    def check_headers(self, scope: Scope) -> None:
        """Raises APIError for a foreign host or origin, and for headers that are too large."""
        config = self.serving.settings.current()
        if self.local and not config.keys:
            check_local(Headers(scope=scope), self.origins)
        limit = config.limits.header_bytes
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limit:
            raise APIError(431, "headers_too_large", f"the headers have more than {limit} bytes, the limit")

    def record(self, scope: Scope, headers: Headers, log_fields: LogFields, response: ResponseInfo) -> None:
        took = time.perf_counter() - response.clock
        path = route_of(scope)
        log_fields["status"] = response.status or CLIENT_CLOSED_REQUEST
        method = scope["method"] if scope["method"] in METHODS else "OTHER"  # bounded: clients may send any method
        self.serving.http_metrics.requests.labels(method, path, str(log_fields["status"])).inc()
        trace_id = trace_id_of(headers.get("traceparent"))
        if self.tracing is not None and path not in QUIET:
            ended = response.began + took
            trace_id = self.tracing.record(f"{method} {path}", log_fields, headers, response.began, ended)
        self.serving.http_metrics.seconds.labels(path).observe(took, exemplar(trace_id))
        if path not in QUIET:
            log.info("request", extra={**log_fields, "method": method, "path": path, "seconds": round(took, 6)})


def check_local(headers: Headers, origins: Sequence[str]) -> None:
    """A local server without keys can be reached by any page in a browser on this machine: by a foreign host name that
    resolves to it (DNS rebinding), seen in Host, or from another origin.
    """
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and not loopback(host):
        message = f"this server is local: it does not accept the host name {host[:80]!r}, only localhost"
        raise APIError(403, "foreign_host", message)
    if origin is not None and origin not in origins and origin.partition("://")[2] != host:
        message = f"pages of {origin[:80]!r} may not use this server: start it with --cors ORIGIN, or with keys"
        raise APIError(403, "foreign_origin", message)


def loopback(host: str) -> bool:
    """Of a Host header, with or without a port."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def split_body(message: Message) -> Iterator[Message]:
    """A large body in parts: each waits until the client has read those before it (backpressure)."""
    body = message.get("body", b"")
    for start in range(0, len(body) - PART_BYTES, PART_BYTES):
        yield {"type": message["type"], "body": body[start : start + PART_BYTES], "more_body": True}
    if len(body) > PART_BYTES:
        message = {**message, "body": body[(len(body) - 1) // PART_BYTES * PART_BYTES :]}
    yield message


def route_of(scope: Scope) -> str:
    """The path of the matched route. The URL itself is user content and stays out of logs."""
    route: Any = scope.get("route")
    return route.path if route is not None else "(none)"
