"""One step of all ranks as rows of boxes, few enough to draw: host threads, collectives, device streams.

Events shorter than a resolution that begin within one cell of it become one box ("17 events"). The resolution is the
finest with which the boxes of all ranks stay under the limit, so a row shows where it was busy however many events
there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .model import Ints, Kind, Trace
from .skew import clock_differences

MOST_RANKS = 8
DEEPEST = 16  # rows of a host thread; Python calls nest deeper
GROUPS = {
    Kind.ANNOTATION: "annotation",
    Kind.PYTHON: "python",
    Kind.OP: "op",
    Kind.RUNTIME: "runtime call",
    Kind.COLLECTIVE: "collective",
    Kind.KERNEL: "kernel",
    Kind.COPY: "copy",
    Kind.MEMSET: "copy",
}


@dataclass(frozen=True)
class Row:
    """A thread or stream of a rank; nested events are drawn on `depth` lines."""

    label: str
    depth: int


@dataclass(frozen=True)
class Boxes:
    """Columns of one length. Times are nanoseconds since the earliest rank began the step."""

    row: Ints
    depth: Ints
    kind: npt.NDArray[np.uint8]
    start: Ints
    end: Ints
    name: list[str]
    events: Ints  # 1, or how many are drawn as one

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Timeline:
    step: int
    length: int  # ns
    ranks: list[int]
    rows: list[Row]
    boxes: Boxes
    resolution: int  # ns; 0: every event is drawn


def timeline(traces: Sequence[Trace], limit: int) -> Timeline | None:
    """Of the step of median length on the first rank, with at most `limit` boxes. None where nothing was recorded."""
    if not traces or not traces[0].steps:
        return None
    steps = sorted(traces[0].steps, key=lambda step: step.seconds)
    number = steps[len(steps) // 2].number
    shown = [trace for trace in traces if any(step.number == number for step in trace.steps)][:MOST_RANKS]
    windows = [step_window(trace, number) for trace in shown]
    origin = absolute_origins(shown, [start for start, _ in windows])
    first = min(start + shift for (start, _), shift in zip(windows, origin, strict=True))
    rows: list[Row] = []
    parts = [
        rank_boxes(trace, window, shift - first, rows, len(shown) > 1)
        for trace, window, shift in zip(shown, windows, origin, strict=True)
    ]
    names = [name for trace in shown for name in trace.names]
    offsets = np.cumsum([0, *(len(trace.names) for trace in shown[:-1])])
    for part, offset in zip(parts, offsets, strict=True):
        part[-1] += offset  # names
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    length = int(columns[4].max(initial=0))
    boxes, resolution = thinned(columns, names, limit, length)
    return Timeline(number, length, [trace.rank for trace in shown], rows, boxes, resolution)


def step_window(trace: Trace, number: int) -> tuple[int, int]:
    """Of the host, which launches ahead, and of the device together."""
    both = [step for step in (*trace.steps, *trace.host_steps) if step.number == number]
    return min(step.start for step in both), max(step.end for step in both)


def absolute_origins(traces: Sequence[Trace], starts: Sequence[int]) -> list[int]:
    """What makes the times of each rank times of the first rank's clock.

    By the ends of common collectives; without any, the step is taken to begin at once everywhere.
    """
    clock = clock_differences(traces)
    if clock is None:
        return [starts[0] - start for start in starts]
    return [trace.origin_ns - traces[0].origin_ns - int(ahead) for trace, ahead in zip(traces, clock, strict=True)]


def rank_boxes(trace: Trace, window: tuple[int, int], shift: int, rows: list[Row], named: bool) -> list[Ints]:
    """Columns row, depth, kind, start, end, name of one rank's events in the window; appends its rows to `rows`."""
    events = trace.events
    drawn = np.isin(events.kind, list(GROUPS)) & (events.end > window[0]) & (events.start < window[1])
    chosen = np.flatnonzero(drawn)
    kind, lane = events.kind[chosen], events.lane[chosen].astype(np.int64)
    # Host threads first, then collectives, then streams.
    place = np.where(kind == Kind.COLLECTIVE, 1, np.where(kind > Kind.COLLECTIVE, 2, 0))
    start, end = np.clip(events.start[chosen], *window), np.clip(events.end[chosen], *window)
    row, depth = np.zeros(len(chosen), np.int64), np.zeros(len(chosen), np.int64)
    key = place * len(trace.lanes) + lane
    for one in np.unique(key):
        own = np.flatnonzero(key == one)
        own = own[np.lexsort((-end[own], start[own]))]
        depth[own] = np.arange(len(own)) - np.searchsorted(np.sort(end[own]), start[own], side="right")
        depth[own] = np.clip(depth[own], 0, DEEPEST)
        row[own] = len(rows)
        where = trace.lanes[int(one) % len(trace.lanes)]
        label = where.label.strip() or where.thread
        kinds = "collectives, " if one // len(trace.lanes) == 1 else ""
        rows.append(Row(f"{f'rank {trace.rank}: ' if named else ''}{kinds}{label}", int(depth[own].max()) + 1))
    return [row, depth, kind.astype(np.int64), start + shift, end + shift, events.name[chosen].astype(np.int64)]


def thinned(columns: Sequence[Ints], names: Sequence[str], limit: int, length: int) -> tuple[Boxes, int]:
    row, depth, kind, start, end, name = columns
    resolution, group = 0, np.arange(len(start))
    while len(start) and int(group.max()) >= limit and resolution < length:
        resolution = 2 * resolution or max(length // 65536, 1)
        cell = (row * (DEEPEST + 1) + depth) * len(Kind) + kind
        cell = cell * (length // resolution + 1) + start // resolution
        alone = end - start >= resolution
        cell[alone] = -1 - np.arange(int(alone.sum()))
        _, group = np.unique(cell, return_inverse=True)
    _, first, count = np.unique(group, return_index=True, return_counts=True)
    low, high = start[first], end[first]
    np.minimum.at(low, group, start)
    np.maximum.at(high, group, end)
    texts = [names[name[index]] if many == 1 else f"{many} events" for index, many in zip(first, count, strict=True)]
    return Boxes(row[first], depth[first], kind[first].astype(np.uint8), low, high, texts, count), resolution
