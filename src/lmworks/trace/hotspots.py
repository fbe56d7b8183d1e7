"""Where the time of the steps went, by op: device time of what each op launched, or the op's own time on a CPU."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from .breakdown import C10D, compute_lanes
from .model import DEVICE, Ints, Kind, Mask, Trace
from .nesting import Nesting
from .op_work import op_bytes, op_floor, op_flops, parse_shapes, peaks_of

SHORT_KERNEL = 10_000  # ns


@dataclass(frozen=True)
class Hotspot:
    op: str
    calls: int
    kernels: int
    seconds: float
    flops: float | None  # None: not known from its shapes
    bytes: float | None  # read and written, at least
    floor_s: float | None  # the least time of all calls; None: neither that nor the device's peaks are known

    def to_dict(self) -> dict[str, Any]:
        rate = {
            "flops_per_s": self.flops / self.seconds if self.flops and self.seconds else None,
            "bytes_per_s": self.bytes / self.seconds if self.bytes and self.seconds else None,
            "floor_s": self.floor_s,
        }
        return {"op": self.op, "calls": self.calls, "kernels": self.kernels, "seconds": self.seconds, **rate}


@dataclass
class Work:
    """Sums over calls; None: of no call known."""

    flops: float | None = None
    bytes: float | None = None
    floor: float | None = None

    def add(self, calls: int, *amounts: float | None) -> None:
        for name, amount in zip(("flops", "bytes", "floor"), amounts, strict=True):
            if amount is not None:
                setattr(self, name, (getattr(self, name) or 0.0) + calls * amount)


def in_steps(trace: Trace, start: Ints) -> Mask:
    """Which times lie within the steps."""
    edges = np.array([(step.start, step.end) for step in trace.steps], np.int64).reshape(-1, 2)
    if not len(edges):
        return np.zeros(len(start), np.bool_)
    place = np.searchsorted(edges[:, 0], start, side="right") - 1
    return (place >= 0) & (start < edges[np.maximum(place, 0), 1])


def hotspots(trace: Trace, nesting: Nesting) -> list[Hotspot]:
    """By device time of the innermost op that launched it (by self time where there is no device), longest first.

    What no op launched keeps the name of its kernel.
    """
    events = trace.events
    if trace.on_device:
        rows = np.flatnonzero(events.of(*DEVICE) & in_steps(trace, events.start))
        call = trace.launch[rows]
        op = np.where(call >= 0, nesting.nearest(trace, Kind.OP)[call], -1)
        op = np.where(op >= 0, op, rows)
        time = events.duration[rows]
    else:
        lanes = np.isin(events.lane, compute_lanes(trace)) & events.of(Kind.OP) & ~trace.named(C10D)
        rows = np.flatnonzero((lanes | events.of(Kind.COLLECTIVE)) & in_steps(trace, events.start))
        op, time = rows, nesting.self_time[rows]
    names = events.name[op]
    seconds = np.bincount(names, weights=time, minlength=len(trace.names)) / 1e9
    kernels = np.bincount(names, minlength=len(trace.names))
    calls = np.bincount(events.name[np.unique(op)], minlength=len(trace.names))
    work = work_of(trace, np.unique(op))
    return [
        Hotspot(
            trace.names[name],
            int(calls[name]),
            int(kernels[name]) if trace.on_device else 0,
            float(seconds[name]),
            work[name].flops if name in work else None,
            work[name].bytes if name in work else None,
            work[name].floor if name in work else None,
        )
        for name in np.argsort(-seconds, kind="stable").tolist()
        if kernels[name]
    ]


def launches(trace: Trace) -> dict[str, float]:
    """Kernels launched a step (or ops called, on a CPU), and the share of those under 10 µs."""
    events = trace.events
    kinds = events.of(Kind.KERNEL, Kind.COLLECTIVE) if trace.on_device else events.of(Kind.OP)
    chosen = kinds & in_steps(trace, events.start)
    count, steps = int(chosen.sum()), max(len(trace.steps), 1)
    under = int((chosen & (events.duration < SHORT_KERNEL)).sum())
    return {"per_step": count / steps, "share_under_10us": under / count if count else 0.0}


def python_time(trace: Trace, top: int = 20) -> list[dict[str, Any]]:
    """Own time of Python calls on the host, longest first; of annotations where no stacks were recorded."""
    events = trace.events
    kind = Kind.PYTHON if np.any(events.of(Kind.PYTHON)) else Kind.ANNOTATION
    chosen = events.of(kind) & in_steps(trace, events.start)
    own = Nesting.of(trace, (kind,)).self_time if kind == Kind.PYTHON else Nesting.of(trace).self_time
    names = events.name[chosen]
    seconds = np.bincount(names, weights=own[chosen], minlength=len(trace.names)) / 1e9
    calls = np.bincount(names, minlength=len(trace.names))
    order = [name for name in np.argsort(-seconds, kind="stable")[:top] if calls[name]]
    return [{"call": trace.names[n], "calls": int(calls[n]), "seconds": float(seconds[n])} for n in order]


def work_of(trace: Trace, ops: Ints) -> dict[int, Work]:
    """Name → FLOPs, bytes and floor of all calls whose shapes were recorded."""
    events, peaks = trace.events, peaks_of(trace)
    ops = ops[events.shapes[ops] >= 0]
    pairs, counts = np.unique(np.stack((events.name[ops], events.shapes[ops])), axis=1, return_counts=True)
    found: defaultdict[int, Work] = defaultdict(Work)
    for name, shape, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
        dims, types = parse_shapes(trace.shapes[shape])
        floor = op_floor(trace.names[name], dims, types, peaks) if peaks else None
        found[name].add(count, op_flops(trace.names[name], dims), op_bytes(trace.names[name], dims, types), floor)
    return found


def short_name(name: str, longest: int = 60) -> str:
    """A kernel's name without its template and call arguments."""
    depth, kept = 0, []
    for letter in name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("->", ""):
        depth += letter in "<("
        if not depth:
            kept.append(letter)
        depth -= letter in ">)" and depth > 0
    text = "".join(kept).strip() or name
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
