"""Boxes of a step: rows in order, cut to the step, clocks of ranks aligned, thinned without losing busy time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmworks.trace import read_trace
from lmworks.trace.model import Kind
from lmworks.trace.timeline import Timeline, timeline
from traces import Event, kernel, launch, span, write_trace

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_REDUCE = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "BFloat16", "Process Group Name": "dp"}


def step(number: int, begin: float, length: float = 1000) -> list[Event]:
    return [
        span("user_annotation", f"ProfilerStep#{number}", begin, length),
        span("cpu_op", "aten::linear", begin + 10, 50),
        span("cpu_op", "aten::mm", begin + 20, 30),
        launch(begin + 30, number * 10 + 1),
        kernel("gemm", begin + 100, 200, correlation=number * 10 + 1),
        launch(begin + 50, number * 10 + 2),
        kernel(NCCL, begin + 250, 200, stream=20, correlation=number * 10 + 2, **ALL_REDUCE),
    ]


def drawn(tmp_path: Path, *ranks: list[Event], limit: int = 1000) -> Timeline:
    traces = [
        read_trace(write_trace(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2}))
        for rank, events in enumerate(ranks)
    ]
    found = timeline(traces, limit)
    assert found is not None
    return found


def box(found: Timeline, name: str, row: str = "") -> list[tuple[str, int, float, float]]:
    """Row, depth, start and end in µs."""
    boxes = found.boxes
    chosen = [
        (found.rows[boxes.row[i]].label, int(boxes.depth[i]), boxes.start[i] / 1e3, boxes.end[i] / 1e3)
        for i in range(len(boxes))
        if boxes.name[i] == name
    ]
    return [one for one in chosen if one[0].startswith(row)]


def test_the_step_of_median_length_with_threads_collectives_and_streams(tmp_path: Path) -> None:
    events = [*step(1, 0, 1000), *step(2, 1000, 3000), *step(3, 4000, 2000)]
    outer = span("python_function", "train.py(1): main", -500, 9000)
    found = drawn(tmp_path, [outer, *events])
    assert found.step == 3 and found.length == 2_000_000 and found.resolution == 0
    assert [row.label for row in found.rows] == ["1", "collectives, 20", "7"]
    assert box(found, "train.py(1): main") == [("1", 0, 0.0, 2000.0)]  # cut to the step
    assert box(found, "aten::mm") == [("1", 3, 20.0, 50.0)]  # within the program, the step and aten::linear
    assert box(found, "gemm") == [("7", 0, 100.0, 300.0)]
    assert box(found, NCCL) == [("collectives, 20", 0, 250.0, 450.0)]


def test_clocks_of_ranks_are_aligned_by_their_collectives(tmp_path: Path) -> None:
    ahead = step(1, 7_000_000)  # the clock of rank 1 is 7 s ahead
    found = drawn(tmp_path, step(1, 0), ahead)
    assert box(found, NCCL, "rank 0")[0][2:] == box(found, NCCL, "rank 1")[0][2:] == (250.0, 450.0)
    assert found.length == 1_000_000


def test_short_events_become_one_box_and_long_ones_stay(tmp_path: Path) -> None:
    many = [span("cpu_op", "aten::add", 100 + 0.5 * i, 0.4) for i in range(1600)]
    found = drawn(tmp_path, [span("user_annotation", "ProfilerStep#1", 0, 1000), *many], limit=200)
    boxes, ops = found.boxes, found.boxes.kind == Kind.OP
    assert len(boxes) <= 200 and found.resolution > 400
    assert box(found, "ProfilerStep#1") == [("1", 0, 0.0, 1000.0)]
    assert int(boxes.events[ops].sum()) == 1600 and int(boxes.start[ops].min()) == 100_000
    assert int((boxes.end - boxes.start)[ops].sum()) == pytest.approx(800_000, rel=0.02)
    assert np.all(boxes.start[ops][1:] >= boxes.end[ops][:-1])  # none lies over another


def test_an_empty_trace_has_none(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.json", [span("cpu_op", "aten::add", 0, 1, thread=1)]))
    assert timeline([trace], 10) is not None and timeline([], 10) is None
