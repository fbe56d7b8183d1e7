"""Which keys of a corpus were seen before, with memory that does not depend on its size.

Every part of the corpus leaves a file of sorted keys. They are compared range by range: a range holds about `RECORDS`
keys of all parts, which are read in the order of the corpus and looked up among the first ones of their range.

A record is known by an address: its part in the upper 32 bits, its position there in the lower ones, so addresses
increase in the order of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]

RECORDS = 2**17  # compared at once: some 10 MB of arrays
SLOTS = 256  # equal ranges of keys whose begin in a file is known: memory is bounded up to SLOTS × RECORDS keys
PART = np.uint64(32)  # bits of a position
RECORD = np.dtype([("key", "<u8"), ("position", "<u4")])
REPEAT = np.dtype([("repeat", "<u8"), ("first", "<u8")])


def write_keys(path: Path, keys: NDArray[np.uint64], positions: NDArray[np.integer]) -> None:
    """`keys`: (records, columns). A column is compared with the same column of other parts."""
    count, columns = keys.shape
    bounds = np.arange(SLOTS, dtype=np.uint64) << np.uint64(64 - 8)
    index = np.full((columns, SLOTS + 1), count, "<i8")
    records = np.empty((columns, count), RECORD)
    for column in range(columns):
        order = np.argsort(keys[:, column], kind="stable")
        records[column]["key"], records[column]["position"] = keys[order, column], positions[order]
        index[column, :-1] = np.searchsorted(records[column]["key"], bounds)
    with open(path, "wb") as file:
        file.write(index.tobytes())
        file.write(records.tobytes())


class KeyFile:
    """One column of what `write_keys` wrote."""

    def __init__(self, path: Path, part: int, column: int, columns: int) -> None:
        self.path, self.part = path, part
        width = (SLOTS + 1) * 8
        self.index = np.fromfile(path, "<i8", SLOTS + 1, offset=column * width)
        self.begin = columns * width + column * int(self.index[-1]) * RECORD.itemsize

    def read(self, slots: range) -> tuple[NDArray[np.uint64], Addresses]:
        first, last = int(self.index[slots.start]), int(self.index[slots.stop])
        records = np.fromfile(self.path, RECORD, last - first, offset=self.begin + first * RECORD.itemsize)
        return records["key"].astype(np.uint64), address(self.part, records["position"])


def address(part: int, positions: NDArray[np.integer]) -> Addresses:
    return positions.astype(np.uint64) | np.uint64(part << 32)


def part_and_position(addresses: Addresses) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (addresses >> PART).astype(np.int64), (addresses & np.uint64(2**32 - 1)).astype(np.int64)


def repeats(paths: Sequence[Path], column: int, columns: int, slots: range = range(SLOTS)) -> Iterator[NDArray]:
    """Arrays of REPEAT: each record whose key was seen before, with the first record that had it."""
    files = [KeyFile(path, part, column, columns) for part, path in enumerate(paths)]
    total = sum(int(file.index[slots.stop] - file.index[slots.start]) for file in files)
    width = max(1, len(slots) * RECORDS // max(total, 1))
    for start in range(slots.start, slots.stop, width):
        yield from repeats_within(files, range(start, min(start + width, slots.stop)))


def repeats_within(files: Sequence[KeyFile], slots: range) -> Iterator[NDArray]:
    known = (np.empty(0, np.uint64), np.empty(0, np.uint64))  # keys and the first address of each
    held: list[tuple[NDArray[np.uint64], Addresses]] = []
    size = 0
    for number, file in enumerate(files, 1):
        held.append(file.read(slots))
        size += len(held[-1][0])
        if size < RECORDS and number < len(files):
            continue
        keys, addresses = (np.concatenate(column) for column in zip(known, *held, strict=True))
        held, size = [], 0
        order = np.argsort(keys, kind="stable")  # equal keys stay in the order of the corpus
        keys, addresses = keys[order], addresses[order]
        first = np.flatnonzero(np.concatenate([np.ones(min(1, len(keys)), bool), keys[1:] != keys[:-1]]))
        known = keys[first], addresses[first]
        of = np.repeat(known[1], np.diff(np.append(first, len(keys))))
        again = addresses != of
        found = np.empty(int(again.sum()), REPEAT)
        found["repeat"], found["first"] = addresses[again], of[again]
        if len(found):
            yield found


class Groups:
    """Files of pairs by the part of their first member: consecutive parts, together about `RECORDS` pairs."""

    def __init__(self, sources: Sequence[Path], parts: int, folder: Path) -> None:
        counts = np.zeros(parts, np.int64)
        for pairs in read_pairs(sources):
            counts += np.bincount((pairs["repeat"] >> PART).astype(np.int64), minlength=parts)
        whole = np.cumsum(counts) // RECORDS
        self.group_of = np.unique(whole, return_inverse=True)[1] if parts else np.empty(0, np.int64)
        self.count = int(self.group_of[-1]) + 1 if parts else 0
        self.folder = folder
        for pairs in read_pairs(sources):
            self.add(pairs)

    def first_part(self, group: int) -> int:
        return int(np.searchsorted(self.group_of, group))

    def path(self, group: int) -> Path:
        return self.folder / f"group-{group:06d}.tmp"

    def add(self, pairs: NDArray) -> None:
        group = self.group_of[(pairs["repeat"] >> PART).astype(np.int64)]
        for number in np.unique(group):
            with open(self.path(number), "ab") as file:
                file.write(pairs[group == number].tobytes())

    def take(self, group: int) -> NDArray:
        """The pairs of a group, each once; its file is removed."""
        path = self.path(group)
        if not path.exists():
            return np.empty(0, REPEAT)
        pairs = np.unique(np.fromfile(path, REPEAT))
        path.unlink()
        return pairs


def read_pairs(sources: Sequence[Path]) -> Iterator[NDArray]:
    for path in sources:
        for at in range(0, path.stat().st_size, RECORDS * REPEAT.itemsize):
            yield np.fromfile(path, REPEAT, RECORDS, offset=at)


def write_pairs(path: Path, arrays: Iterator[NDArray]) -> None:
    with open(path, "wb") as file:
        for pairs in arrays:
            file.write(pairs.tobytes())


def by_part(sources: Sequence[Path], parts: int, into: Path) -> None:
    """Repeats as a file for each part that has any, sorted by position (`read_part`)."""
    groups = Groups(sources, parts, into)
    for number in range(groups.count):
        write_parts(groups.take(number), into)


def connected(sources: Sequence[Path], parts: int, into: Path) -> None:
    """Pairs are edges of a graph: of each connected component, all documents but the first, as `by_part` has them.

    The graph is taken down group by group, last documents first. A component of the edges at hand becomes a star
    around its first document; what lies below the group stays connected by edges that go to the groups below. The
    number of edges never grows, and memory is that of one group.
    """
    groups = Groups(sources, parts, into)
    for number in reversed(range(groups.count)):
        pairs = groups.take(number)
        nodes, ends = np.unique(np.concatenate([pairs["repeat"], pairs["first"]]), return_inverse=True)
        half = len(pairs)
        first = nodes[components(ends[:half], ends[half:], len(nodes))]
        star = np.empty(len(nodes), REPEAT)
        star["repeat"], star["first"] = nodes, first
        star = star[nodes != first]
        inside = star["repeat"] >= np.uint64(groups.first_part(number)) << PART
        write_parts(star[inside], into)
        groups.add(star[~inside])


def components(left: NDArray[np.int64], right: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The smallest node of each node's component: roots hook onto smaller ones, then paths are halved."""
    parent = np.arange(count)
    while True:
        low = np.minimum(parent[left], parent[right])
        high = np.maximum(parent[left], parent[right])
        if (low == high).all():
            return parent
        np.minimum.at(parent, high, low)
        while (shorter := parent[parent]).tobytes() != parent.tobytes():
            parent = shorter


def write_parts(pairs: NDArray, into: Path) -> None:
    """`pairs` has all there are of the parts in it."""
    part, _ = part_and_position(pairs["repeat"])
    for number in np.unique(part):
        save_part(into, int(number), pairs[part == number])


def save_part(folder: Path, part: int, pairs: NDArray) -> None:
    np.save(folder / f"part-{part:06d}.npy", pairs)


def load_part(folder: Path, part: int) -> NDArray:
    """Repeats of a part, in order; none where nothing was written."""
    path = folder / f"part-{part:06d}.npy"
    return np.load(path) if path.exists() else np.empty(0, REPEAT)


def read_part(folder: Path, part: int) -> NDArray[np.int64]:
    """Their positions."""
    return part_and_position(load_part(folder, part)["repeat"])[1]


Skip = Callable[[], bool]


def in_turn(positions: NDArray[np.int64]) -> Skip:
    """Called for position 0, 1, 2, …: whether it is among them."""
    ahead = iter(positions.tolist())
    state = [0, next(ahead, -1)]

    def skip() -> bool:
        at = state[0]
        state[0] += 1
        if at != state[1]:
            return False
        state[1] = next(ahead, -1)
        return True

    return skip
