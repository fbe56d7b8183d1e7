"""An LRU cache bounded by entries and bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """Not thread-safe."""

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()  # least recently used first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.values)

    def get(self, key: Hashable) -> Value | None:
        if key not in self.values:
            return None
        self.values.move_to_end(key)
        return self.values[key][0]

    def put(self, key: Hashable, value: Value, size: int = 0) -> None:
        """Insert, evicting the least recently used; an entry above `most_bytes` is not cached."""
        self.drop(key)
        self.values[key] = (value, size)
        self.bytes += size
        while len(self.values) > self.most or (self.most_bytes is not None and self.bytes > self.most_bytes):
            self.drop(next(iter(self.values)))

    def drop(self, key: Hashable) -> None:
        _, size = self.values.pop(key, (None, 0))
        self.bytes -= size
