"""Servers that register themselves: `POST /gateway/servers` with a lease, again before it ends.

    {"url": "http://10.0.0.7:8000/v1", "pool": "local", "seconds": 30}

A server that says nothing until its lease ends is let go; `"seconds": 0` lets it go at once.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ...serve.keys import bearer
from ...serve.limits import APIError
from ...spec import SpecError
from ..config import Pool, check_url

LONGEST_LEASE_S = 600.0
MOST_SERVERS = 4096  # registered in one pool


class Registration(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    pool: str
    seconds: float = 30.0


DECODER = msgspec.json.Decoder(Registration)


@dataclass
class Leases:
    """When each registered server is let go, by pool and address."""

    clock: Callable[[], float]
    ends: dict[str, dict[str, float]] = field(default_factory=dict)

    def register(self, pools: list[Pool], raw: bytes, authorization: str | None) -> Registration:
        """Raises APIError."""
        try:
            found = DECODER.decode(raw)
            check_url("url", found.url)
        except (msgspec.MsgspecError, SpecError) as error:
            raise APIError(400, "invalid_request", f"a registration has url, pool and seconds: {error}") from None
        pool = next((pool for pool in pools if pool.name == found.pool and pool.register), None)
        if pool is None:
            raise APIError(404, "pool_not_found", f"no pool {found.pool[:80]!r} with register = true", "pool")
        check_secret(pool, authorization)
        if not 0 <= found.seconds <= LONGEST_LEASE_S:
            raise APIError(400, "invalid_request", f"seconds must be between 0 and {LONGEST_LEASE_S:g}", "seconds")
        ends = self.ends.setdefault(pool.name, {})
        if found.seconds == 0:
            ends.pop(found.url, None)
        elif found.url not in ends and len(ends) >= MOST_SERVERS:
            raise APIError(429, "too_many_servers", f"{MOST_SERVERS} servers are registered already", retry_after=10)
        else:
            ends[found.url] = self.clock() + found.seconds
        return found

    def end(self, found: Registration) -> float:
        return self.ends[found.pool].get(found.url, 0.0)

    def apply(self, pool: str, url: str, end: float) -> None:
        """What was registered with another worker of this gateway: their clock is the same."""
        self.ends.setdefault(pool, {})[url] = end

    def current(self, pool: str) -> list[str]:
        """Servers whose lease has not ended."""
        now = self.clock()
        ends = self.ends[pool] = {url: end for url, end in self.ends.get(pool, {}).items() if end > now}
        return list(ends)


def check_secret(pool: Pool, authorization: str | None) -> None:
    given, wanted = (bearer(authorization) or "").encode(), os.environ[pool.register_env].encode()
    if not hmac.compare_digest(given, wanted):
        raise APIError(401, "invalid_secret", "registering needs the secret of the pool: Authorization: Bearer SECRET")
