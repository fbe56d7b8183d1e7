"""The server whose KV cache holds the longest prefix of a prompt, as far as this gateway's own history tells.

Prompts are cut into blocks of bytes of their JSON; a block's hash is taken over all before it, so a set of hashes is a
radix tree. Each server has the hashes that it was sent last, as many as BLOCKS. One that is far busier than the others
is passed over: a prefix is cheaper to compute again than to wait for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from weakref import WeakKeyDictionary

from ..exchange import Exchange
from ..servers import Server

BLOCK_BYTES = 256
MAX_BLOCKS = 1024  # of one prompt that are looked at
BLOCKS = 65_536  # that are remembered of one server: some 5 MB
BUSIER = 8.0  # requests more than the least busy has, beyond which a server's prefixes do not count


class PrefixCache:
    def __init__(self) -> None:
        self.held: WeakKeyDictionary[Server, OrderedDict[bytes, None]] = WeakKeyDictionary()

    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        blocks = blocks_of(exchange)
        if not blocks:
            return servers
        least = min(server.queue for server in servers)
        near = [server for server in servers if server.queue <= least + BUSIER]
        lengths = [self.length(server, blocks) for server in near]
        longest = max(lengths)
        found = [server for server, length in zip(near, lengths, strict=True) if length == longest]
        chosen = min(found, key=lambda server: (server.queue, len(self.held.get(server, ()))))
        self.remember(chosen, blocks)
        return [chosen]

    def length(self, server: Server, blocks: list[bytes]) -> int:
        """How many blocks from the beginning it holds."""
        held = self.held.get(server, OrderedDict())
        return next((count for count, block in enumerate(blocks) if block not in held), len(blocks))

    def remember(self, server: Server, blocks: list[bytes]) -> None:
        held = self.held.setdefault(server, OrderedDict())
        for block in reversed(blocks):  # the beginning last: it is forgotten last
            held[block] = None
            held.move_to_end(block)
        while len(held) > BLOCKS:
            held.popitem(last=False)


def blocks_of(exchange: Exchange) -> list[bytes]:
    """Hashes of the prompt's beginnings, by whole blocks. What comes after it in the same JSON list changes nothing."""
    body, key = exchange.body, exchange.rule.name.encode()
    text = (
        body.json("tools") + body.json("system") + (body.json("messages") or body.json("prompt") or body.json("input"))
    )
    found = []
    for start in range(0, min(len(text) - BLOCK_BYTES, MAX_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        key = blake2b(key + text[start : start + BLOCK_BYTES], digest_size=16).digest()
        found.append(key)
    return found
