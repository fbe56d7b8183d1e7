"""A request for a model: which server is asked, what is done where it fails, and what the client sees."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..observability.tracing import Tracing, context_headers, end_span, sampled_id, trace_id_of
from ..serve.errors import error_event
from ..serve.limits import APIError
from ..serve.sse import DONE
from ..serve.telemetry import request_id
from ..spec.errors import near_names, suggestion
from .admission import in_time
from .attempt import Attempt
from .cache_follower import ASK_FOR_BLOCKS, BLOCKS_HEADER, read_prompt_blocks
from .config import GatewayConfig, ModelRule, Timeouts
from .exchange import Exchange
from .forecast import Work
from .http_client import UpstreamError
from .http_server import ClientConnection, Headers, HTTPRequest
from .metrics import Metrics
from .outcomes import RetryBudget
from .policies import Router
from .prefix_continuation import continued, takes_prefix
from .relay import StreamRelay
from .request_body import RequestBody
from .rollouts import Rollouts
from .servers import Server, Servers
from .shadow import Shadows, whole_text
from .stream_events import UsageFields
from .tenants.fair_queue import FairQueue
from .tenants.identity import ANYONE
from .tenants.tenancy import Tenancy

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("lmworks.gateway")

CONTEXT = (b"traceparent", b"tracestate")  # W3C trace context
PASSED_ON = (b"anthropic-version", b"anthropic-beta", b"accept")  # headers to servers
PASSED_BACK = (b"content-type", b"retry-after")
TRIES = 3
MIGRATIONS = 8  # of one stream
MOST_ANSWERS = 4096  # of a stream that can be continued
USAGE_PATHS = {"/v1/chat/completions", "/v1/completions"}  # whose streams have usage only where it is asked for
END_PATHS = {*USAGE_PATHS, "/v1/responses", "/v1/messages"}  # whose streams say which event is the last


class AnswerFields(msgspec.Struct):
    usage: UsageFields | None = None


ANSWER = msgspec.json.Decoder(AnswerFields)


class Proxy:
    def __init__(self, config: Callable[[], GatewayConfig], servers: Servers, metrics: Metrics) -> None:
        self.config, self.servers, self.metrics = config, servers, metrics
        self.router = Router()
        self.tenancy: Tenancy | None = None  # where clients need keys
        self.tracing: Tracing | None = None  # where somebody receives spans
        self.rollouts: Rollouts | None = None  # where the file has any
        self.shadows = Shadows()
        self.hedges = RetryBudget(lambda: self.config().health.hedge_share)
        self.fair_queue = FairQueue(self.room)
        self.retries = RetryBudget(lambda: self.config().health.retry_share)

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
        if not self.servers.known(rule.serves, rule.pools):
            near = near_names(name, sorted(self.names()))
            raise APIError(404, "model_not_found", f"the model {name[:80]!r} is not served{suggestion(near)}", "model")

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

    # --- tries ------------------------------------------------------------------------------------------

    async def answer_and_copy(self, exchange: Exchange) -> None:
        """A share of the requests of a rollout goes to its candidate too, in shadow."""
        rollout = self.rollouts.of(exchange.rule.name) if self.rollouts is not None else None
        shadowed = self.shadows.wanted(rollout)
        exchange.text = "" if shadowed else None
        await self.answer(exchange)
        if shadowed and rollout is not None and exchange.status == 200:
            rule = exchange.rule
            servers = self.servers.serving(rule.serves, [rollout.rule.candidate])
            self.shadows.start(exchange, rollout, servers, rule, lambda server: self.headers(exchange, server))

    async def answer(self, exchange: Exchange) -> None:
        """Tries servers, and then the models that the rule falls back to; raises the last error."""
        last: APIError = no_server(exchange.rule.name)
        failed: set[Server] = set()
        relay = StreamRelay(exchange, not wants_usage(exchange.body))
        self.retries.earn()
        self.hedges.earn()
        exchange.priority = self.priority(exchange)
        for rule in (exchange.rule, *map(self.config().rule, exchange.rule.fallback)):
            for _ in range(TRIES):
                try:
                    server = self.choose(exchange, rule, failed)
                except APIError as refused:  # a model that it falls back to may be in time
                    last = refused
                    break
                if server is None or (exchange.tries and not self.retries.spend()):
                    break
                exchange.tries += 1
                exchange.server, exchange.answering = server, rule.serves
                try:
                    if rule.hedge_seconds:
                        await self.hedged_attempt(exchange, server, rule, relay, failed)
                    else:
                        await self.attempt(exchange, server, rule, relay)
                    return
                except UpstreamError as error:
                    server = exchange.server or server  # of two, the one that had begun or failed last
                    failed.add(server)
                    last = self.failure(exchange, server, error)
                    if relay.begun:
                        await self.migrate(exchange, rule, relay, last)
                        return
        raise last

    async def migrate(self, exchange: Exchange, rule: ModelRule, relay: StreamRelay, last: APIError) -> None:
        """Goes on with a stream that its server has left, on a server that can take it up; else raises `last`."""
        failed = {exchange.server}
        for _ in range(MIGRATIONS):
            servers = self.servers.serving(rule.serves, rule.pools)
            left = [server for server in servers if server not in failed]
            by_tokens = relay.journal and relay.complete and not relay.by_prefix
            able = [server for server in left if can_continue(server, exchange)] if by_tokens else []
            if not able and relay.plain and exchange.path in USAGE_PATHS and relay.texts:
                if relay.finished:  # nothing was left but its last event
                    exchange.connection.write(DONE)
                    exchange.connection.end()
                    return
                able = [server for server in left if takes_prefix(server, exchange)]
                relay.by_prefix = len(relay.texts)
            if not able:
                raise last
            server = self.router.pick(able, exchange, rule.policy or self.config().routing.policy)
            exchange.server, exchange.migrations = server, exchange.migrations + 1
            try:
                await self.attempt(exchange, server, rule, relay)
                return
            except UpstreamError as error:
                failed.add(server)
                last = self.failure(exchange, server, error)
        raise last

    def choose(self, exchange: Exchange, rule: ModelRule, failed: set[Server]) -> Server | None:
        """Raises APIError where there are servers, and none would answer in time."""
        found = [server for server in self.servers.serving(rule.serves, rule.pools) if server not in failed]
        if exchange.ticket is not None:
            found = [server for server in found if server.pool.name == exchange.ticket.pool] or found
        found = self.rollouts.narrow(found, exchange, rule.name) if self.rollouts is not None else found
        found = in_time(found, exchange, self.config().level(rule.name, exchange.tenant.tier))
        return self.router.pick(found, exchange, rule.policy or self.config().routing.policy) if found else None

    def failure(self, exchange: Exchange, server: Server, error: UpstreamError) -> APIError:
        """Takes note of a try that failed."""
        self.metrics.try_failed(server, error.kind)
        if self.rollouts is not None and not is_busy(error):
            self.rollouts.record(exchange, server, None)
        for policy in self.router.of(exchange):
            policy.failed(server, exchange)
        health = self.config().health
        if is_busy(error):  # a server that says that it is busy works
            server.breaker.abandoned()
        else:
            server.breaker.failed(time.monotonic(), health.failures, health.eject_seconds, health.eject_longest)
        fields = {"request_id": exchange.id, "server": server.url, "reason": f"{error.kind}: {error}"}
        log.warning("a try failed", extra=fields)
        if isinstance(error, RefusedTry):
            return error.api_error
        if error.kind == "timeout":
            return APIError(504, "upstream_timeout", str(error))
        return APIError(502, "upstream_lost" if error.kind == "lost" else "upstream_unreachable", str(error), None, 1)

    async def attempt(self, exchange: Exchange, server: Server, rule: ModelRule, relay: StreamRelay) -> None:
        """One try; raises UpstreamError where another server may do better."""
        exchange.count()
        begun = Try(server, server.begin_work(len(exchange.body.raw)))
        try:
            await self.begin_try(begun, exchange, rule, relay)
            await self.finish_try(begun, exchange, relay)
        finally:
            begun.close(exchange)

    async def hedged_attempt(
        self, exchange: Exchange, server: Server, rule: ModelRule, relay: StreamRelay, failed: set[Server]
    ) -> None:
        """As `attempt`; a server that has not begun in time gets a rival, and the first to begin answers."""
        exchange.count()
        tries = {asyncio.create_task(self.hedge_try(server, exchange, rule, relay)): server}
        winner: Try | None = None
        try:
            await asyncio.wait(tries, timeout=rule.hedge_seconds)
            if not any(task.done() for task in tries):
                others = self.servers.serving(rule.serves, rule.pools)
                others = [one for one in others if one is not server and one not in failed]
                others = self.rollouts.narrow(others, exchange, rule.name) if self.rollouts is not None else others
                if others and self.hedges.spend():
                    second = self.router.pick(others, exchange, rule.policy or self.config().routing.policy)
                    exchange.hedged = True
                    tries[asyncio.create_task(self.hedge_try(second, exchange, rule, relay))] = second
            error: BaseException | None = None
            while winner is None and tries:
                done, _ = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    one = tries.pop(task)
                    if task.exception() is None and winner is None:
                        winner = task.result()
                    elif task.exception() is None:
                        one.breaker.abandoned()
                        task.result().close(exchange)
                    elif isinstance(failure := task.exception(), UpstreamError) and (tries or winner):
                        failed.add(one)
                        self.failure(exchange, one, failure)
                    else:
                        error, exchange.server = task.exception(), one
            for task in tries:
                task.cancel()
            await asyncio.gather(*tries, return_exceptions=True)
            if winner is None:
                assert error is not None
                raise error
            exchange.server = winner.server
            await self.finish_try(winner, exchange, relay)
        finally:
            for task in tries:
                task.cancel()
            if winner is not None:
                winner.close(exchange)

    async def hedge_try(self, server: Server, exchange: Exchange, rule: ModelRule, relay: StreamRelay) -> Try:
        begun = Try(server, server.begin_work(len(exchange.body.raw)))
        try:
            await self.begin_try(begun, exchange, rule, relay)
        except BaseException:
            begun.close(exchange)
            raise
        return begun

    async def begin_try(self, begun: Try, exchange: Exchange, rule: ModelRule, relay: StreamRelay) -> None:
        """Until the answer's first bytes, or all of it where it is no stream."""
        server, attempt = begun.server, begun.attempt
        changes = self.changes(exchange, server, rule)
        server.breaker.begin()
        if relay.by_prefix:
            changes |= continued(server, exchange, "".join(relay.texts), relay.by_prefix)
        elif can_continue(server, exchange):
            changes["continuation"] = relay.continuation(answers_of(exchange.body)) if relay.begun else {}
        if self.tracing is not None and exchange.span is not None:
            begun.span = self.tracing.begin_try(exchange.span, server.url)
        headers = self.headers(exchange, server, begun.span)
        try:
            await self.begin(attempt, exchange, exchange.body.with_changes(changes), headers, self.config().timeouts)
        except UpstreamError as error:
            begun.failed = error.kind
            raise
        except asyncio.CancelledError:
            server.breaker.abandoned()
            raise
        self.learn_blocks(attempt, exchange)
        if attempt.streams:
            server.rates.answered(begun.work)

    async def finish_try(self, begun: Try, exchange: Exchange, relay: StreamRelay) -> None:
        server, attempt = begun.server, begun.attempt
        first_token = time.monotonic() - begun.work.sent
        try:
            if attempt.streams:
                await self.stream(attempt, exchange, relay, self.config().timeouts)
            elif relay.begun:
                raise RefusedTry(attempt)
            else:
                self.whole(attempt, exchange)
        except UpstreamError as error:
            begun.failed = error.kind
            raise
        except asyncio.CancelledError:
            server.breaker.abandoned()
            raise
        server.breaker.succeeded()
        if self.rollouts is not None:
            self.rollouts.record(exchange, server, first_token)

    def learn_blocks(self, attempt: Attempt, exchange: Exchange) -> None:
        header = attempt.headers.get(BLOCKS_HEADER)
        if attempt.status == 200 and header is not None and (blocks := read_prompt_blocks(header)) is not None:
            for policy in self.router.of(exchange):
                policy.answered(attempt.server, exchange, blocks)

    def priority(self, exchange: Exchange) -> int:
        """As the objective has it; a client may say that it can wait longer."""
        level, own = self.config().level(exchange.rule.name, exchange.tenant.tier), exchange.body.get("priority")
        if level is None or not level.priority:
            return own if isinstance(own, int) else 0
        return max(level.priority, own) if isinstance(own, int) else level.priority

    def changes(self, exchange: Exchange, server: Server, rule: ModelRule) -> dict[str, Any]:
        """What a server is told differently than the client said it."""
        found: dict[str, Any] = {} if exchange.body.model == rule.serves else {"model": rule.serves}
        if exchange.priority and server.pool.kind in ("lmworks", "vllm"):
            found["priority"] = exchange.priority
        if self.tenancy is not None:
            found |= self.tenancy.salt(exchange, server)
        if exchange.body.stream and exchange.path in USAGE_PATHS and not wants_usage(exchange.body):
            options = exchange.body.get("stream_options")
            found["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return found

    def headers(self, exchange: Exchange, server: Server, span: Span | None = None) -> Headers:
        """Of a request to a server; its spans are below `span`, or the request's."""
        span = span or exchange.span
        own = [(b"content-type", b"application/json"), (b"x-request-id", exchange.id.encode()), *server.headers()]
        context = passed_on(exchange.request, CONTEXT) if span is None else context_headers(span)
        return [*own, *context, *passed_on(exchange.request, PASSED_ON)]

    async def begin(
        self, attempt: Attempt, exchange: Exchange, content: bytes, headers: Headers, timeouts: Timeouts
    ) -> None:
        seconds = timeouts.first_token if exchange.body.stream else timeouts.per_try
        if attempt.server.cached is not None:
            headers.append(ASK_FOR_BLOCKS)
        path = attempt.server.path_of(exchange.path)
        try:
            async with asyncio.timeout(seconds or None):
                await attempt.start("POST", path, headers, content)
                if not attempt.streams:
                    await attempt.ended
        except TimeoutError:
            raise UpstreamError("timeout", f"nothing came from the server within {seconds:g} s") from None
        if attempt.status == 429 or attempt.status >= 500:
            raise RefusedTry(attempt)

    def whole(self, attempt: Attempt, exchange: Exchange) -> None:
        content = attempt.content
        exchange.status = attempt.status
        if attempt.status == 200:
            exchange.first_token = time.perf_counter() - exchange.began
            exchange.usage = usage_of(content)
            if exchange.text is not None:
                exchange.text = whole_text(content)
            exchange.usage_counts = exchange.usage is not None
            exchange.count()
        headers: Headers = list(exchange.headers)
        headers += [(name, found) for name in PASSED_BACK if (found := attempt.headers.get(name)) is not None]
        exchange.connection.respond(attempt.status, headers, content)

    async def stream(self, attempt: Attempt, exchange: Exchange, relay: StreamRelay, timeouts: Timeouts) -> None:
        connection, idle = exchange.connection, timeouts.idle or None
        connection.on_pause = attempt.pause
        attempt.pause(connection.paused)
        relay.restart()
        relay.last_at = connection.loop.time()
        attempt.relay_to(relay)
        while not attempt.ended.done():
            left = None if idle is None else relay.last_at + idle - connection.loop.time()
            if left is not None and left <= 0:
                if relay.done:
                    break
                raise UpstreamError("timeout", f"the stream stood still for {idle:g} s")
            await asyncio.wait([attempt.ended], timeout=left)
            if connection.paused:  # the server waits for the client, not the other way round
                relay.last_at = connection.loop.time()
        if not relay.done:  # a server that is lost after the last event has answered
            attempt.ended.result()
            if exchange.path in END_PATHS:
                raise UpstreamError("lost", "the server ended its stream too early")
        connection.end()

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


@dataclass(eq=False)
class Try:
    """A request at one server."""

    server: Server
    work: Work
    attempt: Attempt = field(init=False)
    span: Span | None = None
    failed: str | None = None  # why its server did not answer

    def __post_init__(self) -> None:
        self.attempt = Attempt(self.server)

    def close(self, exchange: Exchange) -> None:
        tokens = exchange.chunks if self.attempt.streams else int(self.attempt.status == 200)
        self.server.rates.end(self.work, tokens)
        self.attempt.close()
        if self.span is not None:
            end_span(self.span, {"status": self.attempt.status, "failed": self.failed})


class RefusedTry(UpstreamError):
    """A server that cannot answer now. If no other does, the client is told what it said."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__("refused", f"the server answered with status {attempt.status}")
        retry = attempt.headers.get(b"retry-after", b"")
        after = float(retry) if retry.isdigit() and len(retry) < 7 else None
        status = attempt.status if attempt.status in (429, 503) else 502
        message, code = str(self), "upstream_failed"
        try:
            if status == attempt.status:
                error = json.loads(attempt.content)["error"]
                message, code = str(error["message"]), str(error.get("code") or code)
        except (ValueError, KeyError, TypeError):
            pass
        self.api_error = APIError(status, code, message, None, after)


def is_busy(error: UpstreamError) -> bool:
    """A server that says so works."""
    return isinstance(error, RefusedTry) and error.api_error.status == 429


def passed_on(request: HTTPRequest, names: Iterable[bytes]) -> Headers:
    return [(name, found) for name in names if (found := request.headers.get(name)) is not None]


def can_continue(server: Server, exchange: Exchange) -> bool:
    """Whether a stream of this server names its tokens, and another one's can be continued there."""
    ours = server.pool.kind == "lmworks" and exchange.body.stream and exchange.path in USAGE_PATHS
    return ours and answers_of(exchange.body) <= MOST_ANSWERS


def answers_of(body: RequestBody) -> int:
    """How many answers a request has: n to each of its prompts."""
    prompt, n = body.get("prompt"), body.get("n")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return (len(prompt) if several else 1) * (n if isinstance(n, int) else 1)


def wants_usage(body: RequestBody) -> bool:
    options = body.get("stream_options") if "stream_options" in body.fields else None
    return isinstance(options, dict) and options.get("include_usage") is True


def usage_of(content: bytes) -> Any:
    try:
        found = ANSWER.decode(content).usage
    except msgspec.MsgspecError:
        return None
    return None if found is None else found.usage()


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
