"""KV blocks of a simulated server: those of running sequences, and prefixes kept for others, least recent first out.

A prefix is a list of ids (`Arrival.prefix`), each of which stands for some pages. An id is kept once; while a running
sequence holds it, it stays; after that it is evicted when pages are needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    def __init__(self, pages: int, pages_of_id: int) -> None:
        self.pages, self.pages_of_id = pages, pages_of_id
        self.private = 0  # pages of running sequences that nobody else has
        self.held: dict[int, int] = {}  # id → running sequences that hold it
        self.idle: OrderedDict[int, None] = OrderedDict()  # ids that nobody holds, least recent first

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return self.pages - self.private - (len(self.held) + len(self.idle)) * self.pages_of_id

    @property
    def available(self) -> int:
        """Pages that can be had, by eviction if need be."""
        return self.pages - self.private - len(self.held) * self.pages_of_id

    @property
    def use(self) -> float:
        """Share of the pool that running sequences have, as servers report it."""
        return 1 - self.available / self.pages

    def match(self, ids: Sequence[int]) -> int:
        """How many of the first ids are here."""
        for count, one in enumerate(ids):
            if one not in self.held and one not in self.idle:
                return count
        return len(ids)

    def idle_pages(self, ids: Sequence[int]) -> int:
        """Pages that would stop being available if these ids were held."""
        return sum(one in self.idle for one in ids) * self.pages_of_id

    def hold(self, ids: Sequence[int]) -> None:
        for one in ids:
            self.idle.pop(one, None)
            self.held[one] = self.held.get(one, 0) + 1

    def release(self, ids: Sequence[int]) -> None:
        """The end of a prefix becomes the least recent, so that it is evicted before its beginning."""
        for one in reversed(ids):
            self.held[one] -= 1
            if not self.held[one]:
                del self.held[one]
                self.idle[one] = None

    def allocate(self, pages: int) -> bool:
        """Private pages; false, and nothing done, if there are too few."""
        if pages > self.available:
            return False
        while self.free < pages:
            self.idle.popitem(last=False)
        self.private += pages
        return True

    def publish(self, one: int) -> bool:
        """Private pages that their sequence holds become the id's; false if it is here already."""
        if one in self.held or one in self.idle:
            return False
        self.private -= self.pages_of_id
        self.held[one] = 1
        return True
