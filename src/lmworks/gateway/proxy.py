"""A request for a model: which server is asked, what is done where it fails, and what the client sees."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..observability.tracing import Tracing, end_span, sampled_id, trace_id_of
from ..serve.errors import error_event
from ..serve.limits import APIError
from ..serve.telemetry import request_id
from ..spec.errors import near_names, suggestion
from .config import GatewayConfig, ModelRule
from .exchange import Exchange
from .hedging import Hedging
from .http_client import UpstreamError
from .http_server import ClientConnection, HTTPRequest
from .metrics import Metrics
from .migration import Migration
from .outcomes import RetryBudget
from .relay import StreamRelay
from .request_body import RequestBody
from .rollouts import Rollouts
from .server_choice import ServerChoice
from .server_request import CONTEXT, ServerRequests, priority_of
from .servers import Server, Servers
from .shadow import Shadows
from .tenants.fair_queue import FairQueue
from .tenants.identity import ANYONE
from .tenants.tenancy import Tenancy
from .tries import Tries

log = logging.getLogger("lmworks.gateway")

TRIES = 3  # of a request, at servers of one model


class Proxy:
    """`tenancy`: where clients need keys. `tracing`: where somebody receives spans."""

    def __init__(
        self,
        config: Callable[[], GatewayConfig],
        servers: Servers,
        metrics: Metrics,
        rollouts: Rollouts,
        tenancy: Tenancy | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.config, self.servers, self.metrics, self.rollouts = config, servers, metrics, rollouts
        self.tenancy, self.tracing = tenancy, tracing
        requests = ServerRequests(tenancy)
        self.choice = ServerChoice(config, servers, rollouts)
        self.tries = Tries(self.choice, requests, metrics, tracing)
        self.hedging = Hedging(self.tries, self.choice)
        self.migration = Migration(self.tries, self.choice)
        self.shadows = Shadows(requests)
        self.retries = RetryBudget(lambda: self.config().health.retry_share)
        self.fair_queue = FairQueue(self.room)

    async def handle(self, request: HTTPRequest, connection: ClientConnection) -> None:
        """From a request to the end of its answer."""
        id = request_id(request.header("x-request-id"))
        try:
            caller = self.tenancy.identify(request) if self.tenancy is not None else None
            body = RequestBody(request.body)
            rule = self.config().rule(body.model)
            if caller is not None:
                caller.check_model(body.model)
            self.check_model(rule, body.model)
        except APIError as error:
            connection.respond_error(error, [(b"x-request-id", id.encode())])
            self.metrics.refused(request.path, error)
            fields = {"request_id": id, "path": request.path, "client": request.client, "status": error.status}
            log.info("refused", extra=fields | {"failed": error.code})
            return
        tenant, key = (caller.tenant, caller.key.prefix) if caller is not None else (ANYONE, "")
        exchange = Exchange(request, connection, body, rule, id, tenant=tenant, key=key)
        self.begin_trace(exchange)
        self.metrics.open.inc()
        try:
            async with asyncio.timeout(self.config().timeouts.total or None):
                if self.tenancy is not None and caller is not None:
                    await self.tenancy.admit(exchange, caller)
                await self.wait_for_place(exchange)
                await self.answer_and_copy(exchange)
        except (APIError, TimeoutError) as error:
            self.fail(exchange, error if isinstance(error, APIError) else timed_out("in all"))
        except asyncio.CancelledError:
            exchange.failed = "client_left"
            raise
        except Exception as error:
            log.error("a request failed", extra={"request_id": exchange.id}, exc_info=error)
            self.fail(exchange, APIError(500, "internal_error", "the gateway failed on this request; see its log"))
        finally:
            self.metrics.open.dec()
            if exchange.ticket is not None:
                usage = exchange.usage
                prompt = exchange.ticket.prompt_tokens if usage is None else usage.prompt_tokens
                made = exchange.generated if usage is None else max(usage.completion_tokens, exchange.generated)
                self.fair_queue.leave(exchange.ticket, *((prompt, made) if exchange.chunks or usage else (0, 0)))
            if self.tenancy is not None:
                self.tenancy.settle(exchange)
            exchange.seconds = time.perf_counter() - exchange.began
            self.metrics.ended(exchange)
            fields = log_fields(exchange)
            log.info("request", extra=fields)
            if exchange.span is not None:
                end_span(exchange.span, fields)

    def begin_trace(self, exchange: Exchange) -> None:
        """Without a receiver of spans the client's context is passed on as it is."""
        headers = {name.decode(): exchange.request.header(name.decode()) or "" for name in CONTEXT}
        if self.tracing is None:
            exchange.trace_id = trace_id_of(headers["traceparent"])
            return
        exchange.span = self.tracing.begin(f"POST {exchange.path}", headers)
        exchange.trace_id = sampled_id(exchange.span)

    def check_model(self, rule: ModelRule, name: str) -> None:
        pools = [*rule.pools, *rule.prefill_pools]
        if not self.servers.known(rule.serves, pools):
            if not self.servers.listed(pools):
                raise no_server(name)
            raise unknown_model(name, sorted(self.names()))

    def names(self) -> set[str]:
        """All that clients may ask for."""
        rules = {name for rule in self.config().models for name in (rule.name, *rule.aliases)}
        return rules | {model for server in self.servers for model in server.models}

    async def wait_for_place(self, exchange: Exchange) -> None:
        """Where all pools that may answer have a `max_open`: tenants take turns."""
        config = self.config()
        if not any(pool.max_open for pool in config.pools):
            return
        pools = {server.pool.name: server.pool for server in self.servers.up(exchange.rule.serves, exchange.rule.pools)}
        if not pools or not all(pool.max_open for pool in pools.values()):
            return
        prompt = exchange.meter.demand.prompt_tokens if exchange.meter is not None else len(exchange.body.raw) // 4
        limit, seconds = config.routing.queue, config.routing.queue_seconds
        exchange.ticket = await self.fair_queue.enter(
            exchange.tenant.name, exchange.weight, prompt, list(pools), limit, seconds
        )

    def room(self, pool: str) -> int | None:
        """Requests that a pool may have under way."""
        able = [server for server in self.servers if server.pool.name == pool and server.up and not server.draining]
        if not able:
            return None
        return sum(server.pool.max_open for server in able) if able[0].pool.max_open else sys.maxsize

    # --- answers ------------------------------------------------------------------------------------------

    async def answer_and_copy(self, exchange: Exchange) -> None:
        """A share of the requests of a rollout goes to its candidate too, in shadow."""
        rollout = self.rollouts.of(exchange.rule.name)
        if rollout is None or not self.shadows.wanted(rollout):
            await self.answer(exchange)
            return
        exchange.text = ""
        await self.answer(exchange)
        if exchange.status == 200:
            rule = exchange.rule
            self.shadows.start(exchange, rollout, self.servers.serving(rule.serves, [rollout.rule.candidate]))

    async def answer(self, exchange: Exchange) -> None:
        """Tries servers, and then the models that the rule falls back to; raises the last error."""
        config = self.config()
        last: APIError = no_server(exchange.rule.name)
        failed: set[Server] = set()
        relay = StreamRelay(exchange, not exchange.body.wants_usage)
        self.retries.earn()
        self.hedging.budget.earn()
        exchange.priority = priority_of(exchange, config.level(exchange.rule.name, exchange.tenant.tier))
        for rule in (exchange.rule, *map(config.rule, exchange.rule.fallback)):
            for _ in range(TRIES):
                try:
                    server = self.choice.first(exchange, rule, failed)
                except APIError as refused:  # a model that it falls back to may be in time
                    last = refused
                    break
                if server is None or (exchange.tries and not self.retries.spend()):
                    break
                exchange.tries += 1
                exchange.server, exchange.answering = server, rule.serves
                try:
                    if rule.hedge_seconds:
                        await self.hedging.run(exchange, server, rule, relay, failed)
                    else:
                        await self.tries.run(exchange, server, rule, relay)
                    return
                except UpstreamError as error:
                    server = exchange.server or server  # of two, the one that had begun or failed last
                    failed.add(server)
                    last = self.tries.failed(exchange, server, error)
                    if relay.begun:
                        await self.migration.run(exchange, rule, relay, last)
                        return
        raise last

    def fail(self, exchange: Exchange, error: APIError) -> None:
        """The client's answer where no server has one: a status, or where it has begun an event."""
        exchange.failed, connection = error.code, exchange.connection
        if connection.started:
            if not connection.ended:
                connection.write(error_event(error, exchange.path))
                connection.end()
            return
        exchange.status = error.status
        connection.respond_error(error, exchange.headers)


def unknown_model(name: str, known: Sequence[str]) -> APIError:
    message = f"the model {name[:80]!r} is not served{suggestion(near_names(name, known))}"
    return APIError(404, "model_not_found", message, "model")


def no_server(model: str) -> APIError:
    return APIError(503, "no_server", f"no server of the model {model[:80]!r} takes requests at the moment", None, 1)


def timed_out(what: str) -> APIError:
    return APIError(504, "request_timeout", f"the request took too long {what}")


def log_fields(exchange: Exchange) -> dict[str, Any]:
    """Of a request: times, counts and names, never content."""
    usage = exchange.usage
    return {
        "request_id": exchange.id,
        "path": exchange.path,
        "tenant": exchange.tenant.name,
        "tier": exchange.tenant.tier,
        "model": exchange.rule.name,
        "server": exchange.server.url if exchange.server else None,
        "status": exchange.status,
        "seconds": round(exchange.seconds, 6),
        "first_token": exchange.first_token and round(exchange.first_token, 6),
        "tries": exchange.tries,
        "migrations": exchange.migrations,
        **({"failed": exchange.failed} if exchange.failed else {}),
        **({"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens} if usage else {}),
    }
