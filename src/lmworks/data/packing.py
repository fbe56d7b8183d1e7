"""Best-fit-decreasing packing: sequences of different lengths into rows of a fixed one.

The longest sequence that is left goes into the fullest row that still has room for it. That is at most 11/9 of the
fewest rows possible, plus one (Johnson 1973), and with the lengths of real conversations within a percent of
⌈tokens / row⌉.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of the sequences in each row; none may be longer than `size`.

    Rows are kept by the room they have left, and a segment tree over the rooms finds the smallest that is enough:
    O(n log size). Deterministic: equal lengths go in the order given, rows with equal room in the order opened.
    """
    rooms = FreeRooms(size)
    rows: list[list[int]] = []
    by_room: list[deque[int]] = [deque() for _ in range(size + 1)]
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    for index in order.tolist():
        length = lengths[index]
        room = rooms.smallest(length)
        if room > size:
            rows.append([])
            row, room = len(rows) - 1, size
        else:
            row = by_room[room].popleft()
            rooms.add(room, -1)
        rows[row].append(index)
        if room > length:
            by_room[room - length].append(row)
            rooms.add(room - length, 1)
    return rows


class FreeRooms:
    """How many rows have each amount of room, 1 … size, as a tree of counts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.leaves = 1 << size.bit_length()
        self.count = [0] * (2 * self.leaves)

    def add(self, room: int, change: int) -> None:
        node = self.leaves + room
        while node:
            self.count[node] += change
            node >>= 1

    def smallest(self, least: int) -> int:
        """The smallest room of at least `least`; size + 1 if there is none."""
        node = self.leaves + least
        while not self.count[node]:  # up: the first subtree to the right that is not empty
            while node & 1:
                node >>= 1
            if not node:
                return self.size + 1
            node += 1
        while node < self.leaves:  # down: its leftmost row
            node = 2 * node if self.count[2 * node] else 2 * node + 1
        return node - self.leaves
