"""The time of a step by op of the network and pass, of our own traces: every moment of a step is in one row.

On a device a kernel's time goes to the op that launched it; where kernels overlap, to the one that began first. On a
CPU the thread of the steps is divided: an op's own time, and the host's time before it (Python, dispatch), which the
planner prices as its launch. Communication counts as far as nothing is computed meanwhile.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .breakdown import Activity
from .collectives import message_of
from .intervals import Spans
from .model import STEP, Events, Ints, Kind, Trace
from .nesting import Nesting
from .op_rows import Rows, rows_of

HOST = (Kind.OP, Kind.RUNTIME, Kind.ANNOTATION)
LAYER = re.compile(r"^layer/\S+$")  # of our own traces
COMMUNICATION, IDLE, UNASSIGNED = "communication", "idle", "unassigned"
OpTimes = dict[tuple[str, str], float]  # (op, pass) → seconds of a step; (COMMUNICATION, kind), (IDLE, ""), …


def op_times(traces: Sequence[Trace]) -> OpTimes | None:
    """Means of a step of one rank; None where no span of ours was recorded.

    Of a pipeline those of the busiest rank, as the planner prices that one.
    """
    found = [one for trace in traces if (one := rank_times(trace)) is not None]
    if not found:
        return None
    if any(name.startswith("stage/") for name in traces[0].names):
        return max(found, key=lambda one: sum(one.values()) - idle_seconds(one))
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: sum(one.get(key, 0.0) for one in found) / len(found) for key in keys}


def idle_seconds(times: OpTimes) -> float:
    return sum(length for (op, _), length in times.items() if op in (IDLE, COMMUNICATION))


def rank_times(trace: Trace) -> OpTimes | None:
    steps = trace.steps
    if not trace.host_steps or not np.any(trace.named(LAYER) & trace.events.of(Kind.ANNOTATION)):
        return None
    nesting = Nesting.of(trace, HOST)
    rows = rows_of(trace, nesting)
    activity = Activity(trace)
    totals: defaultdict[tuple[str, str], int] = defaultdict(int)
    for step in steps:
        add = on_device if trace.on_device else on_host
        add(trace, nesting, rows, activity, step.start, step.end, totals)
        for kind, exposed in exposed_by_kind(trace, activity, step.start, step.end).items():
            totals[COMMUNICATION, kind] += exposed
    return {key: length / 1e9 / len(steps) for key, length in totals.items() if length}


def add_rows(rows: Rows, of: Ints, time: Ints, totals: defaultdict[tuple[str, str], int]) -> None:
    for label, length in zip(
        (*rows.labels, (UNASSIGNED, "")),
        np.bincount(np.where(of >= 0, of, len(rows.labels)), weights=time, minlength=len(rows.labels) + 1).tolist(),
        strict=True,
    ):
        totals[label] += round(length)


def on_device(
    trace: Trace, _nesting: Nesting, rows: Rows, activity: Activity, start: int, end: int,
    totals: defaultdict[tuple[str, str], int],
) -> None:  # fmt: skip
    events = trace.events
    for kinds, beneath in (
        ((Kind.KERNEL,), None),
        ((Kind.COPY, Kind.MEMSET), activity.compute | activity.communication),
    ):
        chosen = np.flatnonzero(events.of(*kinds) & (events.end > start) & (events.start < end))
        own = exclusive(events.take(chosen), start, end, beneath)
        call = trace.launch[chosen]
        add_rows(rows, np.where(call >= 0, rows.of[np.maximum(call, 0)], -1), own, totals)
    totals[IDLE, ""] += int((end - start) - activity.busy.covered(start, end))


def exclusive(events: Events, start: int, end: int, beneath: Spans | None = None) -> Ints:
    """Of events by start, the time of each within the window that no earlier one has, nor `beneath`."""
    first, last = np.clip(events.start, start, end), np.clip(events.end, start, end)
    reach = np.concatenate(([start], np.maximum.accumulate(last)))[:-1] if len(last) else last
    first = np.minimum(np.maximum(first, reach), last)
    return last - first if beneath is None else last - first - beneath.covered(first, last)


def exposed_by_kind(trace: Trace, activity: Activity, start: int, end: int) -> dict[str, int]:
    """Communication that nothing is computed under, by collective."""
    events = trace.events
    chosen = np.flatnonzero(events.of(Kind.COLLECTIVE) & (events.end > start) & (events.start < end))
    own = exclusive(events.take(chosen), start, end, activity.compute)
    found: defaultdict[str, int] = defaultdict(int)
    for row, length in zip(chosen.tolist(), own.tolist(), strict=True):
        found[message_of(trace, row).name] += length
    return found


def on_host(
    trace: Trace, nesting: Nesting, rows: Rows, activity: Activity, start: int, end: int,
    totals: defaultdict[tuple[str, str], int],
) -> None:  # fmt: skip
    """The step's own thread. Exposed communication is taken out of what waited for it: gaps, calls, nodes."""
    events = trace.events
    marks = np.flatnonzero(trace.named(STEP) & events.of(Kind.ANNOTATION))
    lane = events.lane == events.lane[marks[0]]
    ops = lane & events.of(Kind.OP) & (events.start >= start) & (events.start < end)
    ops |= events.of(Kind.ANNOTATION) & (nesting.innermost(ops) >= 0)  # spans of recomputation, within a node
    exposed = activity.communication - activity.compute
    inside = np.flatnonzero(ops)
    inner = nesting.innermost(ops)
    above = np.where(nesting.parent[inside] >= 0, inner[np.maximum(nesting.parent[inside], 0)], -1)
    add_rows(rows, rows.of[inside], exclusive_nested(events, inside, above, exposed), totals)

    outer = inside[above < 0]
    edges = np.concatenate(([start], np.maximum.accumulate(events.end[outer]).clip(max=end)))
    begins = np.concatenate((events.start[outer], [end]))
    gaps = Spans.union(edges, np.maximum(begins, edges))
    spans = np.flatnonzero(lane & events.of(Kind.ANNOTATION) & (rows.of >= 0))
    add_gaps(trace, rows, gaps, outer, spans, exposed, totals)


