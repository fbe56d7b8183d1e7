"""Sequences of short kernels that come again and again on one stream: what a fused kernel or a graph would save.

What fusing a run of n kernels saves is at least the gaps between them: one launch instead of n, and no idle device
between. The memory that the kernels in between would no longer write and read is not in a trace, so not counted.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from .hotspots import SHORT_KERNEL, in_steps
from .model import Ints, Kind, Trace

LONGEST = 8  # kernels of a sequence
TIMES = 3  # as often as this a step, at least


def fusible(trace: Trace, top: int = 10) -> list[dict[str, Any]]:
    """Sequences without a long kernel, by the seconds of the gaps between their kernels."""
    events = trace.events
    rows = np.flatnonzero(events.of(Kind.KERNEL) & in_steps(trace, events.start))
    found: defaultdict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0, 0])  # times, gaps, kernel time
    for lane in np.unique(events.lane[rows]):
        own = rows[events.lane[rows] == lane]
        count_sequences(events.name[own], events.start[own], events.end[own], found)
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


def count_sequences(
    name: npt.NDArray[np.int32], start: Ints, end: Ints, found: defaultdict[tuple[int, ...], list[int]]
) -> None:
    """Cut the runs of short kernels of a stream into sequences of at most LONGEST, and count each."""
    short = end - start < SHORT_KERNEL
    busy = np.concatenate(([0], np.cumsum(end - start)))
    gaps = np.concatenate(([0, 0], np.cumsum((start[1:] - end[:-1]).clip(0))))  # before each kernel
    for run in np.split(np.arange(len(name)), np.flatnonzero(np.diff(short.astype(np.int8))) + 1):
        for first in range(int(run[0]), int(run[-1]) + 1, LONGEST) if len(run) and short[run[0]] else ():
            after = min(first + LONGEST, int(run[-1]) + 1)
            if after - first > 1:
                one = found[tuple(name[first:after].tolist())]
                one[0] += 1
                one[1] += int(gaps[after] - gaps[first + 1])
                one[2] += int(busy[after] - busy[first])
