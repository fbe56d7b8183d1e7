"""OpenTelemetry: a span for each request, with its time in the queue, in prefill, in decode and after.

Needs opentelemetry-sdk with an OTLP exporter, and an endpoint: `OTEL_EXPORTER_OTLP_ENDPOINT`, as everywhere. Spans
are made when a request has ended, of times that were measured anyway, so they cost the request nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..spec import LMWorksError
from .logs import LogFields

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Where the conventions for generative models have a name.
NAMES = {
    "request_id": "http.request.id",
    "status": "http.response.status_code",
    "key": "lmworks.key",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "lmworks.usage.cached_tokens",
    "failed": "error.type",
}


class Tracing:
    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        self.tracer = provider.get_tracer("lmworks.serve")

    def record(self, name: str, log_fields: LogFields, headers: Mapping[str, str], began: float, ended: float) -> None:
        """Times are seconds since 1970."""
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        attributes = {NAMES[fact]: value for fact, value in log_fields.items() if fact in NAMES}
        span = self.tracer.start_span(
            name, extract(headers), trace.SpanKind.SERVER, attributes, start_time=nanoseconds(began)
        )
        context = trace.set_span_in_context(span)
        for part, start, end in parts(log_fields, ended):
            child = self.tracer.start_span(part, context, start_time=nanoseconds(start))
            child.end(nanoseconds(end))
        span.end(nanoseconds(ended))

    def close(self) -> None:
        self.provider.shutdown()


def parts(log_fields: LogFields, ended: float) -> list[tuple[str, float, float]]:
    """What a request's time went into, one after the other; none where no engine of ours worked on it."""
    if "asked" not in log_fields or not log_fields.get("total"):
        return []
    asked = log_fields["asked"]
    edges = [asked, asked + log_fields["queue"], asked + log_fields["first_token"], asked + log_fields["total"], ended]
    for place in range(1, len(edges)):
        edges[place] = max(edges[place], edges[place - 1])
    return list(zip(("queue", "prefill", "decode", "postprocess"), edges[:-1], edges[1:], strict=True))


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def tracing_from_environment() -> Tracing | None:
    """None: no endpoint is set."""
    if not os.environ.get(ENDPOINT):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        needed = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise LMWorksError(f"{ENDPOINT} is set, and traces need OpenTelemetry: {needed}") from None
    resource: dict[str, Any] = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "lmworks")}
    provider = TracerProvider(resource=Resource.create(resource))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)