def exclusive_nested(events: Events, inside: Ints, above: Ints, exposed: Spans) -> Ints:
    """Of ops by start, each under the one `above` it: the time outside those beneath it and exposed communication.

    Ranges may overlap in part (a mode of PyTorch's dispatcher that ends within a module it was left for): what two
    share goes to the one that began last.
    """
    end = events.end[inside].copy()
    order = np.lexsort((events.start[inside], above))
    first, second = order[:-1], order[1:]
    siblings = above[first] == above[second]
    end[first] = np.where(siblings, np.minimum(end[first], events.start[inside[second]]), end[first])
    time = end - events.start[inside] - exposed.covered(events.start[inside], end)
    beneath = np.zeros(len(events), np.int64)
    within = above >= 0
    np.add.at(beneath, above[within], time[within])
    return time - beneath[inside]


def add_gaps(
    trace: Trace, rows: Rows, gaps: Spans, ops: Ints, spans: Ints, exposed: Spans,
    totals: defaultdict[tuple[str, str], int],
) -> None:  # fmt: skip
    """A gap goes to the op that follows in the same phase; what is left of a phase after its last op, to that op."""
    events = trace.events
    phases = [row for row in spans.tolist() if trace.names[events.name[row]].startswith("phase/")]
    begin, finish = (np.array([getattr(events, edge)[row] for row in phases], np.int64) for edge in ("start", "end"))
    cuts = np.unique(np.concatenate((gaps.start, gaps.end, begin, finish)))
    left, right = cuts[:-1], cuts[1:]
    keep = gaps.covered(left, right) == right - left
    left, right = left[keep], right[keep]
    time = right - left - exposed.covered(left, right)
    phase = np.searchsorted(begin, left, side="right") - 1
    inside = (phase >= 0) & (left < finish[np.maximum(phase, 0)]) if len(begin) else np.zeros(len(left), np.bool_)
    following = np.searchsorted(events.start[ops], left, side="left")
    before = following - 1
    label = np.full(len(left), -1, np.int64)
    for index in np.flatnonzero(inside).tolist():
        low, high = int(begin[phase[index]]), int(finish[phase[index]])
        for place in (int(following[index]), int(before[index])):
            if 0 <= place < len(ops) and low <= events.start[ops[place]] < high:
                label[index] = rows.of[ops[place]]
                break
        else:
            label[index] = rows.of[phases[int(phase[index])]]
    add_rows(rows, label, time, totals)
