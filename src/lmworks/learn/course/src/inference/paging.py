"""A paged KV cache: memory in blocks of a few tokens, and for each sequence a table of the blocks that it has."""

from __future__ import annotations

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


def grow(table: list[int], tokens: int, free: list[int], block: int) -> bool:
    """Gives a sequence blocks for `tokens` tokens in all: from the end of `free` to the end of `table`, both in place.

    Where too few are free it takes none and returns False.
    """
    # exercise block_table.grow(table, tokens, free, block)
    missing = -(-tokens // block) - len(table)
    if missing > len(free):
        return False
    for _ in range(missing):
        table.append(free.pop())
    return True
    # end block_table.grow


def slots(table: list[int], first: int, count: int, block: int) -> list[int]:
    """Where `count` tokens of a sequence from `first` on lie: number of the block × its tokens + place in it."""
    # exercise block_table.slots(table, first, count, block)
    return [table[token // block] * block + token % block for token in range(first, first + count)]
    # end block_table.slots
