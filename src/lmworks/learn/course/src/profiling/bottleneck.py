"""Where the time of a step went, and what bounds it: read from traces of PyTorch's profiler.

python src/profiling/bottleneck.py             the jobs in traces/
python src/profiling/bottleneck.py FOLDER      a job of your own: rank0.json, rank1.json …
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does
from lmworks.learn.planted_traces import write_traces

TRACES = Path(__file__).parents[2] / "traces"
BOTTLENECKS = {  # by the names of `lmworks diagnose`
    "input_bound": "the GPU waits for the next batch",
    "host_bound": "kernels are shorter than their launches: the GPU waits for the next launch",
    "sync_bound": "the host waits for the GPU (`.item()`), and so has launched nothing ahead",
    "allocator_bound": "the host gives memory back and asks for it again (cudaFree, cudaMalloc)",
    "comm_bound": "collectives that no compute covers",
    "straggler": "one rank is late, and the others wait for it in their collectives",
    "memory_bound": "element-wise kernels, which move bytes and compute little",
    "healthy": "none of these takes a tenth of the time",
}
GPU = ("compute", "communication", "copy")
KINDS = {
    "kernel": "compute",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "cuda_runtime": "call",
    "cpu_op": "op",
    "user_annotation": "annotation",
}

Interval = tuple[float, float]  # start and end, in seconds


@dataclass(frozen=True)
class Event:
    """Of the GPU or of the host."""

    kind: str  # of the GPU: compute, communication, copy; of the host: call (of CUDA), op, annotation
    start: float  # seconds
    duration: float
    name: str = ""

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Rank:
    """What the profiler recorded of a rank, from the start of its first step to the end of its last one."""

    events: list[Event]  # by their start
    start: float
    end: float

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    def named(self, *words: str) -> list[Interval]:
        """When an event ran that has one of the words in its name."""
        return [(event.start, event.end) for event in self.events if any(word in event.name for word in words)]


def read_rank(trace: dict[str, Any]) -> Rank:
    events = []
    for one in trace["traceEvents"]:
        if one["ph"] == "X" and one.get("cat") in KINDS:
            kind = "communication" if one["name"].startswith("nccl") else KINDS[one["cat"]]
            events.append(Event(kind, one["ts"] / 1e6, one["dur"] / 1e6, one["name"]))
    events.sort(key=lambda event: event.start)
    steps = [event for event in events if event.name.startswith("ProfilerStep#")]
    if not steps:
        raise ValueError("the trace has no steps: call profiler.step() after each one")
    return Rank(events, min(step.start for step in steps), max(step.end for step in steps))


def read_job(folder: Path) -> list[Rank]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.json")
    return [read_rank(json.loads(file.read_text())) for file in files]


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order. Those that touch are one; those of length 0 are left out."""
    # exercise exposed_seconds.union(intervals)
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found
    # end exposed_seconds.union


def covered(intervals: list[Interval], start: float, end: float) -> float:
    """Seconds between start and end in which at least one of the intervals runs."""
    # exercise exposed_seconds.covered(intervals, start, end)
    return sum(max(min(until, end) - max(since, start), 0.0) for since, until in union(intervals))
    # end exposed_seconds.covered


def step_seconds(events: list[Event], start: float, end: float) -> dict[str, float]:
    """Seconds of the GPU between start and end, by these names:

    `busy`: any of the kinds in GPU; `compute`; `exposed`: communication that no compute covers; `idle`: nothing.
    """

    # exercise exposed_seconds.step(events, start, end)
    def seconds(*kinds: str) -> float:
        return covered([(event.start, event.end) for event in events if event.kind in kinds], start, end)

    busy, compute = seconds(*GPU), seconds("compute")
    exposed = seconds("compute", "communication") - compute
    return {"busy": busy, "compute": compute, "exposed": exposed, "idle": end - start - busy}
    # end exposed_seconds.step


def gaps(rank: Rank) -> list[Interval]:
    """When its GPU did nothing."""
    busy = union([(event.start, event.end) for event in rank.of(*GPU)])
    edges = [rank.start, *(edge for interval in busy for edge in interval), rank.end]
    return [(since, until) for since, until in zip(edges[::2], edges[1::2], strict=True) if since < until]


def idle_seconds(rank: Rank) -> dict[str, float]:
    """Idle time of the GPU by what the host did, gap by gap.

    `input_bound` while it was in a DataLoader, `allocator_bound` while it was in cudaMalloc or cudaFree. The rest of a
    gap is `sync_bound` if a call with Synchronize in its name ended within the gap, else `host_bound`.
    """
    # exercise bottleneck.idle(rank)
    loads, allocations = rank.named("DataLoader"), rank.named("cudaMalloc", "cudaFree")
    waits = rank.named("Synchronize")
    found = dict.fromkeys(("input_bound", "allocator_bound", "sync_bound", "host_bound"), 0.0)
    for start, end in gaps(rank):
        loading, allocating = covered(loads, start, end), covered(allocations, start, end)
        synced = any(start <= returned <= end for _, returned in waits)
        found["input_bound"] += loading
        found["allocator_bound"] += allocating
        found["sync_bound" if synced else "host_bound"] += end - start - loading - allocating
    return found
    # end bottleneck.idle


def name_bottleneck(ranks: list[Rank]) -> str:
    """One of BOTTLENECKS: what takes most of the time of all ranks together; `healthy` where nothing takes a tenth.

    Idle time counts by its causes, and `memory_bound` is the time of kernels with elementwise in their names. The n-th
    collective is the same on all ranks, which share a clock: until the last rank has begun it, the others wait. What no
    compute covers of these waits is `straggler`; `comm_bound` is exposed communication less that.
    """
    # exercise bottleneck.name(ranks)
    found: Counter[str] = Counter()
    for rank in ranks:
        found.update(idle_seconds(rank))
        found["comm_bound"] += step_seconds(rank.events, rank.start, rank.end)["exposed"]
        found["memory_bound"] += sum(one.duration for one in rank.of("compute") if "elementwise" in one.name)
    for calls in zip(*(rank.of("communication") for rank in ranks), strict=True):
        last = max(call.start for call in calls)
        for rank, call in zip(ranks, calls, strict=True):
            computing = [(one.start, one.end) for one in rank.of("compute")]
            waited = last - call.start - covered(computing, call.start, last)
            found["straggler"] += waited
            found["comm_bound"] -= waited
    name, most = found.most_common(1)[0]
    return name if most >= 0.1 * sum(rank.end - rank.start for rank in ranks) else "healthy"
    # end bottleneck.name


def main() -> None:
    if not TRACES.exists():
        write_traces(TRACES)
    for folder in map(Path, sys.argv[1:] or sorted(TRACES.iterdir())):
        ranks = read_job(folder)
        times = Counter[str]()
        for rank in ranks:
            times.update(step_seconds(rank.events, rank.start, rank.end))
        whole = times["busy"] + times["idle"]
        shares = ", ".join(f"{part} {times[part] / whole:.0%}" for part in ("compute", "exposed", "idle"))
        name = name_bottleneck(ranks)
        print(f"{folder.name}: {shares}: {name}, {BOTTLENECKS[name]}")


if __name__ == "__main__":
    main()
