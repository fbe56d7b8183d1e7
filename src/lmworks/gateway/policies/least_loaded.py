"""The servers with the least to do: by their queue, and by how full their KV cache is.

A server whose cache is nearly full preempts or queues: beyond KV_FULL its free blocks count, not its queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import Exchange
from ..servers import Server
from . import Policy

KV_FULL = 0.9


class LeastLoaded(Policy):
    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        loads = [load(server) for server in servers]
        least = min(loads)
        return [server for server, one in zip(servers, loads, strict=True) if one == least]


def load(server: Server) -> tuple[float, float]:
    return max(0.0, server.load.kv_used - KV_FULL), server.queue
