"""The gateway as a whole: its routes, the servers that it watches, how it starts and ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from ..observability.families import Collected, combined, render
from ..observability.tracing import Tracing
from ..serve.connection import HEADER_SECONDS, SPARE_FILES, raise_file_limit
from ..serve.limits import APIError
from ..serve.middleware import loopback
from ..serve.reload import ReloadedFile, has_terminal
from ..serve.server import NOTICE_S
from ..serve.tls import Certificates, listening_context
from ..spec import SpecError
from . import overview
from .cache_follower import follow_forever
from .config import GatewayConfig, Pool, read_config
from .discovery import Discovery, discoveries, follow
from .discovery.registration import Leases
from .health import probe_forever
from .http_server import ClientConnection, EdgeLimits, HTTPRequest
from .metrics import Metrics
from .proxy import Proxy, unknown_model
from .quality import QualityChecks
from .rollouts import Rollouts
from .servers import Server, Servers
from .tenants.admin_api import PREFIX as ADMIN_PATHS
from .tenants.tenancy import Tenancy
from .workers import Place, Tell

if TYPE_CHECKING:
    from .worker_process import Siblings

log = logging.getLogger("lmworks.gateway")

LEASE_CHECK_S = 1.0
BACKLOG = 4096

MODEL_PATH = "/v1/models/"
# What is passed on to servers: each has a body with a model.
MODEL_PATHS = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score"),
    *("/v1/rerank", "/v2/rerank", "/v1/classify", "/v1/pooling", "/v1/moderations", "/v1/audio/speech"),
    *("/v1/messages/count_tokens", "/v1/images/generations"),
}

FORWARDED = ("forwarded", "x-forwarded-for", "origin")  # by a proxy or a browser, on behalf of somebody else


class Switch(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    action: str


SWITCH = msgspec.json.Decoder(Switch)

Route = Callable[[HTTPRequest, ClientConnection], Awaitable[None]]


class GatewaySettings(ReloadedFile[GatewayConfig]):
    path: Path

    def __init__(self, path: Path, place: Place = Place()) -> None:
        self.place = place
        super().__init__(path)

    def read(self) -> GatewayConfig:
        return self.place.share(read_config(self.path))

    def check_change(self, config: GatewayConfig) -> None:
        old, new = self.config.listen, config.listen
        if (old.host, old.port) != (new.host, new.port):
            raise SpecError("listen: host and port cannot change: restart the gateway for that")
        if (old.tls_cert, old.tls_key, old.tls_client_ca) != (new.tls_cert, new.tls_key, new.tls_client_ca):
            raise SpecError("listen: names of TLS files cannot change: replace the files, or restart the gateway")
        if self.config.tenants.fixed != config.tenants.fixed:
            raise SpecError("tenants: stores, journal and listener cannot change: restart the gateway for that")


class Gateway:
    def __init__(self, settings: GatewaySettings, tracing: Tracing | None = None) -> None:
        self.settings = settings
        self.servers = Servers()
        self.leases = Leases(time.monotonic)
        tls = settings.config.listen.tls
        self.certificates = Certificates(tls, server=True) if tls is not None else None
        self.quality = QualityChecks(lambda: self.settings.config.quality_checks, self.servers)
        tenancy = Tenancy(settings.current, self.servers) if settings.config.tenants.on else None
        own = settings.config.tenants.admin_port
        self.serves_admin = None if tenancy is None or own else tenancy.admin_api.handle
        state = settings.path.with_suffix(".rollouts.json")
        self.siblings: Siblings | None = None  # where there are several workers
        self.rollouts = Rollouts(
            state,
            lambda: self.settings.config.rollouts,
            self.addresses,
            lambda model, now: self.tell("rollout", model, now),
            leads=settings.place.number == 0,
        )
        self.metrics = Metrics(
            self.servers,
            lambda: self.settings.config.slos,
            self.certificates,
            self.quality.scores,
            self.rollouts.current,
        )
        self.proxy = Proxy(settings.current, self.servers, self.metrics, self.rollouts, tenancy, tracing)
        self.connections: set[ClientConnection] = set()
        self.applied: GatewayConfig | None = None  # the file as the servers follow it
        self.draining = False
        self.watched: dict[str, tuple[Pool, list[asyncio.Task[None]]]] = {}
        self.probes: set[asyncio.Task[None]] = set()
        self.routes: dict[tuple[str, str], Route] = {
            ("GET", "/health"): self.health,
            ("GET", "/ready"): self.ready,
            ("GET", "/metrics"): self.show_metrics,
            ("GET", "/v1/models"): self.list_models,
            ("GET", "/gateway/servers"): self.list_servers,
            ("POST", "/gateway/servers"): self.register,
            ("GET", "/gateway/rollouts"): self.list_rollouts,
            ("GET", "/gateway/overview"): self.show_overview,
            ("GET", "/dashboard"): self.show_page,
            ("POST", "/gateway/rollouts"): self.switch_rollout,
            **{("POST", path): self.proxy.handle for path in MODEL_PATHS},
        }

    # --- servers ------------------------------------------------------------------------------------------

    def apply_config(self) -> None:
        """The pools of the file as it is now; unchanged ones keep their servers and what is known of them."""
        config = self.applied = self.settings.current()
        self.servers.keep(config)
        wanted = {pool.name: pool for pool in config.pools}
        for name, (pool, tasks) in list(self.watched.items()):
            if wanted.get(name) != pool:
                for task in tasks:
                    task.cancel()
                del self.watched[name]
        for name, pool in wanted.items():
            if name not in self.watched:
                self.watched[name] = pool, [self.spawn_watch(pool, one) for one in discoveries(pool)]
                self.update(pool, "file", pool.urls)

    def spawn_watch(self, pool: Pool, discovery: Discovery) -> asyncio.Task[None]:
        return asyncio.create_task(follow(discovery, lambda source, urls: self.update(pool, source, urls)))

    def update(self, pool: Pool, source: str, urls: list[str]) -> None:
        config = self.settings.config
        for server in self.servers.update(pool, source, urls, config.timeouts.connect):
            self.spawn_probe(
                probe_forever(
                    server,
                    lambda: self.settings.config.health,
                    lambda: self.settings.config.transfers(pool.name),
                )
            )
            if pool.kind == "lmworks":
                self.spawn_probe(follow_forever(server, lambda: self.settings.config.uses("prefix_cache")))

    def spawn_probe(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.probes.add(task)
        task.add_done_callback(self.probes.discard)

    async def maintain(self) -> None:
        """Once a second: the file, and leases of registered servers."""
        self.spawn_probe(self.rollouts.run())
        while True:
            if self.settings.current() is not self.applied:  # a request may have been the first to see the new file
                self.apply_config()
            self.proxy.fair_queue.dispatch()  # servers may have come up
            self.metrics.config_reload.set(self.settings.error is None)
            if self.proxy.tenancy is not None:
                ledger = self.proxy.tenancy.ledger
                self.metrics.store_up.labels("database").set(ledger.store_error is None)
                self.metrics.store_up.labels("journal").set(ledger.journal_error is None)
                if self.settings.config.tenants.limits:
                    self.metrics.store_up.labels("rates").set(await self.proxy.tenancy.rates.check() is None)
            for pool in self.settings.config.pools:
                if pool.register:
                    self.update(pool, "registered", self.leases.current(pool.name))
            await asyncio.sleep(LEASE_CHECK_S)

    # --- routes -------------------------------------------------------------------------------------------

    async def handle(self, request: HTTPRequest, connection: ClientConnection) -> None:
        route = self.routes.get((request.method, request.path))
        try:
            if route is None and self.serves_admin and request.path.startswith(ADMIN_PATHS):
                route = self.serves_admin
            if route is None and request.method == "GET" and request.path.startswith(MODEL_PATH):
                route = self.show_model
            if self.draining and request.method == "POST":
                raise APIError(503, "shutting_down", "the gateway is shutting down", retry_after=1)
            if route is None:
                raise self.no_route(request)
            await route(request, connection)
        except APIError as error:
            connection.respond_error(error)

    def no_route(self, request: HTTPRequest) -> APIError:
        methods = sorted(method for method, path in self.routes if path == request.path)
        if methods:
            message = f"{request.path} takes {' and '.join(methods)}, not {request.method[:20]}"
            return APIError(405, "method_not_allowed", message)
        return APIError(404, "not_found", f"there is no {request.method[:20]} {request.path[:80]}")

    async def health(self, request: HTTPRequest, connection: ClientConnection) -> None:
        connection.respond_json(200, {"status": "draining" if self.draining else "ok"})

    async def ready(self, request: HTTPRequest, connection: ClientConnection) -> None:
        up = any(server.up and not server.draining for server in self.servers)
        ok = up and not self.draining
        connection.respond_json(200 if ok else 503, {"status": "ok" if ok else "draining" if up else "no_server"})

    async def show_metrics(self, request: HTTPRequest, connection: ClientConnection) -> None:
        found = self.metrics.collect()
        if self.siblings is not None:
            found = combined([*found, *await self.siblings.metrics(found)])
        text, kind = render(Collected(found), request.header("accept"))
        connection.respond(200, [(b"content-type", kind.encode())], text)

    def models_of(self, request: HTTPRequest) -> list[str]:
        """Names that a client may ask for."""
        tenancy = self.proxy.tenancy
        caller = None if tenancy is None else tenancy.authentication.caller(request)
        return sorted(name for name in self.proxy.names() if caller is None or caller.may_use(name))

    async def list_models(self, request: HTTPRequest, connection: ClientConnection) -> None:
        connection.respond_json(200, {"object": "list", "data": list(map(model_object, self.models_of(request)))})

    async def show_model(self, request: HTTPRequest, connection: ClientConnection) -> None:
        name, known = unquote(request.path.removeprefix(MODEL_PATH)), self.models_of(request)
        if name not in known:
            raise unknown_model(name, known)
        connection.respond_json(200, model_object(name))

    async def list_servers(self, request: HTTPRequest, connection: ClientConnection) -> None:
        self.check_admin(request, "the list of servers")
        connection.respond_json(200, {"servers": [describe(server) for server in self.servers]})

    async def list_rollouts(self, request: HTTPRequest, connection: ClientConnection) -> None:
        self.check_admin(request, "the list of rollouts")
        connection.respond_json(200, {"rollouts": [one.describe() for one in self.rollouts.current()]})

    async def switch_rollout(self, request: HTTPRequest, connection: ClientConnection) -> None:
        self.check_admin(request, "switching a rollout")
        try:
            asked = SWITCH.decode(request.body)
        except msgspec.MsgspecError as error:
            raise APIError(400, "invalid_request", f"give model and action: {error}") from None
        connection.respond_json(200, self.rollouts.act(asked.model, asked.action).describe())

    async def show_page(self, request: HTTPRequest, connection: ClientConnection) -> None:
        """Without anything of the fleet in it: that comes from /gateway/overview."""
        html, headers = overview.page()
        connection.respond(200, list(headers), html)

    async def show_overview(self, request: HTTPRequest, connection: ClientConnection) -> None:
        self.check_admin(request, "the overview")
        content = {
            "draining": self.draining,
            "servers": [describe(server) for server in self.servers],
            "slos": overview.objectives(self.metrics.slos),
            "models": overview.latencies(self.metrics, "model_name"),
            "tenants": overview.latencies(self.metrics, "tenant"),
            "alerts": await overview.alerts(self.settings.config.monitoring.prometheus),
        }
        connection.respond_json(200, content)

    def check_admin(self, request: HTTPRequest, what: str) -> None:
        """Keys of admins; where the gateway has no keys, programs on its own machine."""
        if self.proxy.tenancy is not None:
            self.proxy.tenancy.authentication.caller(request).check_role("admin", what)
        elif not loopback(request.client) or any(request.header(name) for name in FORWARDED):
            raise APIError(403, "admin_only", f"without [tenants], {what} is for programs on the gateway's own machine")

    def addresses(self, pool: str) -> list[str]:
        return [server.url for server in self.servers if server.pool.name == pool and server.up]

    async def register(self, request: HTTPRequest, connection: ClientConnection) -> None:
        config = self.settings.current()
        found = self.leases.register(config.pools, request.body, request.header("authorization"))
        pool = next(pool for pool in config.pools if pool.name == found.pool)
        self.tell("registered", f"{found.pool} {found.url}", (found.pool, found.url, self.leases.end(found)))
        self.update(pool, "registered", self.leases.current(pool.name))
        connection.respond_json(200, {"pool": pool.name, "url": found.url, "seconds": found.seconds})

    # --- other workers ------------------------------------------------------------------------------------

    def tell(self, kind: str, name: str, content: Any) -> None:
        if self.siblings is not None:
            self.siblings.tell(kind, name, content)

    def heard(self, message: Tell) -> None:
        """What another worker was told; it is seen here within a second."""
        if message.kind == "rollout":
            self.rollouts.adopt(message.name, message.content)
        else:
            self.leases.apply(*message.content)

    # --- start and end ------------------------------------------------------------------------------------

    def edge_limits(self) -> EdgeLimits:
        listen = self.settings.config.listen
        return EdgeLimits(listen.body_bytes, listen.header_bytes, listen.connections, listen.depth, listen.values)

    def check_files(self) -> None:
        """Reads files that have changed, at once."""
        self.settings.check_files()
        for one in (self.certificates, *self.servers.certificates.values()):
            if one is not None:
                one.check_files()

    async def listen(self, listening: socket.socket, handle: Route) -> asyncio.Server:
        tls, context = self.certificates, None
        if tls is not None:
            context = listening_context(tls.tls, tls.context)
        return await asyncio.get_running_loop().create_server(
            lambda: ClientConnection(handle, self.edge_limits, self.connections),
            sock=listening,
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=HEADER_SECONDS if context is not None else None,
        )

    async def run(self, sockets: Sequence[socket.socket], started: Callable[[], None] = lambda: None) -> None:
        """Serves until SIGTERM or SIGINT, then drains. Ends at once at a second one.

        `sockets`: of clients, and of the admin API where it has one of its own.
        """
        listening, *admin_sockets = sockets
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        raise_file_limit(2 * self.settings.config.listen.connections + SPARE_FILES)  # a request has two connections
        notice = 0.0  # seconds between a failing /ready and closing the socket, for load balancers

        def on_signal(sig: int) -> None:
            nonlocal notice
            if stop.is_set():
                os._exit(128 + sig)
            notice = NOTICE_S if sig == signal.SIGTERM else 0.0
            stop.set()

        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, on_signal, one)
        if not has_terminal():
            loop.add_signal_handler(signal.SIGHUP, self.check_files)
        # Connections in TIME_WAIT must not block the next gateway (see `bind_socket`).
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.apply_config()
        background = [asyncio.create_task(self.maintain()), asyncio.create_task(self.quality.run())]
        tenancy = self.proxy.tenancy
        if tenancy is not None:
            background.append(asyncio.create_task(tenancy.run()))
        server = await self.listen(listening, self.handle)
        admin = None
        if tenancy is not None and admin_sockets:
            admin = await self.listen(admin_sockets[0], tenancy.admin_api.handle)
        gc.collect()
        gc.freeze()  # what is there by now stays: looking through all of it would hold every stream up
        started()
        await stop.wait()
        await self.drain(server, notice)
        if admin is not None:
            admin.close()
        for task in background:
            task.cancel()
        if tenancy is not None:
            await tenancy.close()

    async def drain(self, server: asyncio.Server, notice: float) -> None:
        """/ready says no, then nobody can connect; requests under way are finished."""
        seconds = self.settings.config.listen.drain_seconds
        log.info("shutting down", extra={"seconds": seconds})
        self.draining = True
        await asyncio.sleep(min(notice, seconds))
        server.close()
        for connection in list(self.connections):
            connection.shut()
        end = time.monotonic() + seconds
        while self.connections and time.monotonic() < end:
            await asyncio.sleep(0.05)
        log.info("shut down", extra={"cut_off": len(self.connections)})
        for connection in list(self.connections):
            connection.transport.abort()


def model_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lmworks"}


def describe(server: Server) -> dict[str, object]:
    return {
        "url": server.url,
        "pool": server.pool.name,
        "up": server.up,
        "draining": server.draining,
        "open": server.open,
        "queue": server.queue,
        "kv_used": server.load.kv_used,
        "forecast": server.forecast(1024)._asdict(),  # of a request of 1 KiB, in seconds
        "models": sorted(server.models),
        "cached_blocks": None if server.cached is None else sum(map(len, server.cached.values())),
        "last_error": server.last_error,
    }
