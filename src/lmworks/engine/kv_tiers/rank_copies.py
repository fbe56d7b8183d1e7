"""The tiers of an engine with several ranks: host memory is shared by their processes, and a block has all shards.

    block in host memory    keys and values of rank 0's heads · of rank 1's · …

Each rank copies its own part between its device and host memory, when rank 0 says so. Rank 0 alone looks up, evicts,
reads and writes, always whole blocks: one that lacks a shard is in no tier, so all ranks find the same prefix. Ranks
that have the same heads (more ranks than KV heads, latent attention) have the same part, and the first of them saves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...spec.components import token_cache
from ..core.kv_cache import KVCache
from .device_copies import DeviceCopies, Done, block_bytes
from .fingerprint import fingerprint
from .host_memory import map_memory, page_lock

if TYPE_CHECKING:
    from ..core.model_runner import ModelRunner
    from ..tensor_parallel.executor import Executor


class Shard(NamedTuple):
    """Of a block, on one rank."""

    begin: int  # bytes
    end: int
    saves: bool  # false: another rank has the same heads


class HostMapping(NamedTuple):
    """What a worker needs to map host memory."""

    path: str
    slots: int
    block_bytes: int
    shard: Shard


class CopyBlocks(NamedTuple):
    """Blocks between a rank's cache and host memory."""

    number: int
    load: bool  # to the cache; else to host memory
    blocks: list[int]
    slots: list[int]


@dataclass(frozen=True)
class BlockLayout:
    """Of a block with the shards of all ranks."""

    fingerprint: bytes  # of all weights and of the number of ranks
    shards: list[Shard]  # by rank

    @property
    def block_bytes(self) -> int:
        return max(shard.end for shard in self.shards)


def block_layout(runner: ModelRunner) -> BlockLayout:
    """Called by all ranks. Each sees its own weights alone, but its keys and values depend on all."""
    own = fingerprint(runner), block_bytes(caches_of(runner))
    if runner.tp_rank is None:
        return BlockLayout(own[0], [Shard(0, own[1], True)])
    ranks = runner.tp_rank.gather(own)
    joined = hashlib.blake2b(b"".join(each for each, _ in ranks), digest_size=32).digest()
    alike = max(1, len(ranks) // token_cache(runner.model.spec).heads)  # ranks that have the same heads
    return BlockLayout(joined, shards_of([size for _, size in ranks], alike))


def shards_of(sizes: Sequence[int], alike: int) -> list[Shard]:
    """`sizes`: bytes by rank; the first of those that are alike may have more, of a draft model."""
    shards: list[Shard] = []
    for rank, size in enumerate(sizes):
        first = rank - rank % alike
        begin = shards[first].begin if rank > first else max((shard.end for shard in shards), default=0)
        shards.append(Shard(begin, begin + size, rank == first))
    return shards


def caches_of(runner: ModelRunner) -> list[KVCache]:
    return [runner.cache, *([] if runner.draft is None else [runner.draft.cache])]


class RankCopies:
    """On rank 0: as `DeviceCopies`, on all ranks. `done` is called when the last one has finished."""

    def __init__(self, own: DeviceCopies, executor: Executor) -> None:
        self.own, self.executor = own, executor

    def save(self, blocks: Sequence[int], slots: Sequence[int], done: Done) -> None:
        self.own.save(blocks, slots, self.executor.copy_blocks(False, blocks, slots, done))

    def load(self, slots: Sequence[int], blocks: Sequence[int], done: Done) -> None:
        self.own.load(slots, blocks, self.executor.copy_blocks(True, blocks, slots, done))

    def settle(self) -> None:
        self.own.settle()
        self.executor.wait_for_copies()

    def close(self) -> None:
        self.settle()
        self.own.close()


class WorkerCopies:
    """On another rank: what rank 0 asks for."""

    def __init__(self, runner: ModelRunner, mapping: HostMapping, on_copied: Callable[[int], None]) -> None:
        self.shard, self.on_copied = mapping.shard, on_copied
        memory = map_memory(mapping.path, mapping.slots, mapping.block_bytes)
        if runner.device.type == "cuda":
            page_lock(memory)
        self.copies = DeviceCopies(caches_of(runner), memory[:, self.shard.begin : self.shard.end])

    def copy(self, message: CopyBlocks) -> None:
        number, load, blocks, slots = message
        if load:
            self.copies.load(slots, blocks, lambda: self.on_copied(number))
        elif self.shard.saves:
            self.copies.save(blocks, slots, lambda: self.on_copied(number))
        else:
            self.on_copied(number)
