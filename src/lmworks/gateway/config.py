"""The gateway's file: pools of servers, the models that clients name, and how requests are routed between them.

    [listen]
    port = 8080

    [[pools]]
    name = "local"
    urls = ["http://10.0.0.5:8000/v1", "http://10.0.0.6:8000/v1"]

    [[pools]]
    name = "cloud"
    kind = "openai"
    urls = ["https://api.example.com/v1"]
    key_env = "CLOUD_KEY"

    [[models]]
    name = "chat"                 # what clients say
    serves = "Qwen3-8B"           # what the servers call it
    policy = ["session_affinity", "least_loaded"]
    fallback = ["chat-small"]

Every model that a server lists can be asked for by its own name: `[[models]]` is for other names and other rules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from ..serve.keys import read_toml
from ..serve.tls import TLSFiles
from ..spec import SpecError
from ..spec.errors import did_you_mean
from ..spec.schema import Section, opt
from .quality import QualityCheck
from .rollout_rule import RolloutRule
from .slo import ServiceLevel, find_level
from .tenants.config import Tenants, Tier

KINDS = ("lmworks", "vllm", "sglang", "llamacpp", "openai")
POLICIES = (
    "round_robin",
    "least_loaded",
    "power_of_two",
    "session_affinity",
    "prefix_cache",
    "cost",
    "model_size",
    "tier",
    "priority",
    "warm_adapter",
)  # see `gateway.policies`


@dataclass(frozen=True)
class Listen(Section):
    section: ClassVar[str] = "listen"

    host: str = opt("127.0.0.1", "address to listen on")
    port: int = opt(8080, "port (0: any that is free)", ge=0, le=65535)
    body_bytes: int = opt(32 * 2**20, "largest request", ge=1024)
    header_bytes: int = opt(32 * 2**10, "all headers of a request together", ge=1024)
    connections: int = opt(16384, "connections of clients at once", ge=1)
    drain_seconds: float = opt(30.0, "how long requests under way may take after SIGTERM", ge=0)
    depth: int = opt(128, "levels of nesting in a body", ge=8)
    values: int = opt(2**18, "objects, lists and strings in a body", ge=64)
    tls_cert: str = opt("", "certificate (PEM): serve HTTPS")
    tls_key: str = opt("", "its private key (PEM)")
    tls_client_ca: str = opt("", "authorities (PEM): clients must show a certificate of theirs (mutual TLS)")

    def check(self) -> None:
        check_pair("listen", self.tls_cert, self.tls_key)
        if self.tls_client_ca and not self.tls_cert:
            raise SpecError("listen: tls_client_ca needs tls_cert and tls_key")

    @property
    def tls(self) -> TLSFiles | None:
        return tls_files(self.tls_cert, self.tls_key, self.tls_client_ca) if self.tls_cert else None


@dataclass(frozen=True)
class Health(Section):
    """Probes, and what outcomes of requests say."""

    section: ClassVar[str] = "health"

    interval: float = opt(2.0, "seconds between two probes of a server", gt=0)
    timeout: float = opt(2.0, "seconds that a probe may take", gt=0)
    fall: int = opt(2, "failed probes in a row until a server gets no more requests", ge=1)
    failures: int = opt(5, "failed requests in a row until a server is left alone for a while", ge=1)
    eject_seconds: float = opt(2.0, "how long the first time; twice as long each time after it", gt=0)
    eject_longest: float = opt(120.0, "…and at most", gt=0)
    retry_share: float = opt(0.2, "most retries, as a share of all requests", ge=0, le=1)
    hedge_share: float = opt(0.05, "most hedged requests, as a share of all", ge=0, le=1)
    rise: int = opt(1, "good probes in a row until it gets some again", ge=1)


@dataclass(frozen=True)
class Timeouts(Section):
    """0 is none, where it is allowed."""

    section: ClassVar[str] = "timeouts"

    connect: float = opt(2.0, "seconds for a connection to a server", gt=0)
    first_token: float = opt(60.0, "seconds until the first event of a stream, of each try (0: any)", ge=0)
    idle: float = opt(30.0, "seconds between two events of a stream (0: any)", ge=0)
    per_try: float = opt(600.0, "seconds for a whole answer that is not streamed, of each try (0: any)", ge=0)
    total: float = opt(1200.0, "seconds for a request with all of its tries (0: any)", ge=0)


@dataclass(frozen=True)
class Pool(Section):
    """Servers of one kind, found in one or several ways."""

    section: ClassVar[str] = "pools"

    name: str = opt("", "name in metrics, logs and models")
    kind: str = opt("lmworks", "what its servers are", choices=KINDS)
    urls: list[str] = opt(list, "their addresses, as clients know them: ending in /v1")
    dns: str = opt("", "HOST:PORT: every address of this name is a server")
    kubernetes: str = opt("", "NAMESPACE/SERVICE:PORT: every ready endpoint of this service is a server")
    register: bool = opt(False, "servers may register themselves (`lmworks serve --register`)")
    register_env: str = opt("", "environment variable with the secret that they register with")
    models: list[str] = opt(list, "what its servers have (empty: they are asked)")
    key_env: str = opt("", "environment variable with the key for its servers")
    key_file: str = opt("", "file with that key, read again when it changes")
    tls: bool = opt(False, "HTTPS to the servers that dns and kubernetes find")
    tls_ca: str = opt("", "authorities (PEM) of its servers' certificates (empty: the system's)")
    tls_name: str = opt("", "name in its servers' certificates (empty: the host of each address)")
    tls_cert: str = opt("", "certificate (PEM) that its servers want to see (mutual TLS)")
    tls_key: str = opt("", "its private key (PEM)")
    max_open: int = opt(0, "requests at once to each of its servers; those beyond wait, by weight (0: any)", ge=0)
    price_in: float = opt(0.0, "dollars for a million prompt tokens", ge=0)
    price_out: float = opt(0.0, "dollars for a million generated tokens", ge=0)
    size: float = opt(0.0, "billions of parameters of its model, for the policy model_size", ge=0)
    up_to_tokens: int = opt(0, "longest prompt and answer that model_size sends there (0: any)", ge=0)
    tiers: list[str] = opt(list, "tiers that it is for, for the policy tier (empty: those that no pool names)")

    def check(self) -> None:
        if not self.name:
            raise SpecError("pools: every pool needs a name")
        where = f"pools: {self.name!r}"
        if not (self.urls or self.dns or self.kubernetes or self.register):
            raise SpecError(f"{where} has no servers: give urls, dns, kubernetes or register = true")
        for url in self.urls:
            check_url(where, url)
        if self.dns and not self.dns.rpartition(":")[2].isdecimal():
            raise SpecError(f"{where}: dns = {self.dns!r} has no port: write HOST:PORT")
        if self.kubernetes:
            service = self.kubernetes.partition("/")[2]
            if not service.partition(":")[2] or not self.kubernetes.partition("/")[0]:
                raise SpecError(f"{where}: kubernetes = {self.kubernetes!r}: write NAMESPACE/SERVICE:PORT")
        check_pair(where, self.tls_cert, self.tls_key)
        if self.key_env and self.key_file:
            raise SpecError(f"{where} has key_env and key_file: give one of them")
        if self.key_env and self.key_env not in os.environ:
            raise SpecError(f"{where}: key_env = {self.key_env!r}: there is no such environment variable")
        if self.key_file and not Path(self.key_file).is_file():
            raise SpecError(f"{where}: key_file = {self.key_file!r}: there is no such file")
        if self.register and not self.register_env:
            raise SpecError(f"{where}: who registers a server reads prompts and gets its key: set register_env")
        if self.register_env and self.register_env not in os.environ:
            raise SpecError(f"{where}: register_env = {self.register_env!r}: there is no such environment variable")

    @property
    def tls_files(self) -> TLSFiles:
        return tls_files(self.tls_cert, self.tls_key, self.tls_ca)

    def server_key(self) -> str | None:
        """The key for its servers."""
        if self.key_env:
            return os.environ[self.key_env]
        return Path(self.key_file).read_text(encoding="utf-8").strip() if self.key_file else None


@dataclass(frozen=True)
class ModelRule(Section):
    """A name that clients use, and which servers answer it how."""

    section: ClassVar[str] = "models"

    name: str = opt("", "what clients ask for")
    aliases: list[str] = opt(list, "other names for it")
    serves: str = opt("", "what its servers call it (empty: the same)")
    pools: list[str] = opt(list, "pools that may answer (empty: all that have it)")
    prefill_pools: list[str] = opt(list, "pools that compute prompts for those of pools, which take the KV blocks")
    hedge_seconds: float = opt(0.0, "without a first token for so long, another server is asked too (0: never)", ge=0)
    policy: list[str] = opt(list, "routing policies, in their order (empty: routing.policy)")
    fallback: list[str] = opt(list, "models to try where none of its servers can answer")

    def check(self) -> None:
        if not self.name:
            raise SpecError("models: every model needs a name")
        check_policies(f"models: {self.name!r}: policy", self.policy)
        if self.prefill_pools and not self.pools:
            raise SpecError(f"models: {self.name!r}: prefill_pools need pools: those that answer")
        if both := sorted({*self.prefill_pools} & {*self.pools}):
            raise SpecError(f"models: {self.name!r}: {both[0]!r} is one of pools and of prefill_pools: name it once")
        self.derive("serves", self.serves or self.name)


@dataclass(frozen=True)
class Routing(Section):
    section: ClassVar[str] = "routing"

    policy: list[str] = opt(["least_loaded"], "policies, in their order: filters, scorers, and what picks")
    queue: int = opt(256, "requests of one tenant that may wait for a pool with max_open", ge=0)
    queue_seconds: float = opt(30.0, "longest wait for such a pool (0: any)", ge=0)

    def check(self) -> None:
        check_policies("routing.policy", self.policy)


@dataclass(frozen=True)
class Monitoring(Section):
    section: ClassVar[str] = "monitoring"

    prometheus: str = opt("", "its address: the gateway's page shows the alerts that it has")

    def check(self) -> None:
        if self.prometheus:
            check_url("monitoring.prometheus", self.prometheus)


@dataclass(frozen=True)
class GatewayConfig(Section):
    """The file as a whole."""

    listen: Listen = opt(Listen, "where clients come in")
    pools: list[Pool] = opt(list, "servers")
    models: list[ModelRule] = opt(list, "names for clients")
    routing: Routing = opt(Routing, "how a server is chosen")
    health: Health = opt(Health, "which servers get requests")
    timeouts: Timeouts = opt(Timeouts, "how long anything may take")
    rollouts: list[RolloutRule] = opt(list, "new versions beside old ones")
    slos: list[ServiceLevel] = opt(list, "how soon requests are to be answered")
    monitoring: Monitoring = opt(Monitoring, "who watches the fleet")
    quality_checks: list[QualityCheck] = opt(list, "prompts whose answers are known")
    tenants: Tenants = opt(Tenants, "keys of clients, their limits and usage")
    tiers: list[Tier] = opt(list, "levels of service of tenants")

    def check(self) -> None:
        if not self.pools:
            raise SpecError("pools: there are none: a gateway needs servers, [[pools]] with urls")
        pools = [pool.name for pool in self.pools]
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        tiers = [tier.name for tier in self.tiers]
        slos = [slo.label for slo in self.slos]
        for what, given in (("pools", pools), ("models", names), ("tiers", tiers), ("slos", slos)):
            twice = next((name for name in given if given.count(name) > 1), None)
            if twice is not None:
                raise SpecError(f"{what}: the name {twice!r} is there twice")
        if tiers and not self.tenants.on:
            raise SpecError(f"tiers: {tiers[0]!r} is of no use without tenants.store, which turns keys on")
        for rollout in self.rollouts:
            for name in (rollout.stable, rollout.candidate):
                if name not in pools:
                    raise SpecError(
                        f"rollouts: {rollout.model!r}: no pool is called {name!r}{did_you_mean(name, pools)}"
                    )
        for model in self.models:
            unknown = next((name for name in (*model.pools, *model.prefill_pools) if name not in pools), None)
            if unknown is not None:
                raise SpecError(f"models: {model.name!r}: no pool is called {unknown!r}{did_you_mean(unknown, pools)}")
        self.check_prefill_pools()

    def check_prefill_pools(self) -> None:
        for pool in self.pools:
            if pool.kind != "lmworks" and self.transfers(pool.name):
                raise SpecError(
                    f"pools: {pool.name!r}: prefill_pools need kind = 'lmworks' on both sides, not {pool.kind!r}"
                )
        for rollout in self.rollouts:
            if self.rule(rollout.model).prefill_pools:
                raise SpecError(f"rollouts: {rollout.model!r}: a model with prefill_pools cannot have a rollout")
        for model in self.models:
            model.derive("pools", model.pools or list(self.answering))

    @cached_property
    def answering(self) -> tuple[str, ...]:
        """Pools that may answer where a model names none: all but prefill_pools. Empty: all."""
        prefill = {name for model in self.models for name in model.prefill_pools}
        return tuple(pool.name for pool in self.pools if pool.name not in prefill) if prefill else ()

    def transfers(self, pool: str) -> bool:
        """Whether its servers hand KV blocks out, or take them."""
        return any(pool in (*one.pools, *one.prefill_pools) for one in self.models if one.prefill_pools)

    def level(self, model: str, tier: str) -> ServiceLevel | None:
        """The objective of a tier's requests for a model."""
        return find_level(self.slos, model, tier) if self.slos else None

    def uses(self, policy: str) -> bool:
        """Whether any model is routed by it."""
        return any(policy in (model.policy or self.routing.policy) for model in self.models) or (
            policy in self.routing.policy
        )

    def rule(self, name: str) -> ModelRule:
        """The rule of what a client asks for; one of its own for a name that no rule has."""
        found = next((one for one in self.models if name == one.name or name in one.aliases), None)
        return found or own_rule(name, self.answering)


