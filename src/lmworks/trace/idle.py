"""Why the device was idle.

A gap ends with an event of the device. Where that event was launched before the gap began, the device itself was late:
the delay between two kernels, or a stream that waited for another. Otherwise the host was: because it waited for its
input, because it had waited for the device and could not launch ahead (synchronisation), because it waited for another
rank, or because it was slow. Time of a gap is given to these in that order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from .breakdown import C10D, Activity, compute_lanes
from .intervals import Spans
from .model import DEVICE, Ints, Kind, Mask, Trace

CAUSES = {
    "host_late": "the host had not launched the next kernel yet",
    "input_late": "the host waited for its next batch, or brought it to the device from pageable memory",
    "synchronisation": "the host had waited for the device, and so launched nothing ahead",
    "other_rank": "the host waited for another rank",
    "kernel_gap": "between two kernels that were both launched in time",
    "other": "launched in time, and held back by another stream or an event",
}
KERNEL_GAP = 30_000  # ns: HTA's threshold between the delay of a launch and a wait

INPUT = re.compile(r"DataLoader|^(?:phase/)?input$|^next_batch$")
WAITS = re.compile(
    r"^(?:cuda|hip)(?:Device|Stream|Event|Ctx)Synchronize|^(?:cuda|hip)(?:Memcpy|MemcpyAsync|Free|Malloc|HostAlloc)$"
    r"|^cu(?:Stream|Event|Ctx)Synchronize|^hipMemcpyWithStream$"
)
SYNCHRONIZE = re.compile(r"Synchronize")
RANK_WAITS = re.compile(r"^c10d::|^phase/communication$|^(?:gloo|nccl):(?:recv|send)|barrier")
PAGEABLE_IN = re.compile(r"HtoD \(Pageable")
STAGED = 2**16  # bytes: what the host copies before the device can, and so lets it wait
SLOW_CALL = 20_000  # ns: a copy or an allocation that returns within it did not wait for the device


@dataclass(frozen=True)
class IdleCauses:
    """Nanoseconds of idle time of every window, by cause."""

    by_cause: dict[str, Ints]

    def of(self, window: int) -> dict[str, int]:
        return {cause: int(values[window]) for cause, values in self.by_cause.items()}


def idle_causes(activity: Activity) -> IdleCauses:
    """Of the trace's steps."""
    trace = activity.trace
    gaps, window = step_gaps(activity)
    seconds = on_device_causes(trace, gaps) if trace.on_device else on_host_causes(trace, gaps)
    count = len(trace.steps)
    return IdleCauses(
        {
            cause: np.bincount(window, weights=seconds.get(cause, 0 * gaps.start), minlength=count).astype(np.int64)
            for cause in CAUSES
        }
    )


def step_gaps(activity: Activity) -> tuple[Spans, Ints]:
    """Idle intervals of all steps, and the place of each one's step."""
    steps = activity.trace.steps
    edges = np.array([(step.start, step.end) for step in steps], np.int64).reshape(-1, 2)
    if not len(edges):
        return Spans(*edges.T), edges[:, 0]
    gaps = activity.busy.gaps(int(edges[0, 0]), int(edges[-1, 1]))
    # A gap that runs from one step into another is cut there; what lies between two steps is dropped.
    first, last = np.searchsorted(edges[:, 1], gaps.start, side="right"), np.searchsorted(edges[:, 0], gaps.end)
    count = np.maximum(last - first, 0)
    gap = np.repeat(np.arange(len(count)), count)
    window = first[gap] + np.arange(len(gap)) - np.repeat(np.cumsum(count) - count, count)
    start, end = np.maximum(gaps.start[gap], edges[window, 0]), np.minimum(gaps.end[gap], edges[window, 1])
    return Spans(start, end), window


