"""Rates of several gateways, in Redis or Valkey: the arithmetic of `rates.Bucket`, in one script and one round trip.

Time is the server's own, so gateways' clocks need not agree. A place of `concurrent_requests` is a lease that its
gateway renews: those of one that was killed are free after LEASE_S. Keys of one tenant share a hash tag, so a cluster
keeps them in one slot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...serve.limits import APIError
from ...spec import LMWorksError
from .rates import CONCURRENT, RETRY_S, Line, LocalRates, State, Verdict

log = logging.getLogger("lmworks.gateway")

TIMEOUT_S = 0.25  # for an answer, and for a free connection
AWAY_S = 1.0  # how long nobody asks after a failure
LEASE_S = 30.0
CONNECTIONS = 64

# KEYS: one for each line. ARGV: id, lease, then name, limit and amount of each line. Returns the number of the line
# that refuses (0: none), seconds to wait, and how much of each is used.
TAKE = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local used, refused, longest = {}, 0, 0
for i, key in ipairs(KEYS) do
  local name, limit, amount = ARGV[3 * i], tonumber(ARGV[3 * i + 1]), tonumber(ARGV[3 * i + 2])
  local wait = 0
  if name == 'concurrent_requests' then
    redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
    used[i] = redis.call('ZCARD', key)
    if used[i] >= limit then wait = 1 end
  else
    local found = redis.call('HMGET', key, 'used', 'at')
    used[i] = math.max(0, (found[1] or 0) - (now - (found[2] or now)) * limit / 60)
    local excess = used[i] + math.min(amount, limit) - limit
    if excess > 1e-6 then wait = excess * 60 / limit end
  end
  if wait > longest then longest, refused = wait, i end
end
if refused == 0 then
  for i, key in ipairs(KEYS) do
    local name, limit, amount = ARGV[3 * i], tonumber(ARGV[3 * i + 1]), tonumber(ARGV[3 * i + 2])
    if name == 'concurrent_requests' then
      redis.call('ZADD', key, now + ARGV[2], ARGV[1])
      redis.call('PEXPIRE', key, math.ceil(ARGV[2] * 1000))
      used[i] = used[i] + 1
    else
      used[i] = used[i] + amount
      redis.call('HSET', key, 'used', tostring(used[i]), 'at', tostring(now))
      redis.call('PEXPIRE', key, math.ceil(used[i] * 60000 / limit) + 1000)
    end
  end
end
for i, value in ipairs(used) do used[i] = tostring(value) end
return {refused, tostring(longest), used}
"""
# ARGV: id, then name, limit and what more was used than had been taken.
SETTLE = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
for i, key in ipairs(KEYS) do
  local name, limit, more = ARGV[3 * i - 1], tonumber(ARGV[3 * i]), tonumber(ARGV[3 * i + 1])
  if name == 'concurrent_requests' then
    redis.call('ZREM', key, ARGV[1])
  elseif more ~= 0 then
    local found = redis.call('HMGET', key, 'used', 'at')
    local used = math.max(0, (found[1] or 0) - (now - (found[2] or now)) * limit / 60)
    used = math.max(0, used + more)
    redis.call('HSET', key, 'used', tostring(used), 'at', tostring(now))
    redis.call('PEXPIRE', key, math.ceil(used * 60000 / limit) + 1000)
  end
end
"""
# KEYS: sets of leases, ARGV: lease, then the id in each.
RENEW = """
local time = redis.call('TIME')
for i, key in ipairs(KEYS) do
  redis.call('ZADD', key, time[1] + ARGV[1], ARGV[i + 1])
  redis.call('PEXPIRE', key, math.ceil(ARGV[1] * 1000))
