"""Servers that have the requested LoRA adapter loaded: elsewhere it has to be read from the store first.

Where no server has it, a hash of its name decides, so that gateways agree and the adapters spread over the servers. One
that is busier than the others by MOST_AHEAD requests is passed over: another one may load the adapter, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import Exchange
from ..servers import Server
from . import Policy
from .session_affinity import weight

MOST_AHEAD = 8


class WarmAdapter(Policy):
    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        name = exchange.rule.name
        least = min(server.queue for server in servers)
        free = [server for server in servers if server.queue <= least + MOST_AHEAD]
        warm = [server for server in free if name in server.load.warm_adapters]
        if warm or not any(server.load.warm_adapters for server in servers):
            return warm or servers
        return [max(free, key=lambda server: weight(name, server))]
