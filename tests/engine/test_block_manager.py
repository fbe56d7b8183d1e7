"""The pool: counts, copies at a branch, blocks found by what they hold, and a check that names what is wrong."""

from __future__ import annotations

import random

import pytest

from lmworks.engine.core.block_events import StoredBlocks
from lmworks.engine.core.block_manager import BlockManager, IntegrityError, block_hash, root_hash
from lmworks.engine.core.request import PLACEHOLDER_TOKEN, Request, Sequence
from lmworks.engine.core.sampling_params import SamplingParams


def sequence(tokens: list[int], tenant: str = "", adapter: str | None = None) -> Sequence:
    request = Request(tokens, SamplingParams(adapter=adapter), tenant=tenant)
    return Sequence(request, 0, 0, list(tokens), len(tokens))


def computed(pool: BlockManager, tokens: list[int], tenant: str = "", adapter: str | None = None) -> Sequence:
    """A sequence that runs, with all its tokens in the cache."""
    each = sequence(tokens, tenant, adapter)
    each.blocks = pool.allocate(pool.blocks_for(len(tokens)))
    each.num_computed_tokens = len(tokens)
    pool.cache_full_blocks(each, each.num_computed_tokens)
    return each


def test_cached_blocks_are_found_after_free() -> None:
    pool = BlockManager(8, 4)
    first = computed(pool, list(range(10)))
    held = list(first.blocks)
    assert pool.find_cached_prefix(sequence(list(range(10)))) == held[:2]
    pool.free(first)
    assert pool.num_free_blocks == 8
    assert pool.find_cached_prefix(sequence([*range(8), 99])) == held[:2]
    assert pool.find_cached_prefix(sequence([*range(4), 99, 98, 97, 96, 95])) == held[:1]
    assert pool.find_cached_prefix(sequence([99, *range(1, 10)])) == []


def test_prefix_match_is_contiguous() -> None:
    pool = BlockManager(8, 2)
    computed(pool, [1, 2, 3, 4, 5])
    assert pool.find_cached_prefix(sequence([9, 9, 3, 4, 5])) == []


def test_prefix_match_leaves_one_token() -> None:
    pool = BlockManager(8, 4)
    held = computed(pool, list(range(8))).blocks
    assert pool.find_cached_prefix(sequence(list(range(8)))) == held[:1]
    assert pool.find_cached_prefix(sequence(list(range(9)))) == held[:2]
    assert pool.find_cached_prefix(sequence([0])) == []


def test_tenants_and_adapters_do_not_share_blocks() -> None:
    pool = BlockManager(8, 2)
    computed(pool, [1, 2, 3], tenant="a", adapter="x")
    assert pool.find_cached_prefix(sequence([1, 2, 3], tenant="a", adapter="x"))
    for tenant, adapter in (("b", "x"), ("a", None), ("a", "y"), ("", "ax"), ("ax", None), ("x", "a")):
        assert pool.find_cached_prefix(sequence([1, 2, 3], tenant, adapter)) == []


def test_concatenated_names_do_not_collide() -> None:
    names = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    assert len({root_hash(sequence([1], tenant, adapter)) for tenant, adapter in names}) == len(names)


def test_hash_depends_on_all_tokens_in_order() -> None:
    prompts = [[1, 2], [2, 1], [1, 258], [257, 2], [1, 2**33]]
    assert len({block_hash(b"", tokens) for tokens in prompts}) == len(prompts)


def test_unknown_tokens_are_not_cached() -> None:
    pool = BlockManager(8, 2)
    running = computed(pool, [1, 2, 3])
    running.tokens.append(PLACEHOLDER_TOKEN)
    running.num_computed_tokens = 4
    pool.cache_full_blocks(running, running.num_computed_tokens)
    assert pool.find_cached_prefix(sequence([1, 2, 3, PLACEHOLDER_TOKEN, 5])) == running.blocks[:1]
    running.tokens[3], running.num_known_tokens = 7, 4
    pool.cache_full_blocks(running, running.num_computed_tokens)
    assert pool.find_cached_prefix(sequence([1, 2, 3, 7, 5])) == running.blocks[:2]


def test_eviction_is_lru_and_from_the_end() -> None:
    pool = BlockManager(6, 1)
    old, new = computed(pool, [1, 2, 3]), computed(pool, [4, 5, 6])
    first, second = list(old.blocks), list(new.blocks)
    pool.free(old)
    pool.free(new)
    assert pool.allocate(6) == [*reversed(first), *reversed(second)]
    assert not pool.cached_blocks and not pool.block_hashes


def test_cache_hit_refreshes_lru() -> None:
    pool = BlockManager(4, 1)
    old, new = computed(pool, [1, 2]), computed(pool, [3, 4])
    first, second = list(old.blocks), list(new.blocks)
    pool.free(old)
    pool.free(new)
    user = sequence([1, 9])
    user.blocks = pool.find_cached_prefix(user)
    assert user.blocks == first[:1]
    pool.add_reference(user.blocks)
    pool.free(user)
    assert pool.allocate(3) == [first[1], *reversed(second)]


def test_uncached_blocks_are_evicted_first() -> None:
    pool = BlockManager(4, 2)
    cached, nothing = computed(pool, [1, 2]), computed(pool, [3])
    plain = list(nothing.blocks)
    pool.allocate(2)
    pool.free(cached)
    pool.free(nothing)
    assert pool.allocate(1) == plain