def on_device_causes(trace: Trace, gaps: Spans) -> dict[str, Ints]:
    events = trace.events
    device = np.flatnonzero(events.of(*DEVICE))
    place = np.searchsorted(events.start[device], gaps.start)  # the event that ends the gap starts at its end
    ended = place < len(device)
    after = device[np.minimum(place, len(device) - 1)]
    call = np.where(ended, trace.launch[after], -1)
    # Without a launch on record (the last gap of a trace), the host is late for all of the gap.
    called = np.where(call >= 0, events.start[call], np.where(ended, gaps.start, gaps.end))
    late = np.clip(called, gaps.start, gaps.end) - gaps.start
    length = gaps.end - gaps.start
    in_time = ended & (called <= gaps.start)
    to = gaps.start + late

    waited_input = Spans.of(events.take(trace.named(INPUT) & events.of(Kind.ANNOTATION, Kind.OP)))
    input_late = waited_input.covered(gaps.start, to)
    synced = after_synchronisation(trace, gaps.start, to)
    ranks = Spans.of(events.take(rank_waits(trace))) - waited_input
    rank = np.where(synced, 0, ranks.covered(gaps.start, to))
    staged = ended & trace.named(PAGEABLE_IN)[after] & (events.bytes[after] >= STAGED)
    rest = length - input_late - rank  # with the latency of the launch itself
    late_host = ~in_time & ~staged
    return {
        "input_late": np.where(staged, length, np.where(late_host, input_late, 0)),
        "other_rank": np.where(late_host, rank, 0),
        "synchronisation": np.where(late_host & synced, rest, 0),
        "host_late": np.where(late_host & ~synced, rest, 0),
        "kernel_gap": np.where(in_time & ~staged & (length < KERNEL_GAP), length, 0),
        "other": np.where(in_time & ~staged & (length >= KERNEL_GAP), length, 0),
    }


def rank_waits(trace: Trace) -> Mask:
    """What the host calls to send and receive, in a job of several ranks.

    A trace that does not say how many there are has several if it has a collective.
    """
    marks = trace.events.of(Kind.ANNOTATION, Kind.OP)
    together = trace.events.of(Kind.COLLECTIVE) | trace.named(C10D) & marks
    several = np.any(together) if trace.world is None else trace.world > 1
    return trace.named(RANK_WAITS) & marks & several


def device_waits(trace: Trace) -> Mask:
    """Calls of the host that wait for the device: synchronisations, and copies or allocations that took long."""
    events = trace.events
    long = trace.named(SYNCHRONIZE) | (events.duration >= SLOW_CALL)
    return trace.named(WAITS) & events.of(Kind.RUNTIME) & long


def after_synchronisation(trace: Trace, start: Ints, end: Ints) -> Mask:
    """Whether a host call that waits for the device returned within each interval."""
    ends = np.sort(trace.events.end[device_waits(trace)])
    return np.searchsorted(ends, end, side="right") > np.searchsorted(ends, start, side="left")


def on_host_causes(trace: Trace, gaps: Spans) -> dict[str, Ints]:
    """Without a device the host's thread is between two ops: in Python, at its input, or within a collective's call."""
    events = trace.events
    lanes = np.isin(events.lane, compute_lanes(trace))
    marks = lanes & events.of(Kind.ANNOTATION, Kind.OP)
    inputs = Spans.of(events.take(trace.named(INPUT) & marks))
    ranks = Spans.of(events.take(rank_waits(trace) & marks)) - inputs
    input_late, rank = (spans.covered(gaps.start, gaps.end) for spans in (inputs, ranks))
    return {
        "input_late": input_late,
        "other_rank": rank,
        "host_late": gaps.end - gaps.start - input_late - rank,
    }


def stream_idle(trace: Trace) -> dict[str, dict[str, int]]:
    """HTA's idle time breakdown: of every stream, gaps by whether the next kernel was launched before they began."""
    events = trace.events
    found: dict[str, dict[str, int]] = {}
    device = np.flatnonzero(events.of(*DEVICE))
    for lane in np.unique(events.lane[device]):
        rows = device[events.lane[device] == lane]
        before, gap = events.end[rows[:-1]], events.start[rows[1:]] - events.end[rows[:-1]]
        call = trace.launch[rows[1:]]
        host = (call >= 0) & (events.start[call] > before)
        short = ~host & (gap < KERNEL_GAP)
        found[trace.lanes[lane].thread.removeprefix("stream ")] = {
            "host_wait": int(gap[host].sum()),
            "kernel_wait": int(gap[short].sum()),
            "other": int(gap[~host & ~short].sum()),
        }
    return found
