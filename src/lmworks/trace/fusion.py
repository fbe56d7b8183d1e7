"""Sequences of short kernels that come again and again on one stream: what a fused kernel or a graph would save.

What fusing a run of n kernels saves is at least the gaps between them: one launch instead of n, and no idle device
between. The memory that the kernels in between would no longer write and read is not in a trace, so not counted.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from .hotspots import SHORT_KERNEL, in_steps
from .model import Kind, Trace

LONGEST = 8  # kernels of a sequence
TIMES = 3  # as often as this a step, at least


def fusible(trace: Trace, top: int = 10) -> list[dict[str, Any]]:
    """Sequences without a long kernel, by the seconds of the gaps between their kernels."""
    events = trace.events
    rows = np.flatnonzero(events.of(Kind.KERNEL) & in_steps(trace, events.start))
    found: defaultdict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0, 0])  # times, gaps, kernel time
    for lane in np.unique(events.lane[rows]):
        own = rows[events.lane[rows] == lane]
        short = events.duration[own] < SHORT_KERNEL
        edges = np.flatnonzero(np.diff(short.astype(np.int8))) + 1
        for run in np.split(np.arange(len(own)), edges):
            if short[run[0]] and len(run) > 1:
                count_sequences(own[run], trace, found)
    least = TIMES * max(len(trace.steps), 1)
    worth: list[dict[str, Any]] = [
        {
            "kernels": [trace.names[name] for name in names],
            "times": times,
            "gap_s": gap / 1e9,
            "kernel_s": length / 1e9,
        }
        for names, (times, gap, length) in found.items()
        if times >= least
    ]
    return sorted(worth, key=lambda one: -one["gap_s"])[:top]


def count_sequences(run: np.ndarray, trace: Trace, found: defaultdict[tuple[int, ...], list[int]]) -> None:
    """Cut a run of short kernels into sequences of at most LONGEST, and count each."""
    events = trace.events
    for place in range(0, len(run), LONGEST):
        part = run[place : place + LONGEST]
        if len(part) > 1:
            one = found[tuple(events.name[part].tolist())]
            one[0] += 1
            one[1] += int((events.start[part[1:]] - events.end[part[:-1]]).clip(0).sum())
            one[2] += int(events.duration[part].sum())
