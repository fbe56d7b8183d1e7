"""The block manager: allocation of KV blocks, reference counts, and the prefix cache.

A block is free or held by one or more sequences (a reference count). Only full blocks are shared, and full blocks are
never written; a sequence that forks in the middle of a block gets a copy (copy on write).

A full block is cached under a hash over all tokens up to its end, the tenant, the adapter and the request's salt: keys
and values depend on no more than the tokens and the adapter. The hash is cryptographic: with a weak one, a prompt made
to collide would read another tenant's cache.
Free blocks stay cached until they are reallocated, least recently used first.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from ...spec import LMWorksError
from .block_events import BlockListener, StoredBlocks
from .request import Sequence

DIGEST = 16  # bytes of a hash


class IntegrityError(LMWorksError):
    """The state of the pool is inconsistent: a bug, and results can no longer be trusted."""


def root_hash(sequence: Sequence) -> bytes:
    """Start of a sequence's hash chain."""
    return chain_root(sequence.request.tenant, sequence.params.adapter, sequence.params.cache_salt)


def chain_root(tenant: str, adapter: str | None, cache_salt: str | None) -> bytes:
    """Lengths come first, so that no two lists of names collide."""
    root = hashlib.blake2b(digest_size=DIGEST)
    for name in (tenant, adapter or "", cache_salt or ""):
        data = name.encode("utf-8", errors="surrogatepass")
        root.update(len(data).to_bytes(8, "little") + data)
    return root.digest()


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=DIGEST).digest()


def chain_hashes(root: bytes, tokens: list[int], block_size: int) -> Iterator[bytes]:
    """Of all full blocks of these tokens, as `BlockManager.hashes` has them."""
    for end in range(block_size, len(tokens) + 1, block_size):
        root = block_hash(root, tokens[end - block_size : end])
        yield root


