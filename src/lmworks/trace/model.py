"""One rank's trace as columns, whatever profiler wrote it.

Times are integer nanoseconds since `origin_ns`, so that unions and differences of intervals are exact. A lane is a
host thread or a device stream. A device event and the runtime call that launched it share a correlation id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Kind(IntEnum):
    """What an event is; DEVICE and HOST below group them."""

    OP = 0  # an operator of PyTorch, on a host thread
    RUNTIME = 1  # a call of the CUDA or HIP runtime or driver
    ANNOTATION = 2  # record_function, ProfilerStep, a phase
    PYTHON = 3  # a Python call (with_stack)
    COLLECTIVE = 4  # communication: a kernel of NCCL or RCCL, or what a gloo thread does
    KERNEL = 5  # any other kernel
    COPY = 6  # memcpy
    MEMSET = 7
    DEVICE_ANNOTATION = 8  # the device's time under an annotation


DEVICE = (Kind.KERNEL, Kind.COLLECTIVE, Kind.COPY, Kind.MEMSET)  # what occupies a device
STEP = re.compile(r"ProfilerStep#(\d+)$")  # names of the annotation around a step


@dataclass(frozen=True)
class Lane:
    """A host thread, or a stream of a device."""

    process: str
    thread: str
    device: bool
    label: str = ""


@dataclass(frozen=True)
class Message:
    """What a collective sends: its name and process group, bytes of this rank's input, data type."""

    name: str
    group: str
    ranks: int | None
    bytes: int | None
    dtype: str = ""


@dataclass(frozen=True)
class Events:
    """Columns of one length, by start."""

    kind: npt.NDArray[np.uint8]  # a Kind
    name: npt.NDArray[np.int32]  # index into Trace.names
    lane: npt.NDArray[np.int32]  # index into Trace.lanes
    start: Ints
    end: Ints
    correlation: Ints  # of a launch and what it launched; -1: none
    bytes: Ints  # of a copy or memset; -1: unknown
    shapes: npt.NDArray[np.int32]  # index into Trace.shapes; -1: not recorded
    message: npt.NDArray[np.int32]  # index into Trace.messages; -1: no collective, or without details
    sequence: Ints  # of an op and of the node of autograd that it made, counted by thread; -1: none
    forward_thread: Ints  # of a node of autograd: which thread made it; 0: an op, -1: unknown

    def __len__(self) -> int:
        return len(self.start)

    def take(self, chosen: Mask | Ints) -> Events:
        """Rows by mask or by index."""
        return Events(*(getattr(self, column.name)[chosen] for column in fields(self)))

    @property
    def duration(self) -> Ints:
        return self.end - self.start

    def of(self, *kinds: Kind) -> Mask:
        return np.isin(self.kind, kinds)


@dataclass(frozen=True)
class MemoryEvents:
    """Allocations and frees as the allocator reported them, by time; device −1 is the host."""

    time: Ints
    device: Ints
    bytes: Ints  # negative: freed
    allocated: Ints  # in all, after the event; -1: unknown
    reserved: Ints


@dataclass(frozen=True)
class Step:
    """One step: its number and the window of the rank's device, or of its host where there is no device."""

    number: int
    start: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


@dataclass(frozen=True)
class Trace:
    """One rank."""

    source: str
    rank: int
    world: int | None
    origin_ns: int  # time 0 in Unix time, or in the clock of the machine where a trace does not say
    names: Sequence[str]
    lanes: Sequence[Lane]
    shapes: Sequence[str]  # dims and types of an op's inputs, as JSON
    messages: Sequence[Message]
    events: Events
    memory: MemoryEvents
    device: str = ""  # its name
    backend: str = ""  # of torch.distributed
    skipped: int = 0  # events of the file that have no time or no duration
    host: str = ""  # name of the machine
    about: Mapping[str, Any] = field(default_factory=dict)  # what our own recordings say of the run: its spec

    @cached_property
    def on_device(self) -> bool:
        """Whether an accelerator was recorded. Where not, host threads do the work."""
        return bool(np.any(self.events.of(Kind.KERNEL, Kind.COPY, Kind.MEMSET))) or any(
            self.lanes[lane].device for lane in np.unique(self.events.lane)
        )

    @cached_property
    def launch(self) -> Ints:
        """For every event of the device, the index of the call that launched it; else −1."""
        events = self.events
        calls = np.flatnonzero(events.of(Kind.RUNTIME) & (events.correlation >= 0))
        found = np.full(len(events), -1, np.int64)
        device = np.flatnonzero(events.of(*DEVICE) & (events.correlation >= 0))
        if not len(calls) or not len(device):
            return found
        calls = calls[np.argsort(events.correlation[calls], kind="stable")]
        ids = events.correlation[calls]
        place = np.minimum(np.searchsorted(ids, events.correlation[device]), len(ids) - 1)
        same = ids[place] == events.correlation[device]
        found[device[same]] = calls[place[same]]
        return found

    def named(self, pattern: re.Pattern[str]) -> Mask:
        """Events whose name the pattern is found in."""
        hits = np.fromiter((bool(pattern.search(name)) for name in self.names), np.bool_, len(self.names))
        return hits[self.events.name] if len(self.names) else np.zeros(0, np.bool_)

    @cached_property
    def host_steps(self) -> list[Step]:
        """The annotations around steps, on the host."""
        events = self.events
        chosen = np.flatnonzero(self.named(STEP) & events.of(Kind.ANNOTATION, Kind.OP))
        found: dict[int, Step] = {}
        for row in chosen:
            match = STEP.search(self.names[events.name[row]])
            if match:
                number = int(match[1])
                found.setdefault(number, Step(number, int(events.start[row]), int(events.end[row])))
        return sorted(found.values(), key=lambda step: step.start)

    @cached_property
    def steps(self) -> list[Step]:
        """Windows of the device, one after the other.

        A step begins on the device when the host began it, or when the device has done all that was launched before,
        whichever is later. Without annotations the whole trace is one step, number 0.
        """
        events, marks = self.events, self.host_steps
        busy = events.of(*DEVICE) if self.on_device else events.of(Kind.OP, Kind.COLLECTIVE)
        if not np.any(busy):
            return marks
        first, last = int(events.start[busy].min()), int(events.end[busy].max())
        if not marks:
            return [Step(0, first, last)]
        if not self.on_device:
            return marks
        device = np.flatnonzero(busy)
        call = self.launch[device]
        launched = np.where(call >= 0, events.start[call], events.start[device])
        order = np.argsort(launched, kind="stable")
        done = np.maximum.accumulate(events.end[device[order]])  # when all that was launched up to each is done
        cuts = np.array([step.start for step in marks] + [marks[-1].end])
        place = np.searchsorted(launched[order], cuts)
        edges = np.maximum(cuts, np.where(place > 0, done[np.maximum(place - 1, 0)], cuts))
        return [Step(step.number, int(edges[i]), int(edges[i + 1])) for i, step in enumerate(marks)]
