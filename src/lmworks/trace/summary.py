"""What `lmworks profile trace` says of the traces of a job: `--json` of the command, key by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .breakdown import Activity, Breakdown
from .model import Kind, Trace

PARTS = ("compute", "exposed_comm", "hidden_comm", "copy", "idle")


def summarise(traces: Sequence[Trace]) -> dict[str, Any]:
    """Totals over all steps and ranks; `steps` has them step by step and rank by rank."""
    rows = [
        {"rank": trace.rank, "step": step.number, "seconds": step.seconds, **seconds(parts)}
        for trace in traces
        for step, parts in Activity(trace).of_steps()
    ]
    totals = {f"{part}_s": sum(row[f"{part}_s"] for row in rows) for part in PARTS}
    return {"ranks": [describe(trace) for trace in traces], "steps": rows, **totals}


def seconds(parts: Breakdown) -> dict[str, float]:
    return {f"{part}_s": getattr(parts, part) / 1e9 for part in PARTS}


def describe(trace: Trace) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "file": trace.source,
        "device": trace.device if trace.on_device else "cpu",
        "backend": trace.backend,
        "events": len(trace.events),
        "missing": missing(trace),
    }


def missing(trace: Trace) -> list[str]:
    """What the trace lacks, and so what cannot be said of it."""
    lacks = []
    if not trace.on_device:
        lacks.append("no device events: the host's threads are judged (activities=[CPU, CUDA] records a GPU)")
    if not trace.host_steps:
        lacks.append("no step annotations: the whole trace is one step (profiler.step() or ProfilerStep# mark them)")
    if not trace.shapes:
        lacks.append("no shapes of inputs: no FLOP/s (record_shapes=True)")
    if not trace.events.of(Kind.PYTHON).any():
        lacks.append("no Python calls (with_stack=True)")
    if not len(trace.memory.time):
        lacks.append("no memory events (profile_memory=True)")
    return lacks
