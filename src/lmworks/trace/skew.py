"""Skew between the ranks of a job: who came late to the collectives, and whether it computed slowly or came late.

Ranks enter the same collectives in the same order. A collective ends on all ranks at once, so the median difference of
its ends is the difference of two machines' clocks; after that, whoever starts it last has let the others wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .breakdown import Activity
from .collectives import P2P, message_of
from .hotspots import in_steps
from .intervals import Spans
from .model import Ints, Kind, Trace

Entries = dict[tuple[str, str, int], tuple[int, int]]  # (name, group, which one) → start, end in absolute time


@dataclass(frozen=True)
class Skew:
    """Over all steps of all ranks."""

    collectives: int  # that were found on every rank
    wait_s: dict[int, float]  # rank → seconds in collectives before the last rank arrived
    late_rank: int | None  # the one that waited least in a typical step, where the others waited for it
    late_s: float  # how much longer the others waited, if all steps were as the median one
    late_share: float  # of the time of the steps
    cause: str  # slow_compute, late_arrival, or empty

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def skew(activities: Sequence[Activity]) -> Skew | None:
    """None where there is one rank, or nothing that all ranks entered."""
    if len(activities) < 2:
        return None
    edges = common_collectives([activity.trace for activity in activities])
    if edges is None:
        return None
    start, end = edges
    clock = ahead_of_first(end)[:, None]
    start, end = start - clock, end - clock
    # A collective cannot end before the last rank has begun it: what is more than its length is a clock's error.
    waited = np.minimum(start.max(axis=0), end)
    per_step = np.stack([step_waits(activities[0].trace, *pair) for pair in zip(start, waited, strict=True)]) / 1e9
    ranks = [activity.trace.rank for activity in activities]
    usual = np.median(per_step, axis=1) * per_step.shape[1]  # a single late step is no straggler
    late = int(np.argmin(usual))
    late_s = float(np.delete(usual, late).mean() - usual[late])
    steps = float(np.mean([sum(step.seconds for step in activity.trace.steps) for activity in activities]))
    share = late_s / steps if steps else 0.0
    return Skew(
        collectives=start.shape[1],
        wait_s=dict(zip(ranks, map(float, per_step.sum(axis=1)), strict=True)),
        late_rank=ranks[late] if late_s > 0 else None,
        late_s=late_s,
        late_share=share,
        cause=lateness_cause(activities, late, late_s) if late_s > 0 else "",
    )


def step_waits(trace: Trace, start: Ints, end: Ints) -> Ints:
    """Nanoseconds of each step within any of the intervals, which are in the clock of this trace's rank."""
    edges = np.array([(step.start, step.end) for step in trace.steps], np.int64).reshape(-1, 2) + trace.origin_ns
    return Spans.union(start, np.maximum(start, end)).covered(edges[:, 0], edges[:, 1])


def common_collectives(traces: Sequence[Trace]) -> tuple[Ints, Ints] | None:
    """Start and end (rank, collective) of those that all ranks entered; None where there are none."""
    found = [entries(trace) for trace in traces]
    common = sorted(set.intersection(*(set(one) for one in found)))
    if not common:
        return None
    start, end = (np.array([[one[key][edge] for key in common] for one in found]) for edge in (0, 1))
    return start, end


def ahead_of_first(end: Ints) -> Ints:
    """By how many nanoseconds each rank's clock is ahead of the first rank's."""
    return np.median(end - end[0], axis=1).astype(np.int64)


def clock_differences(traces: Sequence[Trace]) -> Ints | None:
    """The same, of traces; None where no collective is common to all."""
    edges = common_collectives(traces)
    return None if edges is None else ahead_of_first(edges[1])


def lateness_cause(activities: Sequence[Activity], late: int, late_s: float) -> str:
    """`slow_compute` where the late rank's longer compute explains at least half of what the others waited."""
    compute = np.array([sum(parts.compute for _, parts in activity.of_steps) for activity in activities]) / 1e9
    longer = compute[late] - np.median(np.delete(compute, late))
    return "slow_compute" if longer >= late_s / 2 else "late_arrival"


def entries(trace: Trace) -> Entries:
    """Start and end of every collective, in absolute nanoseconds, by name and order within its group.

    Not of sends and receives: the first send of one rank is another message than the first send of the next.
    """
    events = trace.events
    rows = np.flatnonzero(events.of(Kind.COLLECTIVE) & in_steps(trace, events.start))
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    found: Entries = {}
    for row in rows:
        message = message_of(trace, int(row))
        if message.name in P2P:
            continue
        key = (f"{message.name} {message.bytes}", message.group)
        found[*key, counts[key]] = (trace.origin_ns + int(events.start[row]), trace.origin_ns + int(events.end[row]))
        counts[key] += 1
    return found
