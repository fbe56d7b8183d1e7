"""The prefix cache of an engine as a router follows it: which blocks it holds, and which blocks a prompt has.

`GET /cache_events` (`cache_routes`) is a stream of server-sent events: a snapshot of each model's cache, then what
changes in it:

    data: {"model": "tiny", "block_size": 16, "snapshot": true, "stored": ["9f86d081884c7d65", …], "removed": []}

A block is named by the first KEY_BYTES of its hash. Who reads too slowly gets a snapshot again instead of what it
missed, and so does everybody when the engine was restarted. A comment every HEARTBEAT_S says that nothing has changed.

A request with the header `x-prompt-blocks: 1` is answered with one of that name: the model, how many tokens its prompt
has, the distance in blocks between the keys that follow, and these keys. So a router learns which blocks a prompt has
without the model's tokenizer and chat template.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple
from urllib.parse import quote

from ..engine.core.block_events import StoredBlocks
from ..engine.core.block_manager import chain_hashes, chain_root

KEY_BYTES = 8
HEARTBEAT_S = 2.0
MOST_BEHIND = 256  # changes that a slow reader may be behind
PROMPT_BLOCKS = "x-prompt-blocks"
MOST_KEYS = 64  # in that header
MOST_BLOCKS = 1024  # of a prompt that are looked at


class CacheChange(NamedTuple):
    """Keys of blocks, joined. Of a snapshot: all that there are."""

    stored: bytes = b""
    removed: bytes = b""
    snapshot: bool = False


def split_keys(joined: bytes) -> list[bytes]:
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]


# --- in the engine's process ------------------------------------------------------------------------------


class CacheJournal:
    """What happened to the blocks since it was last asked: see `engine.core.block_events`."""

    def __init__(self) -> None:
        self.changed: dict[bytes, bool] = {}  # key → whether it is cached now
        self.snapshot = False

    def stored(self, event: StoredBlocks) -> None:
        self.changed.update((digest[:KEY_BYTES], True) for digest in event.hashes)

    def evicted(self, block: int, digest: bytes) -> None:
        self.changed[digest[:KEY_BYTES]] = False

    def corrupted(self, digest: bytes) -> None:
        self.changed[digest[:KEY_BYTES]] = False

    def cleared(self) -> None:
        self.changed, self.snapshot = {}, True

    def take(self) -> CacheChange | None:
        if not self.changed and not self.snapshot:
            return None
        changed, self.changed = self.changed, {}
        snapshot, self.snapshot = self.snapshot, False
        stored = b"".join(key for key, cached in changed.items() if cached)
        return CacheChange(stored, b"".join(key for key, cached in changed.items() if not cached), snapshot)


# --- in the API's process ---------------------------------------------------------------------------------


class CacheFollower:
    """What one reader has not read yet."""

    def __init__(self, all_keys: CacheKeys) -> None:
        self.all_keys = all_keys
        self.changes = [all_keys.snapshot()]
        self.not_empty = asyncio.Event()
        self.not_empty.set()

    def put(self, change: CacheChange) -> None:
        self.changes = [*self.changes, change] if len(self.changes) < MOST_BEHIND else [self.all_keys.snapshot()]
        self.not_empty.set()

    async def get(self) -> list[CacheChange]:
        await self.not_empty.wait()
        self.not_empty.clear()
        changes, self.changes = self.changes, []
        return changes


class CacheKeys:
    """The blocks that an engine caches, as its reports say, and who follows them."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.followers: set[CacheFollower] = set()

    def snapshot(self) -> CacheChange:
        return CacheChange(b"".join(self.keys), b"", True)

    def apply(self, change: CacheChange) -> None:
        if change.snapshot:
            self.keys.clear()
        self.keys.update(split_keys(change.stored))
        self.keys.difference_update(split_keys(change.removed))
        for follower in self.followers:
            follower.put(change)

    async def follow(self) -> AsyncGenerator[CacheChange, None]:
        """A snapshot, then every change."""
        follower = CacheFollower(self)
        self.followers.add(follower)
        try:
            while True:
                for change in await follower.get():
                    yield change
        finally:
            self.followers.discard(follower)


def prompt_blocks(
    model: str, block_size: int, tenant: str, adapter: str | None, cache_salt: str | None, tokens: Sequence[int]
) -> str:
    """The header of this name."""
    looked_at = list(tokens[: MOST_BLOCKS * block_size])
    keys = list(chain_hashes(chain_root(tenant, adapter, cache_salt), looked_at, block_size))
    stride = max(1, -(-len(keys) // MOST_KEYS))
    shown = (keys[place][:KEY_BYTES].hex() for place in range(stride - 1, len(keys), stride))
    return f"{quote(model, safe='')} {len(tokens)} {stride * block_size} {' '.join(shown)}".rstrip()
