"""Where tenants meet requests: who asks, whether it may, what was used. The proxy calls three methods.

caller = tenancy.identify(request)      # before the body is read: 401, 403, 429
await tenancy.admit(exchange, caller)   # rates, budgets, the journal: 429, 503
tenancy.settle(exchange)                # when it has ended, however it did
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...serve.limits import APIError
from ..config import GatewayConfig, Pool
from ..exchange import Exchange
from ..http_server import HTTPRequest
from ..servers import Server, Servers
from .admin_api import AdminAPI
from .authentication import Authentication
from .budgets import Place
from .database import StoreDown, open_database
from .demand import Demand, PromptSizes
from .directory import Caller, Directory
from .journal import Journal, JournalDown, OpenLine
from .ledger import Ledger
from .limits import periods_of
from .rates import Line, LocalRates, Rates, Verdict, amounts_of, lines_of, rate_headers
from .redis_rates import RedisRates
from .store import Store
from .store_thread import StoreThread
from .usage import Spending, UsageRecord, money

log = logging.getLogger("lmworks.gateway")

STORE_RETRY_S = 1.0
SETTLE_S = 2.0  # how long the last requests may take to end, once nobody waits for them
GENERATED = {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
# Servers that know `cache_salt`, and on which paths.
SALTED = {
    "lmworks": {*GENERATED, "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank"},
    "vllm": GENERATED,
    "sglang": GENERATED - {"/v1/responses"},
}


@dataclass(eq=False, slots=True)
class Meter:
    """Counts one request under way, into its slot of the journal: before its client sees a token it is counted."""

    id: str  # of its record
    caller: Caller
    lines: list[Line]  # limits that it was taken from
    places: list[Place]  # budgets that it counts in
    reserved: Spending
    demand: Demand
    journal: Journal | None = None
    open: OpenLine | None = None
    server: Server | None = None

    def count(self, exchange: Exchange) -> None:
        """After each event."""
        if self.journal is None or self.open is None:
            return
        server = exchange.server
        if server is not self.server and server is not None:
            self.server = server
            pool = server.pool
            self.journal.slots.set_server(self.open.slot, *prices(pool), pool.name)
        prompt, completion, cached, exact = used_by(exchange, self.demand)
        self.journal.slots.count_tokens(self.open.slot, prompt, completion, cached, exact)


class Tenancy:
    def __init__(self, config: Callable[[], GatewayConfig], servers: Servers) -> None:
        tenants = config().tenants
        self.config, self.servers = config, servers
        self.store = Store(open_database(tenants.store))
        self.thread = StoreThread(self.store.database)
        self.store.prepare()
        self.directory = Directory(self.store, lambda: self.config().tiers)
        self.directory.apply(self.directory.read_changes())
        self.authentication = Authentication(self.directory, lambda: self.config().tenants)
        self.ledger = Ledger(self.store, Journal(Path(tenants.journal)), lambda: self.config().tenants, self.thread)
        self.ledger.start()
        self.rates: Rates = LocalRates()
        if tenants.limits:
            self.rates = RedisRates(tenants.limits, lambda: self.config().tenants.limits_down)
        self.sizes = PromptSizes()
        self.admin_api = AdminAPI(self)
        self.salt_key = self.store.salt()
        self.salts: dict[tuple[str, str], str] = {}  # of tenants and groups whose requests name none

    # --- a request ----------------------------------------------------------------------------------------

    def identify(self, request: HTTPRequest) -> Caller:
        caller = self.authentication.caller(request)
        caller.check_role("member", "asking a model")
        return caller

    async def admit(self, exchange: Exchange, caller: Caller) -> None:
        """Takes what the request may need from its limits; raises APIError. `settle` must follow if it does not."""
        config, now = self.config().tenants, time.time()
        if self.ledger.store_error is not None and config.store_down == "closed":
            raise APIError(503, "store_unavailable", "the store of keys and usage is away", None, STORE_RETRY_S)
        demand = self.sizes.demand(exchange, config.assumed_output)
        amounts = amounts_of(1, demand.prompt_tokens, demand.completion_tokens)
        subjects = (caller.tenant.subject, caller.tenant.limits), (caller.key.subject, caller.key.limits)
        cost = self.highest_cost(exchange, demand)
        reserved = Spending(1, demand.prompt_tokens + demand.completion_tokens, cost)
        for subject, limits in subjects:
            self.ledger.budgets.check(subject, limits, reserved, now)
        places = [(subject, period) for subject, _ in subjects for period in periods_of(now)]
        self.ledger.budgets.reserve(places, reserved)
        id = f"{exchange.id}.{secrets.token_hex(6)}"  # clients may send one request id twice
        name = caller.tenant.name
        lines = [line for subject, limits in subjects for line in lines_of(subject, limits, amounts, name)]
        meter = Meter(id, caller, lines, places, reserved, demand)
        try:
            if lines:
                verdict = await self.rates.take(id, lines)
                exchange.headers += rate_headers(verdict.states)
                if verdict.refused is not None:
                    raise too_many(verdict)
            self.begin_record(exchange, meter, now)
        except BaseException:
            self.ledger.budgets.release(places, reserved)
            raise
        exchange.meter = meter
        exchange.weight = caller.weight

    def begin_record(self, exchange: Exchange, meter: Meter, now: float) -> None:
        ledger, caller = self.ledger, meter.caller
        tenant, family = caller.tenant.name, caller.key.family
        try:
            meter.open = ledger.begin(meter.id, tenant, family, exchange.body.model, exchange.path, now)
            meter.journal = ledger.journal
        except JournalDown:
            if self.config().tenants.journal_down == "closed":
                self.rates.settle(meter.id, meter.lines, amounts_of(0, 0, 0))
                raise APIError(503, "usage_unavailable", "usage cannot be recorded", None, STORE_RETRY_S) from None

    def settle(self, exchange: Exchange) -> None:
        meter = exchange.meter
        if meter is None:
            return
        exchange.meter = None
        record = self.record(exchange, meter)
        budgets = self.ledger.budgets
        budgets.release(meter.places, meter.reserved)
        if record is not None and meter.open is not None:
            budgets.reserve(record.places(), record.spending())
            if exchange.usage is not None:
                self.sizes.learn(exchange, record.prompt_tokens)
        if meter.open is not None:
            self.ledger.end(meter.open, record)
        used = amounts_of(1, record.prompt_tokens, record.completion_tokens) if record else amounts_of(0, 0, 0)
        if meter.lines:
            self.rates.settle(meter.id, meter.lines, used)

    def salt(self, exchange: Exchange, server: Server) -> dict[str, str]:
        """What separates the cached prefixes of one tenant, or of its group, from others' at this server.

        A salt of the client's own separates its prefixes further; it cannot lead to another tenant's.
        """
        if server.pool.kind not in SALTED or exchange.path not in SALTED[server.pool.kind]:
            return {}
        tenant = exchange.tenant
        whose = ("group", tenant.cache_group) if tenant.cache_group else ("tenant", tenant.name)
        own = exchange.body.get("cache_salt")
        if own is None and whose in self.salts:
            return {"cache_salt": self.salts[whose]}
        said = msgspec.json.encode([*whose, own])
        made = hmac.new(self.salt_key, said, hashlib.sha256).hexdigest()[:32]
        if own is None:
            self.salts[whose] = made
        return {"cache_salt": made}

    def record(self, exchange: Exchange, meter: Meter) -> UsageRecord | None:
        """None where no server was asked."""
        server, line = exchange.server, meter.open
        if server is None or not exchange.tries:
            return None
        prompt, completion, cached, exact = used_by(exchange, meter.demand)
        outcome = "finished"
        if exchange.failed == "client_left":
            outcome = "client_left"
        elif exchange.failed is not None or exchange.status != 200:
            outcome = "failed"
            if not exchange.chunks and exchange.usage is None:
                prompt, completion, cached, exact = 0, 0, 0, True  # its client got nothing
        caller, pool = meter.caller, server.pool
        cost = money(prompt, completion, pool.price_in, pool.price_out)
        return UsageRecord(
            line.id if line is not None else "", line.began if line is not None else 0.0, time.time(),
            caller.tenant.name, caller.key.family, exchange.body.model, pool.name, exchange.path,
            prompt, completion, cached, cost, outcome, not exact,
        )  # fmt: skip

    def highest_cost(self, exchange: Exchange, demand: Demand) -> int:
        """At the dearest of the pools that may answer."""
        pools = self.pools(exchange)
        return max(
            (money(demand.prompt_tokens, demand.completion_tokens, p.price_in, p.price_out) for p in pools), default=0
        )

    def pools(self, exchange: Exchange) -> list[Pool]:
        config = self.config()
        names = {name for rule in (exchange.rule, *map(config.rule, exchange.rule.fallback)) for name in rule.pools}
        return [pool for pool in config.pools if not names or pool.name in names]

    # --- in the background --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follows the store and writes usage into it, until it is cancelled."""
        looked = 0.0
        while True:
            config = self.config().tenants
            await asyncio.sleep(config.flush_seconds)
            try:
                await self.ledger.flush()
                if not 0 <= time.monotonic() - looked < config.refresh_seconds:
                    looked = time.monotonic()
                    self.directory.apply(await self.thread.run(self.directory.read_changes))
            except StoreDown as error:
                self.ledger.down(error)
                await asyncio.sleep(STORE_RETRY_S)
            except Exception as error:
                log.error("tenants: the store could not be followed", exc_info=error)
                await asyncio.sleep(STORE_RETRY_S)

    async def close(self) -> None:
        """After the last request."""
        end = time.monotonic() + SETTLE_S
        while self.ledger.journal.open and time.monotonic() < end:  # those that were cut off are counted
            await asyncio.sleep(0.005)
        with suppress(StoreDown):
            await self.ledger.flush()
        await self.rates.close()
        self.thread.close()
        self.ledger.close()
        self.store.database.close()


def used_by(exchange: Exchange, demand: Demand) -> tuple[int, int, int, bool]:
    """Prompt, generated and cached tokens, and whether they were counted by a server or named one by one."""
    usage = exchange.usage
    if usage is not None and exchange.usage_counts:
        return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, True
    prompt = exchange.prompt_tokens if usage is None else usage.prompt_tokens
    exact = prompt is not None and not exchange.unnamed
    return (demand.prompt_tokens if prompt is None else prompt), exchange.generated, 0, exact


def prices(pool: Pool) -> tuple[int, int]:
    return round(pool.price_in * 1000), round(pool.price_out * 1000)


def too_many(verdict: Verdict) -> APIError:
    line = verdict.refused
    assert line is not None
    whose, _, name = line.subject.partition(":")
    message = f"the {whose} {name} has {line.name} = {line.limit}"
    return APIError(429, line.name, f"{message}: try again in {max(verdict.wait, 0.001):.3g} s", None, verdict.wait)
