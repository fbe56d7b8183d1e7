"""What a server is sent: the client's request, and what the gateway says differently."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..observability.tracing import context_headers
from .config import ModelRule
from .exchange import Exchange
from .http_server import Headers, HTTPRequest
from .servers import Server
from .slo import ServiceLevel
from .tenants.tenancy import Tenancy

if TYPE_CHECKING:
    from opentelemetry.trace import Span

CONTEXT = (b"traceparent", b"tracestate")  # W3C trace context
PASSED_ON = (b"anthropic-version", b"anthropic-beta", b"accept")
USAGE_PATHS = {"/v1/chat/completions", "/v1/completions"}  # whose streams have usage only where it is asked for


class ServerRequests:
    """`tenancy`: where clients need keys."""

    def __init__(self, tenancy: Tenancy | None) -> None:
        self.tenancy = tenancy

    def changes(self, exchange: Exchange, server: Server, rule: ModelRule) -> dict[str, Any]:
        """Fields of the body that are not as the client said them."""
        body = exchange.body
        found: dict[str, Any] = {} if body.model == rule.serves else {"model": rule.serves}
        if exchange.priority and server.pool.kind in ("lmworks", "vllm"):
            found["priority"] = exchange.priority
        if self.tenancy is not None:
            found |= self.tenancy.salt(exchange, server)
        if body.stream and exchange.path in USAGE_PATHS and not body.wants_usage:
            options = body.get("stream_options")
            found["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return found

    def headers(self, exchange: Exchange, server: Server, span: Span | None = None) -> Headers:
        """The server's spans are below `span`, or the request's."""
        span = span or exchange.span
        own = [(b"content-type", b"application/json"), (b"x-request-id", exchange.id.encode()), *server.headers()]
        context = passed_on(exchange.request, CONTEXT) if span is None else context_headers(span)
        return [*own, *context, *passed_on(exchange.request, PASSED_ON)]


def priority_of(exchange: Exchange, level: ServiceLevel | None) -> int:
    """As the objective has it; a client may say that it can wait longer."""
    own = exchange.body.get("priority")
    if level is None or not level.priority:
        return own if isinstance(own, int) else 0
    return max(level.priority, own) if isinstance(own, int) else level.priority


def passed_on(request: HTTPRequest, names: Iterable[bytes]) -> Headers:
    return [(name, found) for name in names if (found := request.headers.get(name)) is not None]