end
"""


class RedisRates:
    """While Redis is away each gateway counts for itself, or refuses: `tenants.limits_down`."""

    def __init__(self, url: str, down: Callable[[], str]) -> None:
        try:
            from redis import asyncio as redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
        except ImportError:
            raise LMWorksError("tenants.limits in Redis needs its client: pip install 'lmworks[redis]'") from None
        self.down, self.errors = down, (RedisError, OSError, TimeoutError)
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
            decode_responses=True,
        )
        self.client: Any = redis.Redis(connection_pool=pool)
        self.take_script = self.client.register_script(TAKE)
        self.settle_script = self.client.register_script(SETTLE)
        self.renew_script = self.client.register_script(RENEW)
        self.local = LocalRates()
        self.taken_here: set[str] = set()  # ids that were counted here alone, while Redis was away
        self.leases: dict[str, list[str]] = {}  # of requests under way
        self.away_until = 0.0
        self.error: str | None = None
        self.settling: set[asyncio.Task[None]] = set()
        self.renewing: asyncio.Task[None] | None = None

    async def take(self, id: str, lines: list[Line]) -> Verdict:
        """A client that leaves at this moment has its part given back once Redis has answered."""
        taking = asyncio.ensure_future(self.take_there(id, lines))
        try:
            return await asyncio.shield(taking)  # the client library may not pass a cancellation on
        except asyncio.CancelledError:
            taking.add_done_callback(lambda done: self.give_back(done, id, lines))
            raise

    def give_back(self, done: asyncio.Future[Verdict], id: str, lines: list[Line]) -> None:
        if not done.cancelled() and done.exception() is None and done.result().refused is None:
            self.settle(id, lines, {})

    async def take_there(self, id: str, lines: list[Line]) -> Verdict:
        if time.monotonic() >= self.away_until:
            args: list[Any] = [id, LEASE_S]
            for line in lines:
                args += [line.name, line.limit, line.amount]
            keys = list(map(key_of, lines))
            try:
                refused, wait, used = await self.take_script(keys, args)
            except self.errors as error:
                self.lost(error)
            else:
                self.found()
                states = [State(line, float(value)) for line, value in zip(lines, used, strict=True)]
                if refused:
                    longest = RETRY_S if lines[refused - 1].name == CONCURRENT else float(wait)
                    return Verdict(states, lines[refused - 1], longest)
                if leases := [key for key, line in zip(keys, lines, strict=True) if line.name == CONCURRENT]:
                    self.leases[id] = leases
                    self.renewing = self.renewing or asyncio.create_task(self.renew())
                return Verdict(states)
        if self.down() == "closed":
            raise APIError(503, "limits_unavailable", "the store of rates is away", None, AWAY_S)
        verdict = await self.local.take(id, lines)
        if verdict.refused is None:
            self.taken_here.add(id)
        return verdict

    def settle(self, id: str, lines: list[Line], used: dict[str, int]) -> None:
        if id in self.taken_here:
            self.taken_here.remove(id)
            self.local.settle(id, lines, used)
            return
        self.leases.pop(id, None)
        task = asyncio.create_task(self.settle_there(id, lines, used))
        self.settling.add(task)
        task.add_done_callback(self.settling.discard)

    async def settle_there(self, id: str, lines: list[Line], used: dict[str, int]) -> None:
        args: list[Any] = [id]
        for line in lines:
            args += [line.name, line.limit, used.get(line.name, 0) - line.amount]
        with suppress(*self.errors):  # what was taken empties with time, a lease ends
            await self.settle_script(list(map(key_of, lines)), args)

    async def renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            pairs = [(key, id) for id, keys in self.leases.items() for key in keys]
            for key, id in pairs:  # one by one: keys of two tenants may be in two slots
                with suppress(*self.errors):
                    await self.renew_script([key], [LEASE_S, id])

    async def check(self) -> str | None:
        """Whether anybody has limits or not: a Redis that is away is seen before it is needed."""
        try:
            await self.client.ping()
        except self.errors as error:
            self.lost(error)
        else:
            self.found()
        return self.error

    def lost(self, error: Exception) -> None:
        self.away_until = time.monotonic() + AWAY_S
        if self.error is None:
            log.error("rates: Redis is away", extra={"reason": str(error), "until_it_is_back": self.down()})
        self.error = str(error)

    def found(self) -> None:
        if self.error is not None:
            log.info("rates: Redis is back")
            self.error = None

    async def close(self) -> None:
        """After the last request."""
        if self.settling:
            await asyncio.wait(self.settling, timeout=2 * TIMEOUT_S)
        if self.renewing is not None:
            self.renewing.cancel()
        with suppress(*self.errors):
            await self.client.aclose()


def key_of(line: Line) -> str:
    return f"lmworks:{{{line.tenant}}}:{line.subject}:{line.name}"