@lru_cache(1024)
def own_rule(name: str, pools: tuple[str, ...] = ()) -> ModelRule:
    return ModelRule(name=name, pools=list(pools))


def check_url(where: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of brackets without an end, of a port that is none
        valid = False
    if not valid or not url.isprintable() or " " in url:
        raise SpecError(f"{where}: {url!r} is not an address, e.g. http://host:8000/v1")
    if parts.username or parts.query:
        raise SpecError(f"{where}: addresses are shown in logs: give its key as key_env or key_file")


def check_pair(where: str, cert: str, key: str) -> None:
    if bool(cert) != bool(key):
        raise SpecError(f"{where}: tls_cert and tls_key go together")


def tls_files(cert: str, key: str, ca: str) -> TLSFiles:
    return TLSFiles(*(Path(path) if path else None for path in (cert, key, ca)))


def check_policies(where: str, names: list[str]) -> None:
    unknown = next((name for name in names if name not in POLICIES), None)
    if unknown is not None:
        raise SpecError(f"{where}: there is no {unknown!r}{did_you_mean(unknown, POLICIES)}")


def read_config(path: Path) -> GatewayConfig:
    table = read_toml(path)
    if not isinstance(table, Mapping):
        raise SpecError(f"{path}: is not a table")
    config = GatewayConfig.from_dict(table)
    if "tenants" in table and not config.tenants.on:
        raise SpecError('tenants: without store nobody is asked for a key, e.g. store = "sqlite:///gateway.db"')
    return config
