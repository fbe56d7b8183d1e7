"""Which event of a thread contains which: parents and self times, without a stack."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from .model import Ints, Kind, Mask, Trace

HOST = (Kind.OP, Kind.RUNTIME, Kind.ANNOTATION, Kind.PYTHON)
HOOKED = re.compile(r"^layer/\S+ backward$")  # of our own traces: begin in one node of autograd and end in another


@dataclass(frozen=True)
class Nesting:
    """Of all events of the host; other events have no parent and their whole time as self time."""

    parent: Ints  # index of the innermost event around each; -1: none
    self_time: Ints  # less that of the events directly within

    @classmethod
    def of(cls, trace: Trace, kinds: tuple[Kind, ...] = HOST) -> Nesting:
        events = trace.events
        parent = np.full(len(events), -1, np.int64)
        rows = np.flatnonzero(events.of(*kinds) & ~trace.named(HOOKED))
        rows = rows[np.argsort(events.lane[rows], kind="stable")]  # by thread, and by start within it
        edges = np.flatnonzero(np.diff(events.lane[rows])) + 1
        for own in np.split(rows, edges):
            parent[own] = lane_parents(events.end[own], own)
        inner = np.flatnonzero(parent >= 0)
        within = np.bincount(parent[inner], weights=events.duration[inner], minlength=len(events))
        return cls(parent, np.maximum(events.duration - within.astype(np.int64), 0))

    def nearest(self, trace: Trace, kind: Kind) -> Ints:
        """The innermost event of a kind around each event, itself included; −1: none."""
        return self.innermost(trace.events.of(kind))

    def innermost(self, chosen: Mask) -> Ints:
        """The innermost of the chosen events around each event, itself included; −1: none."""
        found = np.arange(len(self.parent))
        while True:
            climb = (found >= 0) & ~chosen[found]
            if not np.any(climb):
                return found
            found[climb] = self.parent[found[climb]]


def lane_parents(end: Ints, rows: Ints) -> Ints:
    """Of one lane's events by start, longest first; `rows` are their indices in the trace.

    All that began before and end no earlier are around an event; the last of them to begin is its parent, also where
    ranges overlap in part. So this is the previous greater or equal element of `end`: each event looks at the one
    before, and skips what that one has skipped as long as it ends too early.
    """
    place = np.arange(len(end)) - 1  # all between `place` and an event end before it does
    low = np.flatnonzero(place >= 0)
    while len(low := low[end[place[low]] < end[low]]):
        place[low] = place[place[low]]
        low = low[place[low] >= 0]
    return np.where(place >= 0, rows[place], -1)