class BlockManager:
    """The pool of KV blocks."""

    def __init__(self, blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.ref_counts = [0] * blocks  # by block
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # least recently used first
        self.block_hashes: dict[int, bytes] = {}
        self.cached_blocks: dict[bytes, int] = {}
        self.listeners: list[BlockListener] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    @property
    def num_used_blocks(self) -> int:
        return len(self.ref_counts) - len(self.free_blocks)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate free blocks, evicting what they cached."""
        taken = []
        for _ in range(count):
            block, _ = self.free_blocks.popitem(last=False)
            digest = self.uncache_block(block)
            if digest is not None:
                for listener in self.listeners:
                    listener.evicted(block, digest)
            self.ref_counts[block] = 1
            taken.append(block)
        return taken

    def add_reference(self, blocks: Iterable[int]) -> None:
        """Increment the reference counts of blocks that one more sequence holds."""
        for block in blocks:
            if not self.ref_counts[block]:
                del self.free_blocks[block]
            self.ref_counts[block] += 1

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, last first: the beginning stays cached longest, as more prompts share it."""
        self.cache_full_blocks(sequence, sequence.num_computed_tokens)
        for block in reversed(sequence.blocks):
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free_blocks[block] = None
                if block not in self.block_hashes:
                    self.free_blocks.move_to_end(block, last=False)
        sequence.blocks.clear()
        sequence.num_cached_blocks = 0

    def uncache_block(self, block: int) -> bytes | None:
        """Remove a block from the prefix cache; returns its hash, if it was there."""
        digest = self.block_hashes.pop(block, None)
        if digest is not None:
            del self.cached_blocks[digest]
        return digest

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache: its content is of other weights."""
        self.block_hashes.clear()
        self.cached_blocks.clear()
        for listener in self.listeners:
            listener.cleared()

    def uncache(self, sequence: Sequence) -> None:
        """Remove all blocks of a sequence from the prefix cache, as their content is corrupted."""
        for digest in sequence.hashes:
            if digest in self.cached_blocks:
                self.uncache_block(self.cached_blocks[digest])
            for listener in self.listeners:
                listener.corrupted(digest)
        sequence.num_cached_blocks = sys.maxsize

    def hashes(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """Hashes of its first blocks; memoised, for its tokens never change."""
        known = sequence.hashes
        for i in range(len(known), blocks):
            parent = known[-1] if known else root_hash(sequence)
            known.append(block_hash(parent, sequence.tokens[i * self.block_size : (i + 1) * self.block_size]))
        return known[:blocks]

    def prefix_hashes(self, sequence: Sequence) -> list[bytes]:
        """Of the blocks that it may take from a cache."""
        return self.hashes(sequence, (sequence.num_known_tokens - 1) // self.block_size)

    def find_cached_prefix(self, sequence: Sequence) -> list[int]:
        """The longest cached prefix of its tokens, in blocks. At least one token is left to compute."""
        if not self.prefix_cache:
            return []
        matched = []
        for digest in self.prefix_hashes(sequence):
            block = self.cached_blocks.get(digest)
            if block is None:
                break
            if self.block_hashes.get(block) != digest:
                raise IntegrityError(f"the block pool is inconsistent: block {block} is cached under another hash")
            matched.append(block)
        return matched

    def cache_full_blocks(self, sequence: Sequence, computed: int) -> None:
        """Register full blocks of known tokens in the prefix cache, once `computed` of them are in a scheduled step.

        Prompts admitted after it share them, in the same step too: in each layer a step writes the keys and values of
        all its tokens before it reads any.
        """
        full = min(computed, sequence.num_known_tokens) // self.block_size
        if not self.prefix_cache or full <= sequence.num_cached_blocks:
            return
        hashes = self.hashes(sequence, full)
        new = []
        for i in range(sequence.num_cached_blocks, full):
            if hashes[i] not in self.cached_blocks and sequence.blocks[i] not in self.block_hashes:
                self.cached_blocks[hashes[i]] = sequence.blocks[i]
                self.block_hashes[sequence.blocks[i]] = hashes[i]
                new.append(i)
        sequence.num_cached_blocks = full
        if self.listeners and new:
            self.tell_stored(sequence, new)

    def tell_stored(self, sequence: Sequence, indices: list[int]) -> None:
        """Tell listeners of newly cached blocks of a sequence, one event for each run of consecutive ones."""
        begin = 0
        for end in range(1, len(indices) + 1):
            if end < len(indices) and indices[end] == indices[end - 1] + 1:
                continue
            run = slice(indices[begin], indices[end - 1] + 1)
            event = StoredBlocks(
                sequence, run.start, tuple(sequence.blocks[run]), tuple(sequence.hashes[run]), self.block_size
            )
            for listener in self.listeners:
                listener.stored(event)
            begin = end

    def fork(self, parent: Sequence, tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Blocks with the parent's first tokens, and (source, target) blocks to copy.

        Full blocks are shared. A partial one is copied, as both sequences will write to it.
        """
        shared, cut = divmod(tokens, self.block_size)
        blocks = parent.blocks[:shared]
        self.add_reference(blocks)
        if not cut:
            return blocks, []
        [copy] = self.allocate(1)
        return [*blocks, copy], [(parent.blocks[shared], copy)]

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise IntegrityError if the pool is inconsistent. `sequences`: all that hold blocks."""
        holders = list(sequences)
        errors = [
            *count_errors(self, Counter(block for each in holders for block in each.blocks)),
            *(error for each in holders for error in sequence_errors(self, each)),
        ]
        if errors:
            more = f" (and {len(errors) - 5} more)" if len(errors) > 5 else ""
            raise IntegrityError(f"the block pool is inconsistent: {'; '.join(errors[:5])}{more}")


def count_errors(manager: BlockManager, held: Counter[int]) -> list[str]:
    """Every block is either free or held, and reference counts are right."""
    errors = []
    total = len(manager.ref_counts)
    both = [block for block in held if block in manager.free_blocks]
    if both or len(held) + len(manager.free_blocks) != total or manager.ref_counts.count(0) != len(manager.free_blocks):
        lost = [block for block in range(total) if block not in manager.free_blocks and block not in held]
        errors.append(f"blocks {lost[:8]} are neither free nor held, blocks {both[:8]} are both")
    for block, count in held.items():
        if manager.ref_counts[block] != count:
            errors.append(f"block {block} is held by {count} sequences and has {manager.ref_counts[block]} references")
    if len(manager.cached_blocks) != len(manager.block_hashes):
        errors.append(f"{len(manager.cached_blocks)} hashes are cached and {len(manager.block_hashes)} blocks have one")
    return errors


def sequence_errors(manager: BlockManager, sequence: Sequence) -> list[str]:
    """A shared or cached block is full, and its hash is that of its tokens."""
    name = f"answer {sequence.index} of request {sequence.request.id}"
    errors = []
    if len(sequence.blocks) < manager.blocks_for(sequence.num_computed_tokens):
        errors.append(f"{name} has {len(sequence.blocks)} blocks for {sequence.num_computed_tokens} tokens")
    full = sequence.num_computed_tokens // manager.block_size
    hashes = manager.hashes(
        sequence, min(sequence.num_computed_tokens, sequence.num_known_tokens) // manager.block_size
    )
    for i, block in enumerate(sequence.blocks):
        if manager.ref_counts[block] > 1 and i >= full:
            errors.append(f"{name} shares block {block}, which is not full")
        digest = manager.block_hashes.get(block)
        if digest is None:
            continue
        if i >= len(hashes) or hashes[i] != digest:
            errors.append(f"block {block} of {name} is cached under the hash of other tokens")
        if manager.cached_blocks.get(digest) != block:
            errors.append(f"block {block} of {name} is not cached under its hash")
    return errors
