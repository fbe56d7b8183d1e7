"""Which event of a thread contains which: parents and self times, without a stack."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .model import Ints, Kind, Trace

HOST = (Kind.OP, Kind.RUNTIME, Kind.ANNOTATION, Kind.PYTHON)


@dataclass(frozen=True)
class Nesting:
    """Of all events of the host; other events have no parent and their whole time as self time."""

    parent: Ints  # index of the innermost event around each; -1: none
    self_time: Ints  # less that of the events directly within

    @classmethod
    def of(cls, trace: Trace, kinds: tuple[Kind, ...] = HOST) -> Nesting:
        events = trace.events
        parent = np.full(len(events), -1, np.int64)
        rows = np.flatnonzero(events.of(*kinds))
        rows = rows[np.argsort(events.lane[rows], kind="stable")]  # by thread, and by start within it
        edges = np.flatnonzero(np.diff(events.lane[rows])) + 1
        for own in np.split(rows, edges):
            parent[own] = lane_parents(events.start[own], events.end[own], own)
        inner = np.flatnonzero(parent >= 0)
        within = np.bincount(parent[inner], weights=events.duration[inner], minlength=len(events))
        return cls(parent, np.maximum(events.duration - within.astype(np.int64), 0))

    def nearest(self, trace: Trace, kind: Kind) -> Ints:
        """The innermost event of a kind around each event, itself included; −1: none."""
        found = np.arange(len(self.parent))
        while True:
            climb = (found >= 0) & (trace.events.kind[found] != kind)
            if not np.any(climb):
                return found
            found[climb] = self.parent[found[climb]]


def lane_parents(start: Ints, end: Ints, rows: Ints) -> Ints:
    """Of properly nested events by start, longest first; `rows` are their indices in the trace.

    An event's depth is how many began before it and have not ended; its parent is the last one before it that is one
    less deep.
    """
    count = np.arange(len(start))
    depth = count - np.searchsorted(np.sort(end), start, side="right")
    depth = np.maximum(depth, 0)
    parent = np.full(len(start), -1, np.int64)
    order = np.argsort(depth, kind="stable")
    levels = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1)
    for above, below in pairwise(levels):
        place = np.searchsorted(above, below) - 1
        inside = (place >= 0) & (end[above[np.maximum(place, 0)]] >= end[below])
        parent[below[inside]] = rows[above[place[inside]]]
    return parent
