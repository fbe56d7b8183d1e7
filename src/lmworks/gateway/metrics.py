"""Metrics of the gateway, as `observability.catalog` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..observability.families import Labels, counter, exemplar, family, gauge, histogram
from ..serve.limits import APIError
from ..serve.tls import METRIC, Certificates
from .attainment import SLOs
from .exchange import Exchange
from .rollouts import STATES, Rollout
from .servers import Server, Servers
from .slo import ServiceLevel

MAX_TENANTS = 500  # with series of their own, at 60 series a tenant and model
OTHER_TENANTS = "(other)"
REASONS = ("error", "ttft", "tpot", "e2e")
WINNERS = ("first", "second", "none")  # of two servers that were asked, which began to answer before the other
LOST = "upstream_lost"


@dataclass(slots=True)
class Series:
    """Of a model, tenant and tier. Kept, as finding a series by its labels is most of what counting costs."""

    prompt_tokens: Counter
    generation_tokens: Counter
    cached_tokens: Counter
    first_token: Histogram
    per_token: Histogram
    seconds: Histogram


class Metrics:
    def __init__(
        self,
        servers: Servers,
        objectives: Callable[[], list[ServiceLevel]] = list,
        certificates: Certificates | None = None,
        quality: Callable[[], Mapping[Labels, float]] = dict,
        rollouts: Callable[[], Sequence[Rollout]] = list,
    ) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = counter("gateway_requests", registry)
        self.open = gauge("gateway_requests_open", registry)
        self.request_failures = counter("gateway_request_failures", registry)
        self.failures = counter("gateway_try_failures", registry)
        self.retries = counter("gateway_retries", registry)
        self.migrations = counter("gateway_migrations", registry)
        self.hedges = counter("gateway_hedges", registry)
        self.prefills = counter("gateway_prefills", registry)
        self.prompt_tokens = counter("gateway_prompt_tokens", registry)
        self.generation_tokens = counter("gateway_generation_tokens", registry)
        self.cached_tokens = counter("gateway_cached_tokens", registry)
        self.first_token = histogram("gateway_time_to_first_token_seconds", registry)
        self.per_token = histogram("gateway_time_per_output_token_seconds", registry)
        self.seconds = histogram("gateway_e2e_request_latency_seconds", registry)
        self.server_first_token = histogram("gateway_server_time_to_first_token_seconds", registry)
        self.slo_requests = counter("gateway_slo_requests", registry)
        self.slo_missed = counter("gateway_slo_missed", registry)
        self.store_up = gauge("gateway_store_up", registry)
        self.config_reload = gauge("gateway_config_reload_success", registry)
        self.config_reload.set(1)
        self.slos = SLOs(objectives)
        self.series: dict[tuple[str, str, str], Series] = {}
        self.tenants: set[str] = set()
        registry.register(ServerCollector(servers))
        registry.register(SLOCollector(self.slos))
        registry.register(QualityCollector(quality))
        registry.register(RolloutCollector(rollouts))
        registry.register(CertificateCollector(servers, certificates))
        ProcessCollector(registry=registry)

    def series_of(self, model: str, tenant: str, tier: str) -> Series:
        found = self.series.get((model, tenant, tier))
        if found is None:
            found = self.series[model, tenant, tier] = Series(
                self.prompt_tokens.labels(model, tenant, tier),
                self.generation_tokens.labels(model, tenant, tier),
                self.cached_tokens.labels(model, tenant, tier),
                self.first_token.labels(model, tenant, tier),
                self.per_token.labels(model, tenant, tier),
                self.seconds.labels(model, tenant, tier),
            )
            # From 0: the first increase of a series that was not there before is none to Prometheus.
            self.migrations.labels(model)
            self.retries.labels(model)
            for winner in WINNERS:
                self.hedges.labels(model, winner)
            self.request_failures.labels(model, tenant, tier, LOST)
            for slo in self.slos.objectives():
                for reason in REASONS:
                    self.slo_missed.labels(slo.label, tenant, tier, reason)
        return found

    def tenant_of(self, exchange: Exchange) -> str:
        """Its label: as many tenants as there may be series for."""
        name = exchange.tenant.name
        if name in self.tenants:
            return name
        if len(self.tenants) >= MAX_TENANTS:
            return OTHER_TENANTS
        self.tenants.add(name)
        return name

    def ended(self, exchange: Exchange) -> None:
        model, tenant, tier = exchange.rule.name, self.tenant_of(exchange), exchange.tenant.tier
        series, shown = self.series_of(model, tenant, tier), exemplar(exchange.trace_id)
        self.requests.labels(model, exchange.path, str(exchange.status or exchange.failed), tenant, tier).inc()
        if exchange.failed:
            self.request_failures.labels(model, tenant, tier, exchange.failed).inc()
        if exchange.tries > 1:
            self.retries.labels(model).inc(exchange.tries - 1)
        if exchange.hedge:
            self.hedges.labels(model, exchange.hedge).inc()
        if exchange.migrations:
            self.migrations.labels(model).inc(exchange.migrations)
        if exchange.first_token is not None:
            series.first_token.observe(exchange.first_token, shown)
            series.seconds.observe(exchange.seconds, shown)
            if exchange.server is not None and exchange.tries == 1 and not (exchange.migrations or exchange.hedge):
                place = exchange.server.pool.name, exchange.server.url
                self.server_first_token.labels(*place).observe(exchange.first_token, shown)
        if exchange.seconds_per_token is not None:
            series.per_token.observe(exchange.seconds_per_token, shown)
        if exchange.usage is not None:
            series.prompt_tokens.inc(exchange.usage.prompt_tokens)
            series.generation_tokens.inc(exchange.usage.completion_tokens)
            series.cached_tokens.inc(exchange.usage.cached_tokens)
        if (judged := self.slos.judge(exchange)) is not None:
            slo, reason = judged
            self.slo_requests.labels(slo.label, tenant, tier).inc()
            if reason:
                self.slo_missed.labels(slo.label, tenant, tier, reason).inc()

    def refused(self, path: str, error: APIError) -> None:
        """A request for no model that there is: its name stays out of the labels, clients may send any."""
        self.requests.labels("", path, str(error.status), "", "").inc()

    def try_failed(self, server: Server, reason: str) -> None:
        self.failures.labels(server.url, reason).inc()

    def collect(self) -> list[Metric]:
        return list(self.registry.collect())


class ServerCollector(Collector):
    """The servers as they are at each scrape."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    def collect(self) -> Iterator[Metric]:
        found = {(one.pool.name, one.url): one for one in self.servers}

        def of(name: str, value: Callable[[Server], float]) -> Metric:
            return family(f"gateway_server_{name}", {place: value(one) for place, one in found.items()})

        yield of("up", lambda one: float(one.up and not one.draining))
        yield of("requests_open", lambda one: one.open)
        yield of("queue", lambda one: one.queue)
        yield of("kv_cache_usage_perc", lambda one: one.load.kv_used)
        skews: dict[Labels, float] = {
            place: one.clock_skew for place, one in found.items() if one.clock_skew is not None
        }
        yield family("gateway_server_clock_skew_seconds", skews)


