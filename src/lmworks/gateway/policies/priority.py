"""Urgent requests (priority below 0) go where least is to do; those that can wait (above 0) where most is.

So the servers with room stay free for who needs it. A server with a queue, or without free KV blocks, gets neither
while another one has room.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import Exchange
from ..servers import Server
from . import Policy
from .least_loaded import KV_FULL, load


class Priority(Policy):
    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        if not exchange.priority:
            return servers
        room = [one for one in servers if not one.load.waiting and one.load.kv_used < KV_FULL] or servers
        loads = [load(one) for one in room]
        wanted = min(loads) if exchange.priority < 0 else max(loads)
        return [one for one, found in zip(room, loads, strict=True) if found == wanted]
