"""Of two servers at random the one with less to do: near the best of all, without everybody choosing the same one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..exchange import Exchange
from ..servers import Server
from . import Policy
from .least_loaded import load


class PowerOfTwo(Policy):
    def __init__(self, seed: int | None = None) -> None:
        self.random = random.Random(seed)

    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        pair = self.random.sample(list(servers), 2) if len(servers) > 2 else servers
        least = min(map(load, pair))
        return [server for server in pair if load(server) == least]
