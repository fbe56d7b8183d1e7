"""Each server in its turn: the one whose last turn is longest ago."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from ..exchange import Exchange
from ..servers import Server
from . import Policy


class RoundRobin(Policy):
    def __init__(self) -> None:
        self.turn = itertools.count(1)
        self.last: WeakKeyDictionary[Server, int] = WeakKeyDictionary()

    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        found = min(servers, key=lambda server: self.last.get(server, 0))
        self.last[found] = next(self.turn)
        return [found]
