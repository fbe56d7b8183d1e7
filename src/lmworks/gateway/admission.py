"""Admission by service level objectives: a request that no server would answer in time is refused at once.

A refused client can go elsewhere, or come back; one that is served late has waited for an answer that missed its
objective, and has made others late.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..serve.limits import APIError
from .exchange import Exchange
from .servers import Server
from .slo import ServiceLevel

SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0


def in_time(servers: Sequence[Server], exchange: Exchange, level: ServiceLevel | None) -> list[Server]:
    """Servers that would answer in time. Raises APIError where there is none, unless the request was tried before."""
    if level is None or not servers:
        return list(servers)
    size = len(exchange.body.raw)
    late = [level.late(server.forecast(size)) for server in servers]
    found = [server for server, seconds in zip(servers, late, strict=True) if not seconds]
    if found or exchange.tries:
        return found or list(servers)
    wait = min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, min(late)))
    message = f"no server would answer in time: the model's objective would be missed by {min(late):.2g} s"
    raise APIError(429, "slo_unattainable", message, None, wait)
