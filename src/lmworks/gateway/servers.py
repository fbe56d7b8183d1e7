"""The servers behind the gateway: what each has, how it is, and what it has to do."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from urllib.parse import urlsplit

from ..serve.backend import TransferSettings
from ..serve.tls import Certificates, TLSFiles
from .config import GatewayConfig, Pool
from .forecast import KV_FULL, Forecast, ServiceRates, Work
from .http_client import ConnectionPool, UpstreamError
from .outcomes import CircuitBreaker


class Kind(NamedTuple):
    """What differs between servers: the path of their probe, and the names of their metrics of load."""

    probe: str = ""  # empty: the list of its models says whether it is up
    running: str = ""
    waiting: str = ""
    kv_used: str = ""  # share of its KV blocks in use
    rate: str = ""  # counter of generated tokens
    adapters: str = ""  # gauge of loaded adapters


KINDS = {
    "lmworks": Kind(
        "/ready", "lmworks:num_requests_running", "lmworks:num_requests_waiting", "lmworks:kv_cache_usage_perc",
        "lmworks:generation_tokens_total", "lmworks:warm_adapters",
    ),
    "vllm": Kind(
        "/health", "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:generation_tokens_total",
    ),
    "sglang": Kind(
        "/health", "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage",
        "sglang:generation_tokens_total",
    ),
    "llamacpp": Kind(
        "/health", "llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:kv_cache_usage_ratio",
        "llamacpp:tokens_predicted_total",
    ),
    "openai": Kind(),
}  # fmt: skip


@dataclass
class Load:
    """What a server reported of itself at its last probe."""

    running: float = 0.0
    waiting: float = 0.0
    kv_used: float = 0.0
    open_then: int = 0  # requests of ours at that time
    warm_adapters: set[str] = field(default_factory=set)  # adapters that are loaded, where it says so


@dataclass(eq=False)
class Server:
    """One server. It gets requests while it is `up`, and not `draining`."""

    url: str
    pool: Pool
    connections: ConnectionPool
    models: frozenset[str] = frozenset()
    up: bool = False
    draining: bool = False
    good_probes: int = 0  # in a row
    bad_probes: int = 0
    last_error: str | None = None
    clock_skew: float | None = None  # seconds: its clock less ours, by the Date of its last probe; None: not known
    open: int = 0  # requests of ours under way
    load: Load = field(default_factory=Load)
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    cached: dict[str, set[bytes]] | None = None  # blocks of its prefix cache by model, where it tells of them
    transfers: dict[str, TransferSettings] | None = None  # by model, of pools whose blocks move; None: not known
    rates: ServiceRates = field(default_factory=ServiceRates)
    since: float = field(default_factory=time.monotonic)

    @cached_property
    def base(self) -> str:
        """The path of its API, /v1."""
        return urlsplit(self.url).path.rstrip("/")

    @cached_property
    def root(self) -> str:
        """The path above it, where probes and metrics are."""
        return self.base.removesuffix("/v1")

    def path_of(self, path: str) -> str:
        """Where a request goes. Clients' queries are not passed on, as little as their keys: some send those there."""
        return self.base + path.removeprefix("/v1") if path.startswith("/v1/") else self.root + path

    @property
    def kind(self) -> Kind:
        return KINDS[self.pool.kind]

    def headers(self) -> list[tuple[bytes, bytes]]:
        try:
            key = self.pool.server_key()
        except OSError as error:
            raise UpstreamError("key", f"key_file = {self.pool.key_file!r}: {error.strerror}") from None
        return [(b"authorization", b"Bearer " + key.encode())] if key else []

    @property
    def queue(self) -> float:
        """Requests that it has to do: as it reported at its last probe, and what we have sent and got back since."""
        return max(float(self.open), self.load.running + self.load.waiting + self.open - self.load.open_then)

    @property
    def waiting(self) -> float:
        """Requests that wait on it: where some do, or its cache is full, those that we sent since its probe do too."""
        full = self.load.waiting > 0 or self.load.kv_used > KV_FULL
        return max(0.0, self.load.waiting + self.open - self.load.open_then) if full else 0.0

    def forecast(self, size: int) -> Forecast:
        """Of a request of so many bytes."""
        return self.rates.forecast(size, self.waiting, self.queue - self.waiting + 1, not self.open)

    def begin_work(self, size: int) -> Work:
        return self.rates.begin(size, self.waiting, self.queue - self.waiting + 1)

    def probed(self, error: str | None, fall: int, rise: int) -> None:
        """Takes note of a probe. The first one decides at once."""
        first = not self.good_probes and not self.bad_probes
        if error is None:
            self.good_probes, self.bad_probes = self.good_probes + 1, 0
            self.up = self.up or first or self.good_probes >= rise
        else:
            self.good_probes, self.bad_probes = 0, self.bad_probes + 1
            self.up = self.up and not first and self.bad_probes < fall
        self.last_error = error


