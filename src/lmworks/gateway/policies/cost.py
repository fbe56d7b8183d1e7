"""The cheapest pool, by the price of its tokens: servers of dearer ones are for when the cheap ones are busy.

A server with QUEUE or more requests to do is passed over where another one has fewer, whatever it costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import Exchange
from ..servers import Server
from . import Policy

QUEUE = 32


class Cost(Policy):
    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        free = [server for server in servers if server.queue < QUEUE] or servers
        least = min(map(price, free))
        return [server for server in free if price(server) == least]


def price(server: Server) -> float:
    return server.pool.price_in + server.pool.price_out
