"""Further exercises, `src/profiling/`: worked out by hand, then traces with a planted bottleneck."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ...diagnose.causes import causes, figures_of
from ...trace import Trace, read_traces
from ...trace.intervals import Spans
from ...trace.summary import summarise
from ..checking.expect import Mismatch, expect_equal
from ..planted_traces import BOTTLENECKS, WORKSPACE_SEED, Document, planted_jobs, write_job

FRESH_SEED = 1

UNIONS: tuple[tuple[str, list[tuple[float, float]], list[tuple[float, float]]], ...] = (
    ("one interval", [(1.0, 2.0)], [(1.0, 2.0)]),
    ("none", [], []),
    ("two apart", [(1.0, 2.0), (3.0, 4.0)], [(1.0, 2.0), (3.0, 4.0)]),
    ("two that overlap", [(1.0, 3.0), (2.0, 4.0)], [(1.0, 4.0)]),
    ("in any order", [(5.0, 6.0), (1.0, 3.0), (2.0, 4.0)], [(1.0, 4.0), (5.0, 6.0)]),
    ("one within another", [(1.0, 6.0), (2.0, 3.0)], [(1.0, 6.0)]),
    ("one within another, and a third over its end", [(1.0, 6.0), (2.0, 3.0), (5.0, 7.0)], [(1.0, 7.0)]),
    ("the last two of three overlap", [(1.0, 2.0), (3.0, 5.0), (4.0, 6.0)], [(1.0, 2.0), (3.0, 6.0)]),
    ("two that touch", [(1.0, 2.0), (2.0, 3.0)], [(1.0, 3.0)]),
    ("one of length 0", [(2.0, 2.0)], []),
)
COVERED: tuple[tuple[str, list[tuple[float, float]], float], ...] = (
    ("within", [(3.0, 5.0)], 2.0),
    ("the same twice", [(3.0, 5.0), (3.0, 5.0)], 2.0),
    ("over the start", [(0.0, 3.0)], 1.0),
    ("over the end", [(7.0, 12.0)], 1.0),
    ("over both", [(0.0, 12.0)], 6.0),
    ("before and after", [(0.0, 1.0), (9.0, 12.0)], 0.0),
    ("none", [], 0.0),
)  # between 2 and 8
STEPS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("no event", "", {"busy": 0.0, "compute": 0.0, "exposed": 0.0, "idle": 10.0}),
    ("a kernel", "compute 2-6", {"busy": 4.0, "compute": 4.0, "exposed": 0.0, "idle": 6.0}),
    ("kernels of two streams", "compute 2-6, compute 4-8", {"busy": 6.0, "compute": 6.0, "exposed": 0.0, "idle": 4.0}),
    ("a collective alone", "communication 2-6", {"busy": 4.0, "compute": 0.0, "exposed": 4.0, "idle": 6.0}),
    ("a collective under a kernel", "compute 2-6, communication 3-5",
     {"busy": 4.0, "compute": 4.0, "exposed": 0.0, "idle": 6.0}),
    ("a collective that outlasts a kernel", "compute 2-6, communication 5-9",
     {"busy": 7.0, "compute": 4.0, "exposed": 3.0, "idle": 3.0}),
    ("a collective around a kernel", "communication 1-9, compute 4-5",
     {"busy": 8.0, "compute": 1.0, "exposed": 7.0, "idle": 2.0}),
    ("two collectives at once", "communication 1-5, communication 2-6",
     {"busy": 5.0, "compute": 0.0, "exposed": 5.0, "idle": 5.0}),
    ("a copy", "compute 2-4, copy 3-6", {"busy": 4.0, "compute": 2.0, "exposed": 0.0, "idle": 6.0}),
    ("a collective under a copy alone", "copy 2-6, communication 3-5",
     {"busy": 4.0, "compute": 0.0, "exposed": 2.0, "idle": 6.0}),
    ("what the host does", "compute 2-6, call 0-9, op 0-9, annotation 0-10",
     {"busy": 4.0, "compute": 4.0, "exposed": 0.0, "idle": 6.0}),
    ("kernels of the steps before and after", "compute -3-1, compute 9-12",
     {"busy": 2.0, "compute": 2.0, "exposed": 0.0, "idle": 8.0}),
)  # fmt: skip
IDLE_CAUSES = ("input_bound", "allocator_bound", "sync_bound", "host_bound")
IDLE: tuple[tuple[str, str, tuple[float, float, float, float]], ...] = (
    ("never idle", "compute 0-10", (0.0, 0.0, 0.0, 0.0)),
    ("a gap", "compute 0-4, compute 6-10", (0.0, 0.0, 0.0, 2.0)),
    ("before the first kernel and after the last", "compute 1-8", (0.0, 0.0, 0.0, 3.0)),
    ("a batch is loaded in the gap", "compute 0-4, enumerate(DataLoader)#__next__ 4-6, compute 6-10",
     (2.0, 0.0, 0.0, 0.0)),
    ("a batch is loaded in a part of the gap", "compute 0-4, enumerate(DataLoader)#__next__ 4-5, compute 6-10",
     (1.0, 0.0, 0.0, 1.0)),
    ("a batch is loaded while the GPU works", "compute 0-4, enumerate(DataLoader)#__next__ 1-3, compute 6-10",
     (0.0, 0.0, 0.0, 2.0)),
    ("cudaFree begins while the GPU works", "compute 0-4, cudaFree 2-5, cudaMalloc 5-6, compute 7-10",
     (0.0, 2.0, 0.0, 1.0)),
    ("a synchronisation ends in the gap", "compute 0-4, cudaStreamSynchronize 1-5, compute 7-10",
     (0.0, 0.0, 3.0, 0.0)),
    ("one ends before the gap", "compute 0-4, cudaStreamSynchronize 1-3, compute 7-10", (0.0, 0.0, 0.0, 3.0)),
    ("one ends in one gap of two", "compute 0-2, cudaEventSynchronize 1-3, compute 4-6, compute 7-10",
     (0.0, 0.0, 2.0, 1.0)),
    ("a batch is loaded after a synchronisation",
     "compute 0-4, cudaDeviceSynchronize 1-4.5, enumerate(DataLoader)#__next__ 5-6, compute 7-10",
     (1.0, 0.0, 2.0, 0.0)),
    ("a collective is no gap", "compute 0-4, communication 4-8, cudaStreamSynchronize 1-8, compute 9-10",
     (0.0, 0.0, 1.0, 0.0)),
)  # fmt: skip
NAMES: tuple[tuple[str, str, str, str], ...] = (
    ("compute all the time", "compute 0-10", "compute 0-10", "healthy"),
    ("idle for half of the time", "compute 0-5", "compute 0-5", "host_bound"),
    ("idle for a twentieth of the time", "compute 0-9.5", "compute 0-9.5", "healthy"),
    ("a collective under compute", "compute 0-10, communication 1-9", "compute 0-10, communication 1-9", "healthy"),
    ("a collective after compute", "compute 0-6, communication 6-10", "compute 0-6, communication 6-10", "comm_bound"),
    ("rank 1 begins the collective late, while rank 0 computes", "compute 0-6, communication 1-10",
     "compute 0-9, communication 9-10", "straggler"),
    ("rank 1 begins the collective late", "compute 0-4, communication 4-10", "compute 0-9, communication 9-10",
     "straggler"),
    ("rank 0 begins the collective late", "compute 0-9, communication 9-10", "compute 0-4, communication 4-10",
     "straggler"),
    ("rank 1 begins it late, and rank 0 computes until then", "compute 0-10, communication 0-5",
     "compute 0-10, communication 4-5", "healthy"),
    ("rank 1 begins it a little late", "compute 0-5, communication 5-10", "compute 0-6, communication 6-10",
     "comm_bound"),
    ("late for the second collective", "compute 0-2, communication 2-3, compute 3-4, communication 4-10",
     "compute 0-2, communication 2-3, compute 3-9, communication 9-10", "straggler"),
    ("element-wise kernels for half of the time", "elementwise 0-5, compute 5-10", "elementwise 0-5, compute 5-10",
     "memory_bound"),
    ("two of three kernels are element-wise, and short", "elementwise 0-0.1, elementwise 0.1-0.2, compute 0.2-10",
     "elementwise 0-0.1, elementwise 0.1-0.2, compute 0.2-10", "healthy"),
    ("two causes", "compute 0-4, enumerate(DataLoader)#__next__ 4-7, compute 7-8, compute 9.5-10",
     "compute 0-4, enumerate(DataLoader)#__next__ 4-7, compute 7-8, compute 9.5-10", "input_bound"),
)  # fmt: skip


def events_of(module: ModuleType, text: str) -> list[Any]:
    """From `kind start-end, …`, or with a name that says the kind."""
    found = []
    for one in filter(None, text.split(", ")):
        what, _, span = one.rpartition(" ")
        dash = span.index("-", 1)  # a start may be negative
        start, end = float(span[:dash]), float(span[dash + 1 :])
        kinds = {"enumerate(": "annotation", "cuda": "call", "elementwise": "compute"}
        kind = next((kind for begin, kind in kinds.items() if what.startswith(begin)), what)
        found.append(module.Event(kind, start, end - start, what))
    return found


def expect_seconds(case: str, got: Any, expected: dict[str, float], remark: str, **inputs: Any) -> None:
    if isinstance(got, dict):
        got = {part: round(float(seconds), 9) for part, seconds in got.items()}
    expect_equal(case, got, expected, remark=remark, **inputs)


def exposed_seconds(module: ModuleType) -> None:
    for case, intervals, whole in UNIONS:
        given = list(intervals)
        got = module.union(given)
        got = [tuple(one) for one in got] if isinstance(got, list) else got
        expect_equal(f"union: {case}", got, whole, remark="disjoint, in order", intervals=intervals)
        expect_equal(f"union: {case}: `intervals` is left as it was", given, intervals)
    draw = random.Random(0)
    starts = [draw.randrange(2000) for _ in range(400)]
    many = [(float(start), float(start + draw.randrange(9))) for start in starts]
    spans = Spans.union(*np.array(many).T.astype(np.int64))
    whole = [(float(start), float(end)) for start, end in zip(spans.start, spans.end, strict=True)]
    expect_equal("union: 400 intervals", [tuple(one) for one in module.union(many)], whole)
    for case, intervals, seconds in COVERED:
        got = float(module.covered(list(intervals), 2.0, 8.0))
        expect_equal(f"covered between 2 and 8: {case}", got, seconds, intervals=intervals)
    for case, text, parts in STEPS:
        got = module.step_seconds(events_of(module, text), 0.0, 10.0)
        remark = "the time of a set of events is the length of their union"
        expect_seconds(f"step from 0 to 10: {case}", got, parts, remark, events=text)


def bottleneck(module: ModuleType) -> None:
    for case, text, seconds in IDLE:
        rank = module.Rank(events_of(module, text), 0.0, 10.0)
        expected = dict(zip(IDLE_CAUSES, seconds, strict=True))
        remark = "each gap of the GPU by what the host did meanwhile"
        expect_seconds(f"idle from 0 to 10: {case}", module.idle_seconds(rank), expected, remark, events=text)
    for case, first, second, name in NAMES:
        ranks = [module.Rank(events_of(module, text), 0.0, 10.0) for text in (first, second)]
        got, remark = module.name_bottleneck(ranks), "what takes most of the time of both ranks, if it is a tenth of it"
        inputs = {"rank 0": first, "rank 1": second}
        expect_equal(f"two ranks from 0 to 10: {case}", got, name, remark=remark, **inputs)
    for seed in (WORKSPACE_SEED, FRESH_SEED):
        for letter, planted, job in planted_jobs(seed):
            got = module.name_bottleneck([module.read_rank(document) for document in job])
            if got == planted:
                continue
            case, remark = (
                f"traces/{letter}",
                f"look at traces/{letter}, in ui.perfetto.dev or by `lmworks profile trace`",
            )
            if seed == FRESH_SEED:
                case, remark = f"fresh traces, job {letter}", "as those in traces/, with other durations"
            if got not in BOTTLENECKS:
                remark = f"the name is one of {', '.join(BOTTLENECKS)}"
            raise Mismatch(case, planted, got, shares(as_traces(job)), remark)


def as_traces(job: Sequence[Document]) -> list[Trace]:
    """As `lmworks profile trace` reads them."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        return read_traces(write_job(Path(folder, "job"), job))


def shares(traces: Sequence[Trace]) -> dict[str, str]:
    """Parts of the steps' time, as LMWorks finds them."""
    figures = figures_of(traces, summarise(traces))
    found = sorted((one for one in causes(figures) if one.verdict in BOTTLENECKS), key=lambda one: -one.share)
    idle = 1 - figures.compute - figures.exposed
    return {
        "shares": ", ".join(f"{one.verdict} {one.share:.0%}" for one in found),
        "GPU": f"compute {figures.compute:.0%}, exposed comm {figures.exposed:.0%}, idle or copying {idle:.0%}",
        "kernels": f"{figures.launches:.0f} a step, {figures.short_kernels:.0%} of them under 10 µs",
    }


CHECKS = {"exposed_seconds": exposed_seconds, "bottleneck": bottleneck}
