"""Metrics of the gateway for Prometheus, under names beginning with `lmworks:gateway_`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..observability.catalog import BUCKETS
from ..serve.limits import APIError
from ..serve.telemetry import PREFIX
from ..serve.tls import METRIC, Certificates
from .exchange import Exchange
from .servers import Server, Servers

NAME = f"{PREFIX}gateway_"


class Metrics:
    def __init__(self, servers: Servers, certificates: Certificates | None = None) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(f"{NAME}requests", "requests", ["model_name", "path", "status"], registry=registry)
        self.open = Gauge(f"{NAME}requests_open", "requests under way", registry=registry)
        self.failures = Counter(f"{NAME}try_failures", "tries that failed", ["server", "reason"], registry=registry)
        self.retries = Counter(f"{NAME}retries", "tries beyond a request's first", ["model_name"], registry=registry)
        self.migrations = Counter(
            f"{NAME}migrations", "streams that another server went on with", ["model_name"], registry=registry
        )
        self.prompt_tokens = Counter(f"{NAME}prompt_tokens", "prompt tokens", ["model_name"], registry=registry)
        self.generation_tokens = Counter(
            f"{NAME}generation_tokens", "generated tokens", ["model_name"], registry=registry
        )
        self.first_token = Histogram(
            f"{NAME}time_to_first_token_seconds",
            "from the request to the first event of its answer",
            ["model_name"],
            registry=registry,
            buckets=BUCKETS,
        )
        self.seconds = Histogram(
            f"{NAME}e2e_request_latency_seconds",
            "from the request to the last byte of its answer",
            ["model_name"],
            registry=registry,
            buckets=BUCKETS,
        )
        registry.register(ServerCollector(servers))
        registry.register(CertificateCollector(servers, certificates))

    def ended(self, exchange: Exchange) -> None:
        model = exchange.rule.name
        self.requests.labels(model, exchange.path, str(exchange.status or exchange.failed)).inc()
        if exchange.tries > 1:
            self.retries.labels(model).inc(exchange.tries - 1)
        if exchange.migrations:
            self.migrations.labels(model).inc(exchange.migrations)
        if exchange.first_token is not None:
            self.first_token.labels(model).observe(exchange.first_token)
            self.seconds.labels(model).observe(exchange.seconds)
        if exchange.usage is not None:
            self.prompt_tokens.labels(model).inc(exchange.usage.prompt_tokens)
            self.generation_tokens.labels(model).inc(exchange.usage.completion_tokens)

    def refused(self, path: str, error: APIError) -> None:
        """A request for no model that there is: its name stays out of the labels, clients may send any."""
        self.requests.labels("", path, str(error.status)).inc()

    def try_failed(self, server: Server, reason: str) -> None:
        self.failures.labels(server.url, reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class ServerCollector(Collector):
    """The servers as they are at each scrape."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    def collect(self) -> Iterator[Metric]:
        found = list(self.servers)
        yield gauge("server_up", "1: it gets requests", [(one, float(one.up and not one.draining)) for one in found])
        yield gauge("server_requests_open", "requests of this gateway under way", [(one, one.open) for one in found])
        yield gauge("server_queue", "requests that it has to do, as far as is known", [(o, o.queue) for o in found])
        yield gauge("server_kv_cache_usage_perc", "of its KV blocks, 0 to 1", [(o, o.load.kv_used) for o in found])


class CertificateCollector(Collector):
    """When certificates end: those shown to clients, and those shown to servers."""

    def __init__(self, servers: Servers, listening: Certificates | None) -> None:
        self.servers, self.listening = servers, listening

    def collect(self) -> Iterator[Metric]:
        used = [("clients", self.listening), *(("servers", one) for one in self.servers.certificates.values())]
        for use, certificates in used:
            if certificates is not None:
                yield certificates.metric(NAME + METRIC, {"side": use})


def gauge(name: str, what: str, values: list[tuple[Server, float]]) -> Metric:
    family = GaugeMetricFamily(NAME + name, what, labels=["pool", "server"])
    for server, value in values:
        family.add_metric([server.pool.name, server.url], value)
    return family
