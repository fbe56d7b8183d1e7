"""The bubble of a pipeline as it was measured: from the passes that our own traces name, `stage/1 F 0`.

A rank's bubble is what it idles between the first pass of any rank of its pipeline and the end of the last, as
`plan.pipelines.schedule.idle_shares` counts it. A pass lasts as its range on the host, or on a device from the first of
the kernels that were launched within that range to the end of the last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..spec import Grid, RunSpec
from .intervals import Spans
from .model import Ints, Kind, Trace
from .skew import clock_differences

PASS = re.compile(r"^stage/(\d+) ([FBIW]) (\d+)$")


class StagePass(NamedTuple):
    """A stage's pass over one micro-batch, in the trace's nanoseconds."""

    step: int
    stage: int
    kind: str  # F, B, I or W
    micro_batch: int
    start: int
    end: int


@dataclass(frozen=True)
class RankBubble:
    """Seconds are means of a step."""

    rank: int
    place: int  # in the pipeline
    stages: tuple[int, ...]
    step_s: float
    window_s: float  # from the first pass of the pipeline to the end of the last
    busy_s: float
    whole: bool  # all ranks of the pipeline were recorded; else the window has this rank's passes alone

    @property
    def share(self) -> float:
        """The bubble as a part of the passes' window."""
        return 1 - self.busy_s / self.window_s if self.window_s else 0.0

    @property
    def step_share(self) -> float:
        """The bubble as a part of the step."""
        return (self.window_s - self.busy_s) / self.step_s if self.step_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "place": self.place,
            "stages": list(self.stages),
            "step_s": self.step_s,
            "window_s": self.window_s,
            "busy_s": self.busy_s,
            "measured": self.share,
            "of_step": self.step_share,
            "whole": self.whole,
        }


def stage_passes(trace: Trace) -> list[StagePass]:
    """By start. On a device, those alone that launched a kernel."""
    events = trace.events
    rows = np.flatnonzero(trace.named(PASS) & events.of(Kind.ANNOTATION))
    marks = trace.host_steps
    place = np.searchsorted([step.start for step in marks], events.start[rows], side="right") - 1
    start, end = device_extents(trace, rows) if trace.on_device else (events.start[rows], events.end[rows])
    found = []
    for row, step, first, last in zip(rows, place, start.tolist(), end.tolist(), strict=True):
        match = PASS.match(trace.names[events.name[row]])
        if match and step >= 0 and last > first:
            found.append(StagePass(marks[step].number, int(match[1]), match[2], int(match[3]), first, last))
    return found


def device_extents(trace: Trace, ranges: Ints) -> tuple[Ints, Ints]:
    """When the device computed what was launched within each range of the host; start = end where nothing was.

    By time, not by thread: backward passes launch from autograd's threads while the range is open. Messages between
    stages are no part of a pass.
    """
    events = trace.events
    start = np.full(len(ranges), np.iinfo(np.int64).max)
    end = np.zeros(len(ranges), np.int64)
    kernels = np.flatnonzero(events.of(Kind.KERNEL) & (trace.launch >= 0))
    if len(ranges):
        called = events.start[trace.launch[kernels]]
        place = np.searchsorted(events.start[ranges], called, side="right") - 1
        inside = (place >= 0) & (called < events.end[ranges[np.maximum(place, 0)]])
        np.minimum.at(start, place[inside], events.start[kernels[inside]])
        np.maximum.at(end, place[inside], events.end[kernels[inside]])
    return np.minimum(start, end), end


def bubbles(traces: Sequence[Trace], spec: RunSpec | None) -> list[RankBubble]:
    """Of every rank with passes of a stage; `spec`: whose layout says which ranks are one pipeline."""
    passes = {trace.rank: found for trace in traces if (found := stage_passes(trace))}
    if not passes:
        return []
    behind = clocks(traces)
    by_rank = {trace.rank: trace for trace in traces}
    grid = Grid.of(spec.parallel) if spec is not None else None
    result = []
    for rank, own in sorted(passes.items()):
        group = grid.group("pp", rank) if grid else sorted(passes)
        whole = all(other in passes for other in group)
        members = group if whole else [rank]
        windows: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for other in members:
            offset = by_rank[other].origin_ns - behind[other]
            for one in passes[other]:
                windows[one.step].append((one.start + offset, one.end + offset))
        steps = {step.number: step.seconds for step in by_rank[rank].steps}
        common = [number for number in windows if number in steps and any(one.step == number for one in own)]
        length = sum(max(end for _, end in windows[n]) - min(begin for begin, _ in windows[n]) for n in common)
        edges = np.array([(one.start, one.end) for one in own if one.step in common], np.int64).reshape(-1, 2)
        count = max(len(common), 1)
        result.append(
            RankBubble(
                rank=rank,
                place=group.index(rank),
                stages=tuple(sorted({one.stage for one in own})),
                step_s=sum(steps[number] for number in common) / count,
                window_s=length / 1e9 / count,
                busy_s=Spans.union(edges[:, 0], edges[:, 1]).total / 1e9 / count,
                whole=whole,
            )
        )
    return result


def clocks(traces: Sequence[Trace]) -> dict[int, int]:
    """By how many nanoseconds each rank's clock is ahead: 0 on one machine, else by the ends of collectives."""
    hosts = {trace.host for trace in traces}
    ahead = None if len(hosts) == 1 and hosts != {""} else clock_differences(traces)
    return {trace.rank: 0 if ahead is None else int(ahead[place]) for place, trace in enumerate(traces)}


def pass_seconds(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Mean seconds of each stage's passes by kind, over all micro-batches, steps and replicas of the pipeline."""
    found: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for trace in traces:
        for one in stage_passes(trace):
            found[one.stage, one.kind].append(one.end - one.start)
    return [
        {"stage": stage, "kind": kind, "passes": len(lengths), "seconds": sum(lengths) / len(lengths) / 1e9}
        for (stage, kind), lengths in sorted(found.items())
    ]


def pipeline_facts(traces: Sequence[Trace], spec: RunSpec | None) -> dict[str, Any] | None:
    """The key `pipeline` of a summary; None where no pass of a stage was recorded."""
    ranks = bubbles(traces, spec)
    return {"ranks": [one.to_dict() for one in ranks], "passes": pass_seconds(traces)} if ranks else None
