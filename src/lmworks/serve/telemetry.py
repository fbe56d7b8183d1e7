"""Logs, metrics and traces of the server.

Logs are JSON. Of a request: key, route, times and token counts, never content.

Prometheus metrics: the engine's under vLLM's names, and the API's own. Where a dashboard says
`vllm:time_to_first_token_seconds`, say `lmworks:time_to_first_token_seconds`.

OpenTelemetry: a span for each request, with child spans for queue, prefill, decode and postprocessing. Needs
opentelemetry-sdk with an OTLP exporter, and `OTEL_EXPORTER_OTLP_ENDPOINT`. Spans are recorded when a
request has ended, from times that are measured anyway.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
import traceback
import uuid
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..observability.catalog import BUCKETS, METRICS
from ..spec import LMWorksError
from .backend import State
from .tls import METRIC

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from .serving import Serving

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


# --- Prometheus metrics ----------------------------------------------------------------------------------


disable_created_metrics()  # a second series for each counter, unused

PREFIX = "lmworks:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES = {
    "num_requests_running": "running sequences",
    "num_requests_waiting": "waiting sequences",
    "kv_cache_usage_perc": "share of KV blocks in use, 0 to 1",
}
COUNTERS = {
    "prompt_tokens": "prompt tokens",
    "generation_tokens": "generated tokens",
    "prefix_cache_queries": "prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "prompt tokens found in the prefix cache",
    "external_prefix_cache_queries": "prompt tokens that the device did not have, looked up in the tiers below it",
    "external_prefix_cache_hits": "prompt tokens found in the tiers",
    "num_preemptions": "sequences that were preempted and recomputed",
    "steps": "engine steps",
    "proposed_guesses": "draft tokens proposed",
    "accepted_guesses": "draft tokens accepted",
}
TIERS = ("kv_tier_hits", "kv_tier_stored", "kv_tier_errors", "kv_tier_bytes")
TIMES = {
    "time_to_first_token_seconds": "from arrival at the engine to the first token",
    "inter_token_latency_seconds": "between two tokens of a sequence",
    "e2e_request_latency_seconds": "from arrival to the end of the last sequence",
    "request_queue_time_seconds": "from arrival until it was scheduled",
}


@dataclass
class HTTPMetrics:
    """Metrics of HTTP requests."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    requests: Counter = field(init=False)
    seconds: Histogram = field(init=False)

    def __post_init__(self) -> None:
        self.requests = Counter(
            f"{PREFIX}http_requests", "requests", ["method", "path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "until the last byte",
            ["path"],
            registry=self.registry,
            buckets=BUCKETS,
        )


class EngineCollector(Collector):
    """Metrics of all engines, read at each scrape."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def collect(self) -> Iterator[Metric]:
        states = {model.backend.name: model.backend.state for model in self.serving.local_models}
        found = {model: state.metrics for model, state in states.items() if state.metrics}
        for name, what in GAUGES.items():
            yield family(GaugeMetricFamily, name, what, {model: metrics[name] for model, metrics in found.items()})
        for name, what in COUNTERS.items():
            yield family(CounterMetricFamily, name, what, {model: metrics[name] for model, metrics in found.items()})
        for name, what in TIMES.items():
            yield times(name, what, {model: metrics[name] for model, metrics in found.items()})
        yield finished(found)
        yield from tiers(found)
        yield from health(states)
        if self.serving.certificates is not None:
            yield self.serving.certificates.metric(f"{PREFIX}{METRIC}")


def family(kind: type[Any], name: str, what: str, values: Mapping[str, float]) -> Metric:
    metric_family: Metric = kind(f"{PREFIX}{name}", what, labels=["model_name"])
    for model, value in values.items():
        metric_family.add_metric([model], value)  # type: ignore[attr-defined]
    return metric_family


def times(name: str, what: str, values: Mapping[str, Mapping[str, Any]]) -> Metric:
    metric_family = HistogramMetricFamily(f"{PREFIX}{name}", what, labels=["model_name"])
    for model, value in values.items():
        edges = [*(f"{edge:g}" for edge in BUCKETS), "+Inf"]
        buckets = list(zip(edges, itertools.accumulate(value["counts"]), strict=True))
        metric_family.add_metric([model], buckets, value["seconds"])
    return metric_family


def finished(found: Mapping[str, Mapping[str, Any]]) -> Metric:
    metric_family = CounterMetricFamily(
        f"{PREFIX}request_success", "finished sequences", labels=["model_name", "finished_reason"]
    )
    for model, metrics in found.items():
        for reason, count in metrics["finished"].items():
            metric_family.add_metric([model, reason], count)
    return metric_family


def tiers(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """Of the KV cache."""
    for spec in (METRICS[name] for name in TIERS):
        metric_family = Metric(spec.exported, spec.help, spec.kind)
        suffix, label = "_total" if spec.kind == "counter" else "", spec.labels[1]
        for model, metrics in found.items():
            for value, count in metrics[spec.engine].items():
                metric_family.add_sample(spec.exported + suffix, {"model_name": model, label: value}, count)
        yield metric_family


def health(states: Mapping[str, State]) -> Iterator[Metric]:
    up = {model: float(state.healthy) for model, state in states.items()}
    yield family(GaugeMetricFamily, "engine_up", "1: the engine runs, accepts requests and advances", up)
    stalled = {model: state.stalled for model, state in states.items()}
    yield family(GaugeMetricFamily, "engine_stalled_seconds", "seconds without progress while there is work", stalled)
    restarts = {model: float(state.restarts) for model, state in states.items()}
    yield family(CounterMetricFamily, "engine_restarts", "restarts of the engine process", restarts)


def render_metrics(serving: Serving) -> bytes:
    """The text of /metrics."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(serving))
    counts = serving.http_metrics.registry
    if serving.engine_host is not None:
        counts = CollectorRegistry()
        counts.register(SummedMetrics([*serving.http_metrics.registry.collect(), *serving.engine_host.other_metrics]))
    return generate_latest(counts) + generate_latest(registry)


class SummedMetrics(Collector):
    """Metrics of several API processes, summed."""

    def __init__(self, found: list[Metric]) -> None:
        self.found = found

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for metric in self.found:
            families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            totals = sums.setdefault(metric.name, {})
            for sample in metric.samples:
                place = (sample.name, tuple(sample.labels.items()))
                totals[place] = totals.get(place, 0.0) + sample.value
        for name, family_of in families.items():
            for (sample_name, labels), value in sums[name].items():
                family_of.add_sample(sample_name, dict(labels), value)
            yield family_of


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