class Servers:
    """All servers of all pools; who discovers them calls `update`."""

    def __init__(self) -> None:
        self.certificates: dict[TLSFiles, Certificates] = {}  # that this gateway shows servers, and believes of them
        self.by_pool: dict[str, dict[str, dict[str, Server]]] = {}  # pool → who found them → address → server

    def __iter__(self) -> Iterator[Server]:
        for sources in self.by_pool.values():
            seen = set[str]()
            for servers in sources.values():
                for url, server in servers.items():
                    if url not in seen:
                        seen.add(url)
                        yield server

    def update(self, pool: Pool, source: str, urls: Iterable[str], connect_seconds: float) -> list[Server]:
        """The servers that this source sees now; returns those that are new."""
        found, sources = list(dict.fromkeys(url.rstrip("/") for url in urls)), self.by_pool.setdefault(pool.name, {})
        before, now, new = sources.get(source, {}), dict[str, Server](), list[Server]()
        for url in found:
            known = before.get(url) or next((one[url] for one in sources.values() if url in one), None)
            if known is None:
                known = Server(url, pool, ConnectionPool(url, connect_seconds), frozenset(pool.models))
                new.append(known)
            known.pool = pool
            self.set_tls(known)
            now[url] = known
        sources[source] = now
        for url, server in before.items():
            if not any(url in servers for servers in sources.values()):
                server.draining = True  # its requests are finished, it gets no others
                server.connections.close()
        return new

    def set_tls(self, server: Server) -> None:
        if server.connections.tls is not None:
            files = server.pool.tls_files
            server.connections.tls = lambda: self.client_certificates(files).context()
            server.connections.tls_name = server.pool.tls_name or None

    def client_certificates(self, files: TLSFiles) -> Certificates:
        """Raises SpecError: a server without certificates is down, not the gateway."""
        if files not in self.certificates:
            self.certificates[files] = Certificates(files, server=False)
        return self.certificates[files]

    def keep(self, config: GatewayConfig) -> None:
        """Pools that the file has no more are let go."""
        for name in [name for name in self.by_pool if name not in {pool.name for pool in config.pools}]:
            for servers in self.by_pool.pop(name).values():
                for server in servers.values():
                    server.draining = True
                    server.connections.close()

    def serving(self, model: str, pools: list[str], without: Container[Server] = ()) -> list[Server]:
        """Servers that may be sent a request for this model, as they call it. `without`: those that it has tried.

        Those that fail are left alone, unless all do: then the cause is likely another one.
        """
        now = time.monotonic()
        able = [server for server in self.up(model, pools) if server not in without]
        return [server for server in able if server.breaker.allows(now)] or able

    def up(self, model: str, pools: list[str]) -> list[Server]:
        return [
            server
            for server in self
            if server.up and not server.draining and model in server.models and (not pools or server.pool.name in pools)
        ]

    def known(self, model: str, pools: list[str]) -> list[Server]:
        """Servers that have this model, be they up or not."""
        return [server for server in self if model in server.models and (not pools or server.pool.name in pools)]

    def listed(self, pools: list[str]) -> bool:
        """Whether every server has said which models it has: one that is away since the gateway started has not."""
        return all(server.models for server in self if not pools or server.pool.name in pools)
