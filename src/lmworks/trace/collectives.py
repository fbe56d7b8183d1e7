"""Communication by collective and process group: bytes, time, and how much of it compute hides."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .breakdown import Activity
from .hotspots import in_steps
from .model import Kind, Message, Trace
from .op_work import input_bytes, parse_shapes

NCCL_KERNEL = re.compile(r"(?:nccl|rccl)(?:Dev)?Kernel_?(\w+?)(?:_|\b)", re.IGNORECASE)
P2P = ("send", "recv", "isend", "irecv")
UNKNOWN = Message("", "", None, None)


def message_of(trace: Trace, row: int) -> Message:
    """As recorded with the event, or as its name and its shapes say."""
    events = trace.events
    if events.message[row] >= 0:
        return trace.messages[events.message[row]]
    name = trace.names[events.name[row]]
    if name.startswith(("gloo:", "mpi:")):
        size = None
        if events.shapes[row] >= 0:
            size = input_bytes(*parse_shapes(trace.shapes[events.shapes[row]])) or None
        return Message(name.partition(":")[2], "", trace.world, size)
    match = NCCL_KERNEL.search(name)
    return Message(match[1].lower() if match else name[:40], "", trace.world, None)


def overlap(activity: Activity) -> dict[str, Any]:
    """In per cent of the time that any collective ran, as HTA has it, and of each kind of collective."""
    trace, events = activity.trace, activity.trace.events
    rows = np.flatnonzero(events.of(Kind.COLLECTIVE) & in_steps(trace, events.start))
    hidden = activity.compute.covered(events.start[rows], events.end[rows])
    kinds: dict[tuple[str, str, int | None], dict[str, Any]] = {}
    for row, under in zip(rows, hidden, strict=True):
        message = message_of(trace, int(row))
        key = (message.name, message.group, message.ranks)
        one = kinds.setdefault(key, {"calls": 0, "bytes": 0, "seconds": 0.0, "hidden_s": 0.0})
        one["calls"] += 1
        one["bytes"] = None if message.bytes is None or one["bytes"] is None else one["bytes"] + message.bytes
        one["seconds"] += int(events.end[row] - events.start[row]) / 1e9
        one["hidden_s"] += int(under) / 1e9
    found = [
        {
            "collective": name,
            "group": group,
            "ranks": ranks,
            **one,
            "exposed_s": one["seconds"] - one["hidden_s"],
            "percent": 100 * one["hidden_s"] / one["seconds"] if one["seconds"] else None,
        }
        for (name, group, ranks), one in kinds.items()
    ]
    parts = [parts for _, parts in activity.of_steps]
    inside, whole = sum(p.hidden_comm for p in parts), sum(p.hidden_comm + p.exposed_comm for p in parts)
    return {
        "percent": 100 * inside / whole if whole else None,
        "collectives": sorted(found, key=lambda one: -one["seconds"]),
    }
