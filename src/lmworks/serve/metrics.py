"""Metrics of the server, as `observability.catalog` lists them: the engines' and the API's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..observability.catalog import ENGINE, VLLM_PREFIX, MetricSpec
from ..observability.families import combined, counter, family, family_of, histogram, render
from ..observability.gpus import gpu_metrics
from .tls import METRIC

if TYPE_CHECKING:
    from .serving import Serving

VLLM_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


@dataclass
class HTTPMetrics:
    """Metrics of HTTP requests."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    requests: Counter = field(init=False)
    seconds: Histogram = field(init=False)

    def __post_init__(self) -> None:
        self.requests = counter("http_requests", self.registry)
        self.seconds = histogram("http_request_duration_seconds", self.registry)


class EngineCollector(Collector):
    """Metrics of all engines, read at each scrape."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def collect(self) -> Iterator[Metric]:
        states = {model.backend.name: model.backend.state for model in self.serving.local_models}
        for spec in ENGINE:
            found = {model: state.metrics[spec.engine] for model, state in states.items() if state.metrics}
            yield family_of(spec, values_of(spec, found))
            if spec.vllm:
                yield family_of(spec, values_of(spec, found, VLLM_REASONS), VLLM_PREFIX, {"engine": "0"})
        yield family("engine_up", {(model,): float(state.healthy) for model, state in states.items()})
        yield family("engine_stalled_seconds", {(model,): state.stalled for model, state in states.items()})
        yield family("engine_restarts", {(model,): float(state.restarts) for model, state in states.items()})
        yield family("engine_ooms", {(model,): float(state.ooms) for model, state in states.items()})
        yield from gpu_metrics()
        certificates = self.serving.certificates
        if certificates is not None:
            yield family(METRIC, {(path,): end for path, end in certificates.current().expiry.items()})


def values_of(
    spec: MetricSpec, found: Mapping[str, Any], reasons: Mapping[str, str] | None = None
) -> dict[tuple[str, ...], Any]:
    """Values by labels, with 0 for what only other models had. `reasons`: other names of why sequences ended."""
    if spec.kind == "histogram":
        return {(model,): (value["counts"], value["total"]) for model, value in found.items()}
    if len(spec.labels) == 1:
        return {(model,): value for model, value in found.items()}
    if spec.engine == "finished" and reasons is not None:
        names = dict(reasons)
    else:
        names = {name: name for values in found.values() for name in values}
    return {(model, shown): values.get(name, 0) for model, values in found.items() for name, shown in names.items()}


class HTTPCollector(Collector):
    """What all API processes counted."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def collect(self) -> Iterator[Metric]:
        own = self.serving.http_metrics.registry.collect()
        host = self.serving.engine_host
        yield from own if host is None else combined([*own, *host.other_metrics])


def render_metrics(serving: Serving, accept: str | None) -> tuple[bytes, str]:
    """The text of /metrics, and its type."""
    registry = CollectorRegistry()
    registry.register(HTTPCollector(serving))
    registry.register(EngineCollector(serving))
    ProcessCollector(registry=registry)
    return render(registry, accept)
