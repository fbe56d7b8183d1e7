"""The pool of cache blocks: who holds which, and which full blocks can be found again by what they hold.

A block is free or held by one or more sequences (a count). Only full blocks are ever held by more than one, and
nobody writes to a full block; an answer that branches off in the middle of a block gets a copy before it writes.

A full block is found by a hash over all tokens up to its end, and over the tenant and the adapter: keys and values
depend on nothing else. The hash is a cryptographic one: with a weak one, a prompt made to collide would read another
tenant's cache. Free blocks keep what they hold until they are needed; the least recently used goes first.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

from ...spec import LMWorksError
from .request import Sequence

DIGEST = 16  # bytes of a hash


class IntegrityError(LMWorksError):
    """The pool's books do not add up: a bug, and results can no longer be trusted."""


def root_hash(sequence: Sequence) -> bytes:
    """Where the chain of a sequence begins: lengths come first, so that no two pairs of names look alike."""
    root = hashlib.blake2b(digest_size=DIGEST)
    for name in (sequence.request.tenant, sequence.params.adapter or ""):
        data = name.encode("utf-8", errors="surrogatepass")
        root.update(len(data).to_bytes(8, "little") + data)
    return root.digest()


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=DIGEST).digest()


class BlockPool:
    def __init__(self, blocks: int, size: int, prefix_cache: bool = True) -> None:
        self.size = size
        self.prefix_cache = prefix_cache
        self.counts = [0] * blocks  # how many sequences hold each
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # the first is taken first
        self.hash_of: dict[int, bytes] = {}
        self.found: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        return len(self.free)

    @property
    def used(self) -> int:
        return len(self.counts) - len(self.free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Free blocks become the caller's; what they held can no longer be found."""
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            self.forget(block)
            self.counts[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more sequence holds these."""
        for block in blocks:
            if not self.counts[block]:
                del self.free[block]
            self.counts[block] += 1

    def release(self, sequence: Sequence) -> None:
        """The sequence lets go of all its blocks. The beginning stays longest: more prompts share it than the end."""
        self.offer(sequence)
        for block in reversed(sequence.blocks):
            self.counts[block] -= 1
            if not self.counts[block]:
                self.free[block] = None
                if block not in self.hash_of:
                    self.free.move_to_end(block, last=False)
        sequence.blocks.clear()
        sequence.offered = 0

    def forget(self, block: int) -> None:
        """Nobody finds it any more."""
        digest = self.hash_of.pop(block, None)
        if digest is not None:
            del self.found[digest]

    def discard(self, sequence: Sequence) -> None:
        """What the sequence has computed cannot be trusted: nobody shall find it."""
        for digest in sequence.hashes:
            if digest in self.found:
                self.forget(self.found[digest])
        sequence.offered = sys.maxsize

    def hashes(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """Hashes of its first blocks; kept, for its tokens never change."""
        known = sequence.hashes
        for i in range(len(known), blocks):
            parent = known[-1] if known else root_hash(sequence)
            known.append(block_hash(parent, sequence.tokens[i * self.size : (i + 1) * self.size]))
        return known[:blocks]

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of its tokens already. At least one token is left to be computed."""
        if not self.prefix_cache:
            return []
        matched = []
        for digest in self.hashes(sequence, (sequence.known - 1) // self.size):
            block = self.found.get(digest)
            if block is None:
                break
            if self.hash_of.get(block) != digest:
                raise IntegrityError(f"the pool of cache blocks is not sound: block {block} is found by another hash")
            matched.append(block)
        return matched

    def offer(self, sequence: Sequence) -> None:
        """Full blocks whose tokens are known can be found from now on (by steps launched later)."""
        full = min(sequence.computed, sequence.known) // self.size
        if not self.prefix_cache or full <= sequence.offered:
            return
        hashes = self.hashes(sequence, full)
        for i in range(sequence.offered, full):
            if hashes[i] not in self.found and sequence.blocks[i] not in self.hash_of:
                self.found[hashes[i]] = sequence.blocks[i]
                self.hash_of[sequence.blocks[i]] = hashes[i]
        sequence.offered = full

    def fork(self, parent: Sequence, tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Blocks with the parent's first tokens for another answer, and what must be copied before it writes.

        Full blocks are held by both. The one that is cut in the middle is copied: both go on writing there.
        """
        shared, cut = divmod(tokens, self.size)
        blocks = parent.blocks[:shared]
        self.hold(blocks)
        if not cut:
            return blocks, []
        [copy] = self.take(1)
        return [*blocks, copy], [(parent.blocks[shared], copy)]

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises where the books do not add up. `sequences`: all that hold blocks; it takes time only for those."""
        holders = list(sequences)
        wrong = [
            *count_errors(self, Counter(block for each in holders for block in each.blocks)),
            *(error for each in holders for error in sequence_errors(self, each)),
        ]
        if wrong:
            more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
            raise IntegrityError(f"the pool of cache blocks is not sound: {'; '.join(wrong[:5])}{more}")


def count_errors(pool: BlockPool, held: Counter[int]) -> list[str]:
    """Every block is free or held, none is both, and counts are those of the holders."""
    wrong = []
    total = len(pool.counts)
    both = [block for block in held if block in pool.free]
    if both or len(held) + len(pool.free) != total or pool.counts.count(0) != len(pool.free):
        lost = [block for block in range(total) if block not in pool.free and block not in held]
        wrong.append(f"blocks {lost[:8]} are neither free nor held, blocks {both[:8]} are both")
    for block, count in held.items():
        if pool.counts[block] != count:
            wrong.append(f"block {block} is held by {count} sequences and counted {pool.counts[block]} times")
    if len(pool.found) != len(pool.hash_of):
        wrong.append(f"{len(pool.found)} hashes are found and {len(pool.hash_of)} blocks have one")
    return wrong


def sequence_errors(pool: BlockPool, sequence: Sequence) -> list[str]:
    """A block that others can see (held twice, or found by its hash) is full, and holds what it is found by."""
    name = f"answer {sequence.index} of request {sequence.request.id}"
    wrong = []
    if len(sequence.blocks) < pool.blocks_for(sequence.computed):
        wrong.append(f"{name} has {len(sequence.blocks)} blocks for {sequence.computed} tokens")
    full = sequence.computed // pool.size
    hashes = pool.hashes(sequence, min(sequence.computed, sequence.known) // pool.size)
    for i, block in enumerate(sequence.blocks):
        if pool.counts[block] > 1 and i >= full:
            wrong.append(f"{name} shares block {block}, which is not full")
        digest = pool.hash_of.get(block)
        if digest is None:
            continue
        if i >= len(hashes) or hashes[i] != digest:
            wrong.append(f"block {block} of {name} is found by the hash of other tokens")
        if pool.found.get(digest) != block:
            wrong.append(f"block {block} of {name} is not found by its hash")
    return wrong
