"""One try of a request: a server is asked, its answer goes to the client, and what that says of the server is noted."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..observability.tracing import Tracing, end_span
from ..serve.limits import APIError
from .attempt import Attempt
from .cache_follower import ASK_FOR_BLOCKS, BLOCKS_HEADER, read_prompt_blocks
from .config import ModelRule, Timeouts
from .exchange import Exchange
from .forecast import Work
from .http_client import UpstreamError
from .http_server import Headers
from .metrics import Metrics
from .prefill_decode import block_address, can_prefill, prompt_alone
from .prefix_continuation import continued
from .relay import StreamRelay
from .server_choice import ServerChoice
from .server_request import ServerRequests
from .servers import Server
from .shadow import whole_text
from .stream_events import UsageFields
from .token_continuation import CONTINUED, answers_of, names_tokens

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("lmworks.gateway")

PASSED_BACK = (b"content-type", b"retry-after")


class AnswerFields(msgspec.Struct):
    usage: UsageFields | None = None


ANSWER = msgspec.json.Decoder(AnswerFields)


class Tries:
    """`tracing`: where somebody receives spans."""

    def __init__(
        self, choice: ServerChoice, requests: ServerRequests, metrics: Metrics, tracing: Tracing | None
    ) -> None:
        self.choice, self.config, self.router, self.rollouts = choice, choice.config, choice.router, choice.rollouts
        self.requests, self.metrics, self.tracing = requests, metrics, tracing

    async def run(self, exchange: Exchange, server: Server, rule: ModelRule, relay: StreamRelay) -> None:
        """Raises UpstreamError where another server may do better."""
        exchange.count()
        await self.finish(await self.begin(exchange, server, rule, relay), exchange, relay)

    async def begin(self, exchange: Exchange, server: Server, rule: ModelRule, relay: StreamRelay) -> Try:
        """Until the answer's first bytes, or all of it where it is no stream. `finish` closes the try."""
        begun = Try(server, server.begin_work(len(exchange.body.raw)))
        try:
            await self.send(begun, exchange, rule, relay)
        except BaseException:
            begun.close(exchange)
            raise
        return begun

    async def send(self, begun: Try, exchange: Exchange, rule: ModelRule, relay: StreamRelay) -> None:
        server, attempt = begun.server, begun.attempt
        changes = self.requests.changes(exchange, server, rule)
        if rule.prefill_pools and server.pool.name in rule.pools and can_prefill(exchange):
            changes |= await self.compute_prompt(exchange, server, rule)
        if relay.by_prefix:
            changes |= continued(server, exchange, "".join(relay.texts), relay.by_prefix)
        elif names_tokens(server, exchange):
            changes["continuation"] = relay.continuation(answers_of(exchange.body)) if relay.begun else {}
        await self.post(begun, exchange, exchange.body.with_changes(changes))
        if attempt.streams:
            server.breaker.answered()
            server.rates.answered(begun.work)

    async def post(self, begun: Try, exchange: Exchange, content: bytes) -> None:
        server = begun.server
        server.breaker.begin()
        if self.tracing is not None and exchange.span is not None:
            begun.span = self.tracing.begin_try(exchange.span, server.url)
        headers = self.requests.headers(exchange, server, begun.span)
        with begun.noting_failure():
            await self.wait_for_answer(begun.attempt, exchange, content, headers)
        self.learn_blocks(begun.attempt, exchange)

    async def compute_prompt(self, exchange: Exchange, decode: Server, rule: ModelRule) -> dict[str, Any]:
        """By a prefill server; returns what tells `decode` whose KV blocks to take, nothing where it computes them."""
        failed: set[Server] = set()
        found: dict[str, Any] = {}
        while not found and (server := self.choice.prefill(exchange, rule, decode, failed)) is not None:
            try:
                if not await self.prefill(exchange, server, rule):
                    break  # the decode server says what is wrong with the request
                found = {"kv_transfer_params": {"remote": block_address(server, rule.serves)}}
            except UpstreamError as error:
                failed.add(server)
                self.failed(exchange, server, error)
                if error.kind == "timeout":
                    break
        self.metrics.prefills.labels(exchange.rule.name, "remote" if found else "local").inc()
        return found

    async def prefill(self, exchange: Exchange, server: Server, rule: ModelRule) -> bool:
        begun = Try(server, server.begin_work(len(exchange.body.raw)))
        try:
            await self.post(begun, exchange, prompt_alone(exchange.body, self.requests.changes(exchange, server, rule)))
            server.breaker.succeeded()
            server.rates.answered(begun.work)
            return begun.attempt.status == 200
        finally:
            begun.close(exchange)

    async def wait_for_answer(self, attempt: Attempt, exchange: Exchange, content: bytes, headers: Headers) -> None:
        timeouts = self.config().timeouts
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

    def learn_blocks(self, attempt: Attempt, exchange: Exchange) -> None:
        header = attempt.headers.get(BLOCKS_HEADER)
        if attempt.status == 200 and header is not None and (blocks := read_prompt_blocks(header)) is not None:
            for policy in self.router.of(exchange):
                policy.answered(attempt.server, exchange, blocks)

    async def finish(self, begun: Try, exchange: Exchange, relay: StreamRelay) -> None:
        """From its first bytes to the client's last."""
        server, attempt = begun.server, begun.attempt
        first_token = time.monotonic() - begun.work.sent
        try:
            with begun.noting_failure():
                if attempt.streams:
                    await self.stream(attempt, exchange, relay, self.config().timeouts)
                elif relay.begun:
                    raise RefusedTry(attempt)
                else:
                    self.whole(attempt, exchange)
            server.breaker.succeeded()
            self.rollouts.record(exchange, server, first_token)
        finally:
            begun.close(exchange)

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
            if exchange.path in CONTINUED:  # where one event says that it is the last
                raise UpstreamError("lost", "the server ended its stream too early")
        connection.end()

    def failed(self, exchange: Exchange, server: Server, error: UpstreamError) -> APIError:
        """Takes note of a try that failed."""
        self.metrics.try_failed(server, error.kind)
        if not is_busy(error):
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

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        try:
            yield
        except UpstreamError as error:
            self.failed = error.kind
            raise
        except asyncio.CancelledError:
            self.server.breaker.abandoned()
            raise

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


def usage_of(content: bytes) -> Any:
    try:
        found = ANSWER.decode(content).usage
    except msgspec.MsgspecError:
        return None
    return None if found is None else found.usage()
