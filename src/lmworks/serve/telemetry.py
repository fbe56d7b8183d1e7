"""Logs and traces of the server.

Logs are JSON. Of a request: key, route, times and token counts, never content.

OpenTelemetry: a span for each request, with child spans for queue, prefill, decode and postprocessing. Needs
opentelemetry-sdk with an OTLP exporter, and `OTEL_EXPORTER_OTLP_ENDPOINT`. Spans are recorded when a
request has ended, from times that are measured anyway.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
import uuid
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..spec import LMWorksError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


log = logging.getLogger("lmworks.serve")

LogFields = dict[str, Any]  # of one request: collected while it runs, logged when it ends
LOG_FIELDS = "lmworks.log_fields"
STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
ENCODER = json.JSONEncoder(default=str)  # made once: json.dumps makes one for each call with a default
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class JSONFormatter(logging.Formatter):
    """One object a line: time, level, message, and whatever was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: LogFields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in STANDARD},
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields |= error_location(record.exc_info[1])
        return ENCODER.encode(fields)


def error_location(error: BaseException) -> LogFields:
    """Type and location of an error, without its message: that may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return {"error": type(error).__name__, "at": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]}


def log_as_json() -> None:
    """For the whole process, uvicorn included."""
    # Not in our lines, and the caller's place is a third of a record's cost (the logging HOWTO, "Optimization").
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("lmworks.serve", "lmworks.gateway"):
        logging.getLogger(name).setLevel(logging.INFO)


def log_fields_of(scope: MutableMapping[str, Any]) -> LogFields:
    found: LogFields = scope.setdefault(LOG_FIELDS, {})
    return found


def request_id(given: str | None) -> str:
    """The client's, where it is valid."""
    return given if given and REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


# --- OpenTelemetry ---------------------------------------------------------------------------------------


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
        for phase, start, end in phases(log_fields, ended):
            child = self.tracer.start_span(phase, context, start_time=nanoseconds(start))
            child.end(nanoseconds(end))
        span.end(nanoseconds(ended))

    def close(self) -> None:
        self.provider.shutdown()


def phases(log_fields: LogFields, ended: float) -> list[tuple[str, float, float]]:
    """Phases of a request as (name, begin, end); none for requests that no local engine computed."""
    if "asked" not in log_fields or not log_fields.get("total"):
        return []
    submitted = log_fields["asked"]
    edges = [submitted, *(submitted + log_fields[name] for name in ("queue", "first_token", "total")), ended]
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
