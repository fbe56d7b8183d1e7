"""What `lmworks profile trace` says of the traces of a job: its `--json`, key by key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..spec.errors import DataError
from .breakdown import Activity, Breakdown
from .collectives import overlap
from .critical_path import critical_path
from .fusion import fusible
from .hotspots import Hotspot, hotspots, launches, python_time
from .idle import CAUSES, idle_causes, stream_idle
from .memory import read_snapshot, snapshot_path, trace_memory
from .model import Kind, Trace
from .nesting import Nesting
from .own_runs import recorded_spec
from .pipeline import pipeline_facts
from .skew import skew

PARTS = ("compute", "exposed_comm", "hidden_comm", "copy", "idle")
TOP = 20  # ops


def summarise(traces: Sequence[Trace]) -> dict[str, Any]:
    """Totals over all steps and ranks; `steps` has them step by step and rank by rank."""
    activities = [Activity(trace) for trace in traces]
    nestings = [Nesting.of(trace) for trace in traces]
    rows = [row for activity in activities for row in step_rows(activity)]
    skewed = skew(activities)
    snapshots = [allocator_snapshot(trace) for trace in traces]
    return {
        "ranks": [describe(trace, lacks) for trace, (_, lacks) in zip(traces, snapshots, strict=True)],
        "steps": rows,
        "step_s": sum(row["seconds"] for row in rows),
        **{f"{part}_s": sum(row[f"{part}_s"] for row in rows) for part in PARTS},
        "idle_by_cause": {cause: sum(row["idle_by_cause"][cause] for row in rows) for cause in CAUSES},
        "overlap": all_overlap([overlap(activity) for activity in activities]),
        "ops": all_ops([hotspots(*pair) for pair in zip(traces, nestings, strict=True)]),
        "launches": [{"rank": trace.rank, **launches(trace)} for trace in traces],
        "host": [{"rank": trace.rank, "calls": python_time(trace)} for trace in traces],
        "stream_idle": [{"rank": trace.rank, "streams": in_seconds(stream_idle(trace))} for trace in traces],
        "skew": skewed.to_dict() if skewed else None,
        "critical_path": [{"rank": trace.rank, **path} for trace in traces if (path := critical_path(trace))],
        "pipeline": pipeline_facts(traces, recorded_spec(traces)),
        "fusible": fusible(traces[0]) if traces else [],
        "memory": [
            {"rank": trace.rank, "devices": trace_memory(trace), "snapshot": snapshot}
            for trace, (snapshot, _) in zip(traces, snapshots, strict=True)
        ],
    }


def allocator_snapshot(trace: Trace) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Where the recording left one beside the trace; and why it cannot be read."""
    path = snapshot_path(trace.source)
    try:
        return [one.to_dict() for one in read_snapshot(path)] if path.is_file() else None, []
    except DataError as error:
        return None, [str(error)]


def step_rows(activity: Activity) -> list[dict[str, Any]]:
    causes = idle_causes(activity)
    return [
        {
            "rank": activity.trace.rank,
            "step": step.number,
            "seconds": step.seconds,
            **seconds(parts),
            "idle_by_cause": {cause: length / 1e9 for cause, length in causes.of(place).items()},
        }
        for place, (step, parts) in enumerate(activity.of_steps)
    ]


def seconds(parts: Breakdown) -> dict[str, float]:
    return {f"{part}_s": getattr(parts, part) / 1e9 for part in PARTS}


def in_seconds(streams: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    return {stream: {cause: length / 1e9 for cause, length in one.items()} for stream, one in streams.items()}


def all_overlap(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collectives of all ranks by name and group, and the overlap in per cent of their whole time."""
    found: dict[tuple[str, str, int | None], dict[str, Any]] = {}
    for rank in ranks:
        for one in rank["collectives"]:
            key = (one["collective"], one["group"], one["ranks"])
            if key not in found:
                found[key] = dict(one)
                continue
            whole = found[key]
            whole["bytes"] = None if None in (whole["bytes"], one["bytes"]) else whole["bytes"] + one["bytes"]
            for part in ("calls", "seconds", "hidden_s", "exposed_s"):
                whole[part] += one[part]
            whole["percent"] = 100 * whole["hidden_s"] / whole["seconds"] if whole["seconds"] else None
    shares = [rank["percent"] for rank in ranks if rank["percent"] is not None]
    return {
        "percent": sum(shares) / len(shares) if shares else None,
        "collectives": sorted(found.values(), key=lambda one: -one["seconds"]),
    }


def all_ops(ranks: Sequence[Sequence[Hotspot]]) -> list[dict[str, Any]]:
    """The longest ops of all ranks together, with their share of all."""
    by_name: defaultdict[str, list[Hotspot]] = defaultdict(list)
    for rank in ranks:
        for one in rank:
            by_name[one.op].append(one)
    whole = sum(one.seconds for rank in ranks for one in rank)
    merged = [
        Hotspot(
            op,
            sum(one.calls for one in same),
            sum(one.kernels for one in same),
            sum(one.seconds for one in same),
            sum(one.flops or 0.0 for one in same) or None,
            sum(one.bytes or 0.0 for one in same) or None,
            sum(one.floor_s or 0.0 for one in same) or None,
        )
        for op, same in by_name.items()
    ]
    merged.sort(key=lambda one: -one.seconds)
    return [{**one.to_dict(), "share": one.seconds / whole if whole else 0.0} for one in merged[:TOP]]


def describe(trace: Trace, lacks: Sequence[str]) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "file": trace.source,
        "device": trace.device or "unnamed device" if trace.on_device else "cpu",
        "backend": trace.backend,
        "events": len(trace.events),
        "missing": [*missing(trace), *lacks],
    }


def missing(trace: Trace) -> list[str]:
    """What the trace lacks, and so what cannot be said of it."""
    lacks = []
    if trace.skipped:
        lacks.append(f"{trace.skipped:,} events without a time or a duration are left out")
    if not trace.on_device:
        lacks.append("no device events: the host's threads are judged (activities=[CPU, CUDA] records a GPU)")
    if not trace.host_steps:
        lacks.append("no step annotations: the whole trace is one step (profiler.step() marks steps)")
    if not trace.shapes:
        lacks.append("no shapes of inputs: no FLOP/s (record_shapes=True)")
    if not trace.events.of(Kind.PYTHON).any():
        lacks.append("no Python calls (with_stack=True)")
    if not len(trace.memory.time):
        lacks.append("no memory events (profile_memory=True)")
    return lacks
