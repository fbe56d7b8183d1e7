"""Prefixes that decoding sequences share.

Sequences whose block tables begin with the same blocks are found and cut into tiles, so that attention reads the keys
of such a prefix once for a tile (`kernels.inference.paged_attention.SharedPrefixes`). What was found is kept while the
same sequences decode: their own blocks differ, so they never come to share more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ...kernels.inference.paged_attention import SHARED_UNIT

MIN_SHARING = 4  # sequences of a group that shares a prefix
MIN_SAVED_KEYS = 2**15  # of a step: fewer take less time than a second kernel
MAX_PREFIXES = 32  # shared ones in a step


class PrefixTiles(NamedTuple):
    """`SharedPrefixes` on the host, without padding."""

    lengths: np.ndarray  # (seqs)
    members: np.ndarray
    tile_starts: np.ndarray


class PrefixFinder:
    """Finds prefixes that decoding sequences share, and keeps them while the same sequences decode."""

    def __init__(self, block_size: int, sharing: int) -> None:
        self.block_size, self.sharing = block_size, sharing
        self.forget()

    def forget(self) -> None:
        """Slots have other sequences now."""
        self.slots = b""
        self.found: PrefixTiles | None = None

    def max_tiles(self, seqs: int) -> int:
        """Of so many sequences: a group may leave a tile that is not full."""
        return min(seqs // 2, math.ceil(seqs / self.sharing) + MAX_PREFIXES)

    def find(self, tables: np.ndarray, slots: np.ndarray, ends: np.ndarray) -> PrefixTiles | None:
        """tables (slots, blocks); slots (S) and lengths (S) of the step's sequences."""
        if self.sharing < MIN_SHARING or len(slots) < MIN_SHARING:
            return None
        if (key := slots.tobytes()) != self.slots:
            self.slots, self.found = key, self.search(tables, slots, ends)
        return self.found

    def search(self, tables: np.ndarray, slots: np.ndarray, ends: np.ndarray) -> PrefixTiles | None:
        first = tables[slots, 0]
        order = first.argsort(kind="stable")
        groups: list[tuple[np.ndarray, int]] = []
        for group in np.split(order, np.diff(first[order]).nonzero()[0] + 1):
            if len(group) >= MIN_SHARING and (keys := self.common_keys(tables, slots[group], ends[group])):
                groups.append((group, keys))
        groups = sorted(groups, key=lambda pair: -len(pair[0]) * pair[1])[:MAX_PREFIXES]
        if sum((len(group) - 1) * keys for group, keys in groups) < MIN_SAVED_KEYS:
            return None
        lengths, members, sizes = np.zeros(len(slots), np.int32), [], [0]
        for group, keys in groups:
            lengths[group] = keys
            members.append(group)
            sizes += [len(group[begin : begin + self.sharing]) for begin in range(0, len(group), self.sharing)]
        return PrefixTiles(lengths, np.concatenate(members), np.cumsum(sizes))

    def common_keys(self, tables: np.ndarray, slots: np.ndarray, ends: np.ndarray) -> int:
        """Of sequences whose first block is the same."""
        blocks = int(ends.min()) // self.block_size
        same = (tables[slots, :blocks] == tables[slots[0], :blocks]).all(axis=0)
        common = blocks if same.all() else int(same.argmin())
        return common * self.block_size // SHARED_UNIT * SHARED_UNIT
