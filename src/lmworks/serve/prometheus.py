"""Prometheus metrics: the engine's under vLLM's names, and the API's own.

Where a dashboard says `vllm:time_to_first_token_seconds`, say `lmworks:time_to_first_token_seconds`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.core.metrics import BUCKETS
from .backend import State

if TYPE_CHECKING:
    from .serving import Serving

disable_created_metrics()  # a second series for each counter that nobody looks at

PREFIX = "lmworks:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES = {
    "num_requests_running": "answers that are being computed",
    "num_requests_waiting": "answers that wait for their turn",
    "kv_cache_usage_perc": "part of the cache's blocks that is held, 0 to 1",
}
COUNTERS = {
    "prompt_tokens": "tokens of prompts",
    "generation_tokens": "tokens of answers",
    "prefix_cache_queries": "tokens of prompts that were looked up in the prefix cache",
    "prefix_cache_hits": "tokens of prompts that were found there",
    "num_preemptions": "answers that had to give up their blocks and begin anew",
    "steps": "steps of the engine",
    "proposed_guesses": "tokens that speculation proposed",
    "accepted_guesses": "tokens of those that were right",
}
TIMES = {
    "time_to_first_token_seconds": "from a request's arrival at the engine to its first token",
    "inter_token_latency_seconds": "between two tokens of an answer",
    "e2e_request_latency_seconds": "from arrival to the end of the last answer",
    "request_queue_time_seconds": "from arrival until it was let in",
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
        yield from health(states)


def family(kind: type[Any], name: str, what: str, values: Mapping[str, float]) -> Metric:
    made: Metric = kind(f"{PREFIX}{name}", what, labels=["model_name"])
    for model, value in values.items():
        made.add_metric([model], value)  # type: ignore[attr-defined]
    return made


def times(name: str, what: str, values: Mapping[str, Mapping[str, Any]]) -> Metric:
    made = HistogramMetricFamily(f"{PREFIX}{name}", what, labels=["model_name"])
    for model, value in values.items():
        edges = [*(f"{edge:g}" for edge in BUCKETS), "+Inf"]
        buckets = list(zip(edges, itertools.accumulate(value["counts"]), strict=True))
        made.add_metric([model], buckets, value["seconds"])
    return made


def finished(found: Mapping[str, Mapping[str, Any]]) -> Metric:
    made = CounterMetricFamily(
        f"{PREFIX}request_success", "answers that ended", labels=["model_name", "finished_reason"]
    )
    for model, metrics in found.items():
        for reason, count in metrics["finished"].items():
            made.add_metric([model, reason], count)
    return made


def health(states: Mapping[str, State]) -> Iterator[Metric]:
    up = {model: float(state.healthy) for model, state in states.items()}
    yield family(GaugeMetricFamily, "engine_up", "1: it runs, takes requests and advances", up)
    stalled = {model: state.stalled for model, state in states.items()}
    yield family(GaugeMetricFamily, "engine_stalled_seconds", "since it last advanced, while it has work", stalled)
    restarts = {model: float(state.restarts) for model, state in states.items()}
    yield family(CounterMetricFamily, "engine_restarts", "times that its process was started anew", restarts)


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
