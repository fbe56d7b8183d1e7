"""Traces of a job as one file for Perfetto (Chrome's JSON): a process a rank, on one clock, with our figures as tracks.

Every rank has its threads and streams, and before them three tracks: steps with the parts of their time, phases, and
what the rank did (compute, exposed communication, copies, idle). The verdict is a process of its own, as long as the
steps. Launches point to what they launched; memory is a counter.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .breakdown import Activity
from .memory import trace_memory
from .model import DEVICE, STEP, Kind, Trace
from .timeline import absolute_origins

Event = dict[str, Any]
FOUND, FIRST_LANE = {"steps": 1, "phases": 2, "activity": 3}, 10  # threads of a rank's process
VERDICT = 0  # the process; ranks follow
SHOWN = {
    Kind.OP: "cpu_op",
    Kind.RUNTIME: "cuda_runtime",
    Kind.ANNOTATION: "user_annotation",
    Kind.PYTHON: "python_function",
    Kind.COLLECTIVE: "collective",
    Kind.KERNEL: "kernel",
    Kind.COPY: "gpu_memcpy",
    Kind.MEMSET: "gpu_memset",
}
BLOCK = 10_000  # events that are encoded together


def write_perfetto(path: Path, traces: Sequence[Trace], facts: Mapping[str, Any]) -> None:
    """`facts` are those of `profile trace --json`. Gzipped where the name ends in .gz."""
    events = all_events(traces, facts)
    encode = msgspec.json.encode
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb", compresslevel=4) if path.suffix == ".gz" else open(path, "wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        first = True
        while block := [event for _, event in zip(range(BLOCK), events, strict=False)]:
            file.write(b"" if first else b",\n")
            file.write(b",\n".join(map(encode, block)))
            first = False
        file.write(b"\n]}\n")


def all_events(traces: Sequence[Trace], facts: Mapping[str, Any]) -> Iterator[Event]:
    """Times are microseconds since the first event of any rank."""
    begins = [int(trace.events.start[0]) if len(trace.events) else 0 for trace in traces]
    origins = absolute_origins(traces, begins)
    zero = min((begin + origin for begin, origin in zip(begins, origins, strict=True)), default=0)
    shifts = [origin - zero for origin in origins]
    yield from verdict_events(traces, shifts, facts)
    rows = {(row["rank"], row["step"]): row for row in facts["steps"]}
    for number, (trace, shift) in enumerate(zip(traces, shifts, strict=True)):
        process = VERDICT + 1 + number
        where = trace.device if trace.on_device else "cpu"
        yield from named(process, f"rank {trace.rank}{f', {where}' if where else ''}")
        for name, thread in FOUND.items():
            yield from named(process, name, thread)
        yield from step_events(trace, shift, process, rows)
        yield from phase_events(trace, shift, process)
        yield from activity_events(trace, shift, process)
        yield from recorded_events(trace, shift, process)
        yield from launch_arrows(trace, shift, process)
        yield from memory_events(trace, shift, process)


def named(process: int, name: str, thread: int | None = None) -> list[Event]:
    """The name of a process or of a thread, and its place among the others."""
    of = {"pid": process} if thread is None else {"pid": process, "tid": thread}
    kind, place = ("process", process) if thread is None else ("thread", thread)
    return [
        {"ph": "M", "name": f"{kind}_name", **of, "args": {"name": name}},
        {"ph": "M", "name": f"{kind}_sort_index", **of, "args": {"sort_index": place}},
    ]


def slice_event(name: str, cat: str, process: int, thread: int, start: int, end: int, **args: Any) -> Event:
    """Nanoseconds in, microseconds out."""
    when = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"ph": "X", "name": name, "cat": cat, "pid": process, "tid": thread, **when, "args": args}


# --- what we found ---------------------------------------------------------------------------------------


def verdict_events(traces: Sequence[Trace], shifts: Sequence[int], facts: Mapping[str, Any]) -> Iterator[Event]:
    edges = [
        (step.start + shift, step.end + shift)
        for trace, shift in zip(traces, shifts, strict=True)
        for step in trace.steps
    ]
    if not edges:
        return
    yield from named(VERDICT, "LMWorks")
    yield from named(VERDICT, "verdict", 1)
    said = {key: facts[key] for key in ("evidence", "remedy", "predicted_gain", "also")}
    start, end = min(start for start, _ in edges), max(end for _, end in edges)
    kind = f" ({facts['kind']})" if facts["kind"] else ""
    yield slice_event(f"{facts['verdict']}{kind}", "verdict", VERDICT, 1, start, end, **said)


def step_events(
    trace: Trace, shift: int, process: int, rows: Mapping[tuple[int, int], Mapping[str, Any]]
) -> Iterator[Event]:
    for step in trace.steps:
        known = {key: value for key, value in rows[trace.rank, step.number].items() if key not in ("rank", "step")}
        begin, end = step.start + shift, step.end + shift
        yield slice_event(f"step {step.number}", "step", process, FOUND["steps"], begin, end, **known)


def phase_events(trace: Trace, shift: int, process: int) -> Iterator[Event]:
    """`phase/…` of the thread that has the steps."""
    events = trace.events
    lanes = events.lane[trace.named(STEP) & events.of(Kind.ANNOTATION)]
    for row in np.flatnonzero(events.of(Kind.ANNOTATION) & np.isin(events.lane, lanes)):
        name = trace.names[events.name[row]]
        if name.startswith("phase/"):
            begin, end = int(events.start[row]) + shift, int(events.end[row]) + shift
            yield slice_event(name.removeprefix("phase/"), "phase", process, FOUND["phases"], begin, end)


def activity_events(trace: Trace, shift: int, process: int) -> Iterator[Event]:
    """The parts of the steps: together they are all of each step."""
    activity = Activity(trace)
    parts = {
        "compute": activity.compute,
        "exposed communication": activity.communication - activity.compute,
        "copy": activity.exposed_copies,
    }
    for step in trace.steps:
        cut = {name: spans.within(step.start, step.end) for name, spans in parts.items()}
        cut["idle"] = activity.busy.gaps(step.start, step.end)
        for name, spans in cut.items():
            for begin, end in zip((spans.start + shift).tolist(), (spans.end + shift).tolist(), strict=True):
                yield slice_event(name, "activity", process, FOUND["activity"], begin, end)


# --- what was recorded -----------------------------------------------------------------------------------


def recorded_events(trace: Trace, shift: int, process: int) -> Iterator[Event]:
    events = trace.events
    for lane in np.unique(events.lane).tolist():
        where = trace.lanes[lane]
        yield from named(process, where.label.strip() or where.thread, FIRST_LANE + lane)
    rows = np.flatnonzero(np.isin(events.kind, list(SHOWN)))
    columns = (events.kind, events.name, events.lane, events.start + shift, events.end + shift, events.message)
    for kind, name, lane, start, end, message in zip(*(column[rows].tolist() for column in columns), strict=True):
        args = {}
        if message >= 0:
            sent = trace.messages[message]
            args = {"group": sent.group, "ranks": sent.ranks, "bytes": sent.bytes, "dtype": sent.dtype}
        yield slice_event(trace.names[name], SHOWN[Kind(kind)], process, FIRST_LANE + lane, start, end, **args)


def launch_arrows(trace: Trace, shift: int, process: int) -> Iterator[Event]:
    """From a launch to what it launched."""
    events = trace.events
    rows = np.flatnonzero(events.of(*DEVICE) & (trace.launch >= 0))
    for row, call in zip(rows.tolist(), trace.launch[rows].tolist(), strict=True):
        for end, phase in ((call, {"ph": "s"}), (row, {"ph": "f", "bp": "e"})):
            place = {"pid": process, "tid": FIRST_LANE + int(events.lane[end])}
            when = {"ts": (int(events.start[end]) + shift) / 1e3}
            yield {"name": "launch", "cat": "launch", "id": f"{process}.{row}", **place, **when, **phase}


def memory_events(trace: Trace, shift: int, process: int) -> Iterator[Event]:
    for device in trace_memory(trace):
        name = f"memory of {'the host' if device['device'] < 0 else 'GPU ' + str(device['device'])}"
        for at, held, taken in device["timeline"]:
            values = {"allocated": held, **({"reserved": taken} if taken > 0 else {})}
            yield {"ph": "C", "name": name, "pid": process, "ts": (at * 1e9 + shift) / 1e3, "args": values}
