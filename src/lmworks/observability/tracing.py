"""Traces of OpenTelemetry: one for a request from the gateway to the engine's phases, with W3C's context in and out.

Off, unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set; then opentelemetry-sdk and its OTLP exporter are needed. Spans have
names, times and counts, never content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..spec import LMWorksError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Fields of the log of a request → attributes, where the conventions for generative models have a name.
NAMES = {
    "request_id": "http.request.id",
    "status": "http.response.status_code",
    "path": "http.route",
    "key": "lmworks.key",
    "tenant": "lmworks.tenant",
    "tier": "lmworks.tier",
    "model": "gen_ai.request.model",
    "server": "server.address",
    "tries": "lmworks.tries",
    "migrations": "lmworks.migrations",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "lmworks.usage.cached_tokens",
    "failed": "error.type",
}
PHASES = ("queue", "prefill", "decode", "postprocess")


def trace_id_of(traceparent: str | None) -> str | None:
    """None: there is none, or it is not valid."""
    found = TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return found[1] if found else None


class Tracing:
    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        self.tracer = provider.get_tracer("lmworks")

    # --- while it happens: the gateway, whose servers need its spans' ids ---------------------------------

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        """A request, below the span that it came from."""
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        return self.tracer.start_span(name, extract(headers), trace.SpanKind.SERVER)

    def begin_try(self, request: Span, server: str) -> Span:
        from opentelemetry import trace

        attributes = {NAMES["server"]: server}
        return self.tracer.start_span("try", trace.set_span_in_context(request), trace.SpanKind.CLIENT, attributes)

    # --- when it is over: the server, which has measured all times ----------------------------------------

    def record(
        self, name: str, fields: Mapping[str, Any], headers: Mapping[str, str], began: float, ended: float
    ) -> str | None:
        """A request with its phases; times are seconds since 1970. Returns the trace's id, if it is sampled."""
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        span = self.tracer.start_span(
            name, extract(headers), trace.SpanKind.SERVER, attributes_of(fields), start_time=nanoseconds(began)
        )
        context = trace.set_span_in_context(span)
        for phase, start, end in phases(fields, ended):
            child = self.tracer.start_span(phase, context, start_time=nanoseconds(start))
            child.end(nanoseconds(end))
        span.end(nanoseconds(ended))
        return sampled_id(span)

    def close(self) -> None:
        self.provider.shutdown()


def end_span(span: Span, fields: Mapping[str, Any]) -> None:
    """`fields`: as they are logged."""
    from opentelemetry import trace

    span.set_attributes(attributes_of(fields))
    if fields.get("failed"):
        span.set_status(trace.StatusCode.ERROR)
    span.end()


def attributes_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {NAMES[name]: value for name, value in fields.items() if name in NAMES and value is not None}


def sampled_id(span: Span) -> str | None:
    """Of its trace; None where nobody records it."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.trace_flags.sampled else None


def context_headers(span: Span) -> list[tuple[bytes, bytes]]:
    """What says to a server that its spans are below this one."""
    from opentelemetry import trace
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier, trace.set_span_in_context(span))
    return [(name.encode(), value.encode()) for name, value in carrier.items()]


def phases(fields: Mapping[str, Any], ended: float) -> list[tuple[str, float, float]]:
    """Phases of a request as (name, begin, end); none for requests that no local engine computed."""
    if "asked" not in fields or not fields.get("total"):
        return []
    submitted = fields["asked"]
    edges = [submitted, *(submitted + fields[name] for name in ("queue", "first_token", "total")), ended]
    for place in range(1, len(edges)):
        edges[place] = max(edges[place], edges[place - 1])
    return list(zip(PHASES, edges[:-1], edges[1:], strict=True))


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def tracing_from_environment(service: str) -> Tracing | None:
    """None: no endpoint is set. `service`: its name, where OTEL_SERVICE_NAME says no other."""
    if not os.environ.get(ENDPOINT):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise LMWorksError(
            f"{ENDPOINT} is set, and traces need OpenTelemetry: pip install 'lmworks[tracing]'"
        ) from None
    resource: dict[str, Any] = {"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}
    provider = TracerProvider(resource=Resource.create(resource))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)