def test_fork_shares_full_blocks_and_copies_partial_block() -> None:
    pool = BlockManager(8, 4)
    parent = computed(pool, list(range(10)))
    blocks, copies = pool.fork(parent, 9)
    assert blocks[:2] == parent.blocks[:2] and blocks[2] not in parent.blocks
    assert copies == [(parent.blocks[2], blocks[2])]
    assert [pool.ref_counts[block] for block in parent.blocks] == [2, 2, 1]
    assert pool.fork(parent, 8) == (parent.blocks[:2], [])


def test_shared_block_is_freed_by_last_reference() -> None:
    pool = BlockManager(8, 4)
    parent = computed(pool, list(range(8)))
    child = sequence(list(range(8)))
    child.blocks, _ = pool.fork(parent, 8)
    child.num_computed_tokens = 8
    pool.free(parent)
    assert pool.num_used_blocks == 2
    pool.check([child])
    pool.free(child)
    assert pool.num_used_blocks == 0
    pool.check([])


def test_uncached_blocks_are_not_matched() -> None:
    pool = BlockManager(8, 2)
    bad = computed(pool, [1, 2, 3, 4, 5])
    pool.uncache(bad)
    assert pool.find_cached_prefix(sequence([1, 2, 3])) == []
    pool.free(bad)
    assert pool.find_cached_prefix(sequence([1, 2, 3])) == []
    pool.check([])


def test_disabled_prefix_cache_finds_nothing() -> None:
    pool = BlockManager(8, 2, prefix_cache=False)
    computed(pool, [1, 2, 3, 4])
    assert pool.find_cached_prefix(sequence([1, 2, 3])) == []


def two_running() -> tuple[BlockManager, Sequence, Sequence]:
    pool = BlockManager(8, 2)
    return pool, computed(pool, [1, 2, 3]), computed(pool, [4, 5, 6])


def test_integrity_check_reports_errors() -> None:
    pool, a, b = two_running()
    pool.check([a, b])
    with pytest.raises(IntegrityError, match=rf"blocks \[{b.blocks[0]}, {b.blocks[1]}\] are neither free nor held"):
        pool.check([a])

    pool, a, b = two_running()
    pool.ref_counts[a.blocks[0]] = 2
    with pytest.raises(IntegrityError, match=f"block {a.blocks[0]} is held by 1 sequences and has 2 references"):
        pool.check([a, b])

    pool, a, b = two_running()
    pool.free_blocks[a.blocks[1]] = None
    with pytest.raises(IntegrityError, match=rf"blocks \[{a.blocks[1]}\] are both"):
        pool.check([a, b])

    pool, a, b = two_running()
    b.blocks[1] = a.blocks[1]
    pool.add_reference([a.blocks[1]])
    with pytest.raises(IntegrityError, match=f"shares block {a.blocks[1]}, which is not full"):
        pool.check([a, b])

    pool, a, b = two_running()
    a.blocks[0], b.blocks[0] = b.blocks[0], a.blocks[0]
    with pytest.raises(IntegrityError, match="is cached under the hash of other tokens"):
        pool.check([a, b])

    pool, a, b = two_running()
    del pool.cached_blocks[pool.block_hashes[a.blocks[0]]]
    with pytest.raises(IntegrityError, match=f"block {a.blocks[0]} of .* is not cached under its hash"):
        pool.check([a, b])

    pool, a, b = two_running()
    a.num_computed_tokens = 5
    with pytest.raises(IntegrityError, match="has 2 blocks for 5 tokens"):
        pool.check([a, b])


def test_hash_collision_is_not_used() -> None:
    pool, a, b = two_running()
    pool.cached_blocks[pool.block_hashes[a.blocks[0]]] = b.blocks[0]
    with pytest.raises(IntegrityError, match=f"block {b.blocks[0]} is cached under another hash"):
        pool.find_cached_prefix(sequence([1, 2, 3]))


class Held:
    """A listener: what the cache holds, by its events alone."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.tokens: dict[bytes, list[int]] = {}  # of each block
        self.parents: dict[bytes, bytes | None] = {}
        self.corrupt: list[bytes] = []

    def stored(self, event: StoredBlocks) -> None:
        size, parent = event.block_size, event.parent_hash
        for i, (block, digest) in enumerate(zip(event.blocks, event.hashes, strict=True)):
            self.blocks[digest], self.parents[digest] = block, parent
            self.tokens[digest] = event.token_ids[i * size : (i + 1) * size]
            parent = digest

    def evicted(self, block: int, digest: bytes) -> None:
        assert self.blocks.pop(digest) == block

    def corrupted(self, digest: bytes) -> None:
        self.blocks.pop(digest, None)
        self.corrupt.append(digest)

    def cleared(self) -> None:
        self.blocks.clear()


def test_listener_knows_what_is_cached() -> None:
    """After any order of stores and evictions its picture is the cache; it can recompute every hash from the events."""
    pool, held = BlockManager(6, 2), Held()
    pool.listeners.append(held)
    chance = random.Random(0)
    for _ in range(60):
        each = computed(pool, [chance.randrange(2) for _ in range(chance.randrange(2, 12))])
        assert held.blocks == pool.cached_blocks
        pool.free(each)
    root = root_hash(each)
    for digest in held.blocks:
        assert block_hash(held.parents[digest] or root, held.tokens[digest]) == digest
    pool.uncache(each)
    assert held.corrupt == each.hashes
    assert held.blocks == pool.cached_blocks
    pool.reset_prefix_cache()
    assert held.blocks == {}
