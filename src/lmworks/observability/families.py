"""The list of metrics as objects of the Prometheus client, and the text of /metrics."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from .catalog import METRICS, PREFIX, Combine, MetricSpec

disable_created_metrics()  # a second series for each counter, unused

T = TypeVar("T")
OPENMETRICS, CONTENT_TYPE = "application/openmetrics-text", "text/plain; version=0.0.4; charset=utf-8"


# --- counted while it happens ----------------------------------------------------------------------------


def counter(name: str, registry: CollectorRegistry) -> Counter:
    return make(Counter, name, "counter", registry)


def gauge(name: str, registry: CollectorRegistry) -> Gauge:
    return make(Gauge, name, "gauge", registry)


def histogram(name: str, registry: CollectorRegistry) -> Histogram:
    return make(Histogram, name, "histogram", registry, buckets=METRICS[name].buckets)


def make(kind: Callable[..., T], name: str, wanted: str, registry: CollectorRegistry, **more: Any) -> T:
    spec = METRICS[name]
    if spec.kind != wanted:
        raise ValueError(f"{name} is a {spec.kind} in the list, not a {wanted}")
    return kind(spec.exported, spec.help, spec.labels, registry=registry, **more)


# --- read at each scrape ---------------------------------------------------------------------------------

Labels = tuple[str, ...]
FAMILIES: dict[str, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def family(name: str, values: Mapping[Labels, float]) -> Metric:
    """A counter or gauge of the list: its value for each combination of labels."""
    return family_of(METRICS[name], values)


def family_of(
    spec: MetricSpec, values: Mapping[Labels, Any], prefix: str = PREFIX, more: Mapping[str, str] | None = None
) -> Metric:
    """`more`: labels that every series has. Values of histograms: counts of their buckets, and the sum."""
    more = more or {}
    found: Any = FAMILIES[spec.kind](prefix + spec.name, spec.help, labels=[*spec.labels, *more])
    for labels, value in values.items():
        labels = (*labels, *more.values())
        if spec.kind == "histogram":
            counts, total = value
            edges = [*(f"{edge:g}" for edge in spec.buckets), "+Inf"]
            found.add_metric(labels, list(zip(edges, itertools.accumulate(counts), strict=True)), total)
        else:
            found.add_metric(labels, value)
    return found


def render(registry: CollectorRegistry | Collected, accept: str | None) -> tuple[bytes, str]:
    """The text of /metrics and its type: OpenMetrics, with exemplars, for who accepts it.

    The client's own choice of an encoder writes the colons of names as underscores in OpenMetrics: not `allow-utf-8`.
    """
    if any(one.partition(";")[0].strip() == OPENMETRICS for one in (accept or "").split(",")):
        return openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE


def exemplar(trace_id: str | None) -> dict[str, str] | None:
    return {"trace_id": trace_id} if trace_id else None


def combined(metrics: Sequence[Metric]) -> list[Metric]:
    """Metrics of several processes: counters and histograms are added, gauges as the list says."""
    families: dict[str, Metric] = {}
    found: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], tuple[float, Any]]] = {}
    for metric in metrics:
        families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        values, combine = found.setdefault(metric.name, {}), COMBINE[combine_of(metric)]
        for sample in metric.samples:
            place = (sample.name, tuple(sample.labels.items()))
            before = values.get(place)
            value = sample.value if before is None else combine(before[0], sample.value)
            values[place] = value, sample.exemplar or (before and before[1])
    for name, family in families.items():
        for (sample_name, labels), (value, shown) in found[name].items():
            family.add_sample(sample_name, dict(labels), value, exemplar=shown)
    return list(families.values())


COMBINE: dict[Combine, Callable[[float, float], float]] = {"sum": operator.add, "max": max, "min": min}
COUNTING = ("counter", "histogram")


def combine_of(metric: Metric) -> Combine:
    if metric.type in COUNTING:
        return "sum"
    spec = METRICS.get(metric.name.removeprefix(PREFIX))
    return "max" if spec is None else spec.combine


def counted(metrics: Sequence[Metric]) -> list[Metric]:
    """What stays true of a process that has ended."""
    return [metric for metric in metrics if metric.type in COUNTING]


@dataclass(frozen=True)
class Collected:
    """Metrics that were collected, as the Prometheus client's encoders take a registry."""

    metrics: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.metrics