class CertificateCollector(Collector):
    """When certificates end: those shown to clients, and those shown to servers."""

    def __init__(self, servers: Servers, listening: Certificates | None) -> None:
        self.servers, self.listening = servers, listening

    def collect(self) -> Iterator[Metric]:
        used = [("clients", self.listening), *(("servers", one) for one in self.servers.certificates.values())]
        ends: dict[Labels, float] = {
            (side, path): end
            for side, found in used
            if found is not None
            for path, end in found.current().expiry.items()
        }
        yield family(f"gateway_{METRIC}", ends)


class QualityCollector(Collector):
    def __init__(self, scores: Callable[[], Mapping[Labels, float]]) -> None:
        self.scores = scores

    def collect(self) -> Iterator[Metric]:
        yield family("gateway_quality_score", self.scores())


class RolloutCollector(Collector):
    def __init__(self, rollouts: Callable[[], Sequence[Rollout]]) -> None:
        self.rollouts = rollouts

    def collect(self) -> Iterator[Metric]:
        found = {one.rule.model: one for one in self.rollouts()}

        def of(name: str, values: Mapping[Labels, float]) -> Metric:
            return family(f"gateway_rollout_{name}", values)

        yield of("share", {(model, one.rule.candidate): one.share for model, one in found.items()})
        states: dict[Labels, float] = {
            (model, state): state == one.state for model, one in found.items() for state in STATES
        }
        yield of("state", states)
        yield of("rollbacks", {(model,): one.rollbacks for model, one in found.items()})
        copies: dict[Labels, float] = {
            (model, how): count for model, one in found.items() for how, count in one.shadowed.items()
        }
        yield of("shadow_requests", copies)


class SLOCollector(Collector):
    def __init__(self, slos: SLOs) -> None:
        self.slos = slos

    def collect(self) -> Iterator[Metric]:
        objectives = self.slos.objectives()
        attained: dict[Labels, tuple[float, float]] = {
            (slo.label, window): (share, slo.objective)
            for slo in objectives
            for window, share in self.slos.attainment(slo).items()
        }
        yield family("gateway_slo_objective", {(slo.label,): slo.objective for slo in objectives})
        yield family("gateway_slo_attainment", {place: share for place, (share, _) in attained.items()})
        burning: dict[Labels, float] = {
            place: (1 - share) / (1 - objective) for place, (share, objective) in attained.items()
        }
        yield family("gateway_slo_burn_rate", burning)
