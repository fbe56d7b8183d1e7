"""A rank's time as compute, communication (exposed and hidden), copies and idle, step by step.

Definitions are those of HTA's temporal breakdown and communication overlap: time is counted once however many streams
are busy, compute is all but messages and copies, and communication under compute is hidden. Where no accelerator was
recorded, host threads are the device: ops of the training thread and of autograd compute, gloo's threads communicate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .intervals import Spans
from .model import STEP, Ints, Kind, Step, Trace

C10D = re.compile(r"^c10d::|^_c10d_functional::|^record_param_comms|^gloo:")
AUTOGRAD = re.compile(r"^autograd::engine::")
NODE = re.compile(r"^autograd::engine::|Backward\d*$")  # hold the ops of a backward pass, and its waits for messages


@dataclass(frozen=True)
class Breakdown:
    """Nanoseconds of a window. compute + exposed_comm + copy + idle is all of it; hidden_comm lies under compute."""

    window: int
    compute: int
    exposed_comm: int
    hidden_comm: int
    copy: int
    idle: int


@dataclass(frozen=True)
class Activity:
    """When a rank computed, communicated and copied."""

    trace: Trace

    @cached_property
    def compute(self) -> Spans:
        trace, events = self.trace, self.trace.events
        if trace.on_device:
            return Spans.of(events.take(events.of(Kind.KERNEL)))
        whole = Spans.union(*(np.zeros(0, np.int64),) * 2)
        ops, calls, nodes = events.of(Kind.OP), trace.named(C10D), trace.named(NODE)
        for lane in compute_lanes(trace):
            here = ops & (events.lane == lane)
            computed = Spans.of(events.take(here & ~calls & ~nodes))
            around = Spans.of(events.take(here & nodes)) - self.communication
            whole = whole | ((computed | around) - Spans.of(events.take(here & calls)))
        return whole

    @cached_property
    def communication(self) -> Spans:
        events = self.trace.events
        return Spans.of(events.take(events.of(Kind.COLLECTIVE)))

    @cached_property
    def copies(self) -> Spans:
        events = self.trace.events
        return Spans.of(events.take(events.of(Kind.COPY, Kind.MEMSET)))

    @cached_property
    def busy(self) -> Spans:
        return self.compute | self.communication | self.copies

    @cached_property
    def hidden(self) -> Spans:
        return self.compute & self.communication

    @cached_property
    def exposed_copies(self) -> Spans:
        return self.copies - (self.compute | self.communication)

    def breakdown(self, start: int, end: int) -> Breakdown:
        return self.breakdowns(np.array([start]), np.array([end]))[0]

    def breakdowns(self, start: Ints, end: Ints) -> list[Breakdown]:
        """Of many windows."""
        parts = (self.compute, self.communication, self.hidden, self.exposed_copies, self.busy)
        compute, comm, hidden, copy, busy = (spans.covered(start, end) for spans in parts)
        rows = np.stack((end - start, compute, comm - hidden, hidden, copy, end - start - busy), axis=1)
        return [Breakdown(*row) for row in rows.tolist()]

    @cached_property
    def of_steps(self) -> list[tuple[Step, Breakdown]]:
        steps = self.trace.steps
        edges = np.array([(step.start, step.end) for step in steps], np.int64).reshape(-1, 2)
        return list(zip(steps, self.breakdowns(edges[:, 0], edges[:, 1]), strict=True))


def compute_lanes(trace: Trace) -> Ints:
    """Host threads that compute where there is no device: the one of the steps (or the busiest) and autograd's."""
    events = trace.events
    ops = events.of(Kind.OP)
    if not np.any(ops):
        return np.zeros(0, np.int64)
    marks = trace.named(STEP) & events.of(Kind.ANNOTATION, Kind.OP)
    time = np.bincount(events.lane[ops], weights=events.duration[ops], minlength=len(trace.lanes))
    main = events.lane[marks] if np.any(marks) else np.array([int(np.argmax(time))])
    return np.unique(np.concatenate((main, events.lane[ops & trace.named(AUTOGRAD)]))).astype(np.int64)
