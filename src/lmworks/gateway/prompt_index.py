"""Prompts as the gateway sees them, and the blocks of the prefix cache that servers say they have.

A prompt is cut into parts of PART_BYTES of its JSON; a part's hash is taken over all before it, so a dictionary of
hashes is a radix tree. When a server has answered a prompt, each of its parts leads to the blocks of that prompt, so
of the next one that begins alike it is known which blocks its beginning has, and then which servers hold them.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

from .exchange import Exchange

PART_BYTES = 256
MOST_PARTS = 1024  # of one prompt that are looked at
PARTS = 65_536  # that are remembered: some 10 MB


class PromptBlocks(NamedTuple):
    """What a server said of a prompt (`serve.cache_events`): every `stride` tokens the key of the block that ends."""

    model: str
    tokens: int
    stride: int
    keys: tuple[bytes, ...]

    def held(self, cached: dict[str, set[bytes]], share: float) -> float:
        """How much of a prompt is cached, where these blocks are those of its first `share`; as a share of it."""
        held, count = cached.get(self.model, ()), 0
        most = int(self.tokens * share / self.stride)
        while count < min(most, len(self.keys)) and self.keys[count] in held:
            count += 1
        return count * self.stride / self.tokens


class PromptIndex:
    def __init__(self) -> None:
        self.known: OrderedDict[bytes, tuple[PromptBlocks, float]] = OrderedDict()  # and how much of it a part ends

    def learn(self, parts: list[bytes], length: int, blocks: PromptBlocks) -> None:
        for place in reversed(range(len(parts))):  # the beginning last: it is forgotten last
            self.known[parts[place]] = blocks, (place + 1) * PART_BYTES / length
            self.known.move_to_end(parts[place])
        while len(self.known) > PARTS:
            self.known.popitem(last=False)

    def parts_held(self, parts: list[bytes], cached: dict[str, set[bytes]]) -> float:
        """How many parts a server with these blocks holds, from the beginning."""
        count = next((count for count, part in enumerate(parts) if part not in self.known), len(parts))
        if not count:
            return 0.0
        blocks, share = self.known[parts[count - 1]]
        return count * blocks.held(cached, share) / share


def parts_of(exchange: Exchange) -> tuple[list[bytes], int]:
    """Hashes of a prompt's beginnings, and its length. What comes after it in the same JSON list changes nothing."""
    body, key = exchange.body, exchange.rule.name.encode()
    text = (
        body.json("tools") + body.json("system") + (body.json("messages") or body.json("prompt") or body.json("input"))
    )
    found = []
    for start in range(0, min(len(text) - PART_BYTES, MOST_PARTS * PART_BYTES) + 1, PART_BYTES):
        key = blake2b(key + text[start : start + PART_BYTES], digest_size=16).digest()
        found.append(key)
    return found, len(text)
