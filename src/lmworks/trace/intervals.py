"""Sets of time: unions, intersections and differences of intervals, without loops over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .model import Events, Ints


@dataclass(frozen=True)
class Spans:
    """Disjoint half-open intervals [start, end), in order."""

    start: Ints
    end: Ints

    @classmethod
    def union(cls, start: Ints, end: Ints) -> Spans:
        """Of intervals in any order that may overlap; those of length 0 are left out."""
        real = end > start
        start, end = start[real], end[real]
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        if not len(start):
            return cls(start, end)
        reach = np.maximum.accumulate(end)
        first = np.concatenate(([True], start[1:] > reach[:-1]))
        last = np.append(np.flatnonzero(first)[1:] - 1, len(start) - 1)
        return cls(start[first], reach[last])

    @classmethod
    def of(cls, events: Events) -> Spans:
        return cls.union(events.start, events.end)

    @property
    def total(self) -> int:
        return int((self.end - self.start).sum())

    def covered(self, start: Ints | int, end: Ints | int) -> Ints:
        """How much of each interval the set covers."""
        return self._before(end) - self._before(start)

    def _before(self, time: Ints | int) -> Ints:
        """Covered time before each moment."""
        if not len(self.start):
            return np.zeros(np.shape(time), np.int64)
        done = np.concatenate(([0], np.cumsum(self.end - self.start)))
        place = np.searchsorted(self.start, time, side="right")
        inside = np.minimum(np.asarray(time), self.end[np.maximum(place - 1, 0)]) - self.start[np.maximum(place - 1, 0)]
        return np.where(place > 0, done[np.maximum(place - 1, 0)] + inside, 0)

    def within(self, start: int, end: int) -> Spans:
        """Clipped to a window."""
        return Spans.union(np.clip(self.start, start, end), np.clip(self.end, start, end))

    def gaps(self, start: int, end: int) -> Spans:
        """What a window has beside the set."""
        inside = self.within(start, end)
        return Spans.union(
            np.concatenate(([start], inside.end)).astype(np.int64),
            np.concatenate((inside.start, [end])).astype(np.int64),
        )

    def __or__(self, other: Spans) -> Spans:
        return Spans.union(np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end)))

    def __sub__(self, other: Spans) -> Spans:
        if not len(self.start) or not len(other.start):
            return self
        return self & other.gaps(int(self.start[0]), int(self.end[-1]))

    def __and__(self, other: Spans) -> Spans:
        """By sweeping over all edges: both sets cover where two intervals are open."""
        time = np.concatenate((self.start, other.start, self.end, other.end))
        change = np.concatenate(
            (np.ones(len(self.start) + len(other.start)), -np.ones(len(self.end) + len(other.end)))
        ).astype(np.int64)
        order = np.lexsort((change, time))  # ends before starts at one moment
        time, both = time[order], np.cumsum(change[order]) == 2
        place = np.flatnonzero(both)
        return Spans.union(time[place], time[np.minimum(place + 1, max(len(time) - 1, 0))])
