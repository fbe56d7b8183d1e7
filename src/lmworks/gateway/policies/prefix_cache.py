"""The server whose KV cache holds the longest prefix of a prompt.

A server that tells what its cache holds (`gateway.cache_follower`) is believed: what it has evicted does not count.
Requests that were just sent to it count too, until their blocks must have been told. Of another server the gateway's
own history tells: what it was sent last, as many as PARTS. One that is far busier than the others is passed over: a
prefix is cheaper to compute again than to wait for.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from ..exchange import Exchange
from ..prompt_index import PARTS, PromptBlocks, PromptIndex, parts_of
from ..servers import Server
from . import Policy

BUSIER = 8.0  # requests more than the least busy has, beyond which a server's prefixes do not count
ANSWERING_S = 60.0  # how long a request without an answer counts
TOLD_S = 1.0  # …and one with an answer: events come later than it


class PrefixCache(Policy):
    def __init__(self) -> None:
        self.index = PromptIndex()
        # Parts that a server was sent, and until when they count where it tells of its cache.
        self.sent: WeakKeyDictionary[Server, OrderedDict[bytes, float]] = WeakKeyDictionary()

    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        parts, _ = parts_of(exchange)
        if not parts:
            return servers
        least = min(server.queue for server in servers)
        near = [server for server in servers if server.queue <= least + BUSIER]
        lengths = [self.held(server, parts) for server in near]
        longest = max(lengths)
        found = [server for server, length in zip(near, lengths, strict=True) if length == longest]
        chosen = min(found, key=lambda server: (server.queue, len(self.sent.get(server, ()))))
        self.remember(chosen, parts, time.monotonic() + ANSWERING_S)
        return [chosen]

    def answered(self, server: Server, exchange: Exchange, blocks: PromptBlocks) -> None:
        parts, length = parts_of(exchange)
        if parts:
            self.index.learn(parts, length, blocks)
            self.remember(server, parts, time.monotonic() + TOLD_S)

    def failed(self, server: Server, exchange: Exchange) -> None:
        self.remember(server, parts_of(exchange)[0], -math.inf)

    def held(self, server: Server, parts: list[bytes]) -> float:
        """How many parts from the beginning it holds."""
        sent = self.sent.get(server, OrderedDict())
        if server.cached is None:
            return next((count for count, part in enumerate(parts) if part not in sent), len(parts))
        now = time.monotonic()
        coming = next((count for count, part in enumerate(parts) if sent.get(part, -math.inf) < now), len(parts))
        return max(coming, self.index.parts_held(parts, server.cached))

    def remember(self, server: Server, parts: list[bytes], until: float) -> None:
        sent = self.sent.setdefault(server, OrderedDict())
        for part in reversed(parts):  # the beginning last: it is forgotten last
            sent[part] = until
            sent.move_to_end(part)
        while len(sent) > PARTS:
            sent.popitem(last=False)
