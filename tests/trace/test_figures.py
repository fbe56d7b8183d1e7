"""Figures of traces whose answer can be worked out by hand."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lmworks.trace import Kind, Trace, read_trace
from lmworks.trace.breakdown import Activity
from lmworks.trace.collectives import message_of, overlap
from lmworks.trace.critical_path import critical_path
from lmworks.trace.elementwise import unfused_share
from lmworks.trace.fusion import fusible
from lmworks.trace.hotspots import hotspots, launches, python_time, short_name
from lmworks.trace.idle import CAUSES, idle_causes
from lmworks.trace.nesting import Nesting
from lmworks.trace.skew import skew
from lmworks.trace.summary import summarise
from lmworks.trace.work_classes import exposed_copy_in
from traces import Event, kernel, launch, span, write_trace

DATA = Path(__file__).parent / "data"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def read(tmp_path: Path, events: list[Event], name: str = "t.json", **keys: object) -> Trace:
    return read_trace(write_trace(tmp_path / name, events, **keys))


def gpu_step() -> list[Event]:
    """A step of 1,000 µs. Device: compute 100-300, all-reduce 250-450, copy 440-460, compute 600-700 and 720-900.

    The gap 0-100 is the input's until 80, then the host's; 460-600 follows a synchronisation; 700-720 is between two
    kernels that were both launched in time; 900-1000 is at the end of the step, when nothing more is launched.
    """
    shapes = {"Input Dims": [[128, 64], [64, 32]], "Input type": ["float", "float"]}
    message = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "BFloat16", "Group size": 8}
    return [
        span("user_annotation", "ProfilerStep#7", 0, 1000),
        span("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 80),
        span("cpu_op", "aten::linear", 85, 30),
        span("cpu_op", "aten::mm", 88, 20, **shapes),
        launch(90, 1),
        kernel("gemm", 100, 200, correlation=1),
        span("cpu_op", "record_param_comms", 120, 10),
        launch(122, 2),
        kernel(NCCL, 250, 200, stream=20, correlation=2, **message, **{"Process Group Name": "dp"}),
        span("cpu_op", "aten::copy_", 140, 330),
        launch(145, 3, 320, "cudaMemcpyAsync"),
        kernel("Memcpy DtoH (Device -> Pageable)", 440, 20, correlation=3, bytes=4096),
        launch(462, 9, 3, "cudaStreamSynchronize"),
        launch(580, 4),
        kernel("gemm", 600, 100, correlation=4),
        launch(590, 5),
        kernel("add", 720, 180, correlation=5),
    ]


def test_the_parts_of_a_step(tmp_path: Path) -> None:
    activity = Activity(read(tmp_path, gpu_step()))
    ((step, parts),) = activity.of_steps
    assert (step.number, step.start, step.end) == (7, 0, 1_000_000)
    assert (parts.compute, parts.exposed_comm, parts.hidden_comm) == (480_000, 150_000, 50_000)
    assert (parts.copy, parts.idle) == (10_000, 360_000)
    assert parts.compute + parts.exposed_comm + parts.copy + parts.idle == parts.window
    found = overlap(activity)
    (one,) = found["collectives"]
    assert found["percent"] == one["percent"] == 25 and one["bytes"] == 2000 and one["group"] == "dp"


def test_idle_time_by_cause(tmp_path: Path) -> None:
    causes = idle_causes(Activity(read(tmp_path, gpu_step()))).of(0)
    assert causes.keys() == CAUSES.keys()
    assert causes["input_late"] == 80_000
    assert causes["synchronisation"] == 140_000
    assert causes["kernel_gap"] == 20_000
    assert causes["host_late"] == 20_000 + 100_000
    assert sum(causes.values()) == 360_000


def test_steps_begin_on_the_device_when_it_is_done_with_the_one_before(tmp_path: Path) -> None:
    events = [
        span("user_annotation", "ProfilerStep#1", 0, 100),
        launch(10, 1),
        kernel("gemm", 50, 200, correlation=1),  # until 250, long after its step on the host
        span("user_annotation", "ProfilerStep#2", 100, 100),
        launch(110, 2),
        kernel("gemm", 260, 40, correlation=2),
    ]
    steps = read(tmp_path, events).steps
    assert [(step.number, step.start, step.end) for step in steps] == [(1, 0, 250_000), (2, 250_000, 300_000)]


def test_hotspots_are_the_innermost_ops_that_launched(tmp_path: Path) -> None:
    trace = read(tmp_path, gpu_step())
    found = {one.op: one for one in hotspots(trace, Nesting.of(trace))}
    assert found["aten::mm"].seconds == pytest.approx(200e-6) and found["aten::mm"].flops == 2 * 128 * 64 * 32
    assert found["aten::mm"].bytes == 4 * (128 * 64 + 64 * 32 + 128 * 32)
    assert found["aten::copy_"].seconds == pytest.approx(20e-6)
    assert found["gemm"].calls == 1 and found["gemm"].flops is None  # launched outside of any op
    assert "aten::linear" not in found
    assert launches(trace) == {"per_step": 4, "share_under_10us": 0}


def test_the_critical_path_of_a_step(tmp_path: Path) -> None:
    """Backwards: add, gemm, its late launch by a host that had waited for the copy, the copy, gemm, the host."""
    path = critical_path(read(tmp_path, gpu_step()))
    assert path is not None and path["seconds"] == pytest.approx(900e-6)
    expected = {"compute": 280 + 200, "copy": 20, "launch": 20 + 10, "kernel_gap": 20 + 140}
    expected |= {"host": 580 - 465 + 90, "synchronisation": 5}
    assert {kind: round(1e6 * length) for kind, length in path["by_kind"].items()} == expected
    assert path["longest"][0]["name"] == "gemm"


def test_sequences_of_short_kernels(tmp_path: Path) -> None:
    events = []
    for i in range(4):
        events += [kernel("long", 100 * i, 50), kernel("mul", 100 * i + 60, 3), kernel("add", 100 * i + 70, 4)]
    (one,) = fusible(read(tmp_path, events))
    assert one["kernels"] == ["mul", "add"] and one["times"] == 4
    assert (one["gap_s"], one["kernel_s"]) == pytest.approx((4 * 7e-6, 4 * 7e-6))


def test_nesting_is_that_of_a_stack(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    events: list[Event] = []

    def fill(start: int, end: int, depth: int, thread: int) -> None:
        time = start
        while depth < 5 and time + 4 < end:
            first = int(rng.integers(time, time + 3))
            last = int(rng.integers(first + 1, end))
            events.append(span("cpu_op", f"op{depth}", first, last - first, thread))
            fill(first, last, depth + 1, thread)
            time = last

    fill(0, 300, 0, 1)
    fill(0, 300, 0, 2)
    trace = read(tmp_path, events)
    found, table = Nesting.of(trace), trace.events
    for row in range(len(table)):
        around = [
            i
            for i in range(row)
            if table.lane[i] == table.lane[row]
            and table.end[i] >= table.end[row]
            and table.start[i] <= table.start[row]
        ]
        assert found.parent[row] == (around[-1] if around else -1)
        children = np.flatnonzero(found.parent == row)
        assert found.self_time[row] == table.duration[row] - table.duration[children].sum()


def test_parents_where_ranges_overlap_in_part(tmp_path: Path) -> None:
    """A span that is opened within one op and closed within another, as hooks of autograd do."""
    events = [
        span("cpu_op", "first", 0, 100),
        span("user_annotation", "span/0", 50, 100),
        span("cpu_op", "of both", 60, 20),
        span("user_annotation", "span/1", 90, 90),
        span("cpu_op", "second", 110, 80),
        span("cpu_op", "of layer/0", 115, 30),
        span("cpu_op", "of second", 155, 20),
        span("cpu_op", "third", 200, 10),
    ]
    trace = read(tmp_path, events)
    nesting = Nesting.of(trace)
    names = [trace.names[name] for name in trace.events.name]
    found = {name: names[row] if row >= 0 else None for name, row in zip(names, nesting.parent, strict=True)}
    assert found == {
        **dict.fromkeys(("first", "span/0", "span/1", "second", "third")),
        "of both": "span/0",
        "of layer/0": "second",
        "of second": "second",
    }
    own = dict(zip(names, nesting.self_time // 1000, strict=True))
    assert (own["first"], own["span/0"], own["second"]) == (100, 80, 30)


def test_every_kernel_of_alexnet_has_its_op() -> None:
    """Its annotations overlap the ops; by the times in the file, every launch lies within an operator."""
    trace = read_trace(DATA / "alexnet.json.gz")
    nesting, events = Nesting.of(trace), trace.events
    kernels = np.flatnonzero(events.of(Kind.KERNEL))
    op = nesting.nearest(trace, Kind.OP)[trace.launch[kernels]]
    counts = Counter(trace.names[events.name[row]] for row in op[op >= 0])
    assert len(kernels) == counts.total() == 79
    assert counts["aten::cudnn_convolution"] == 30 and counts["aten::addmm"] == 12
    convolution = trace.named(re.compile("^aten::cudnn_convolution$")) & events.of(Kind.OP)
    assert nesting.self_time[convolution].sum() == 508_250_000


def test_host_time_by_python_call(tmp_path: Path) -> None:
    events = [
        kernel("gemm", 0, 100),
        span("python_function", "train.py(1): main", 0, 90),
        span("python_function", "data.py(7): collate", 10, 60),
        span("cpu_op", "aten::add", 20, 30),
    ]
    calls = python_time(read(tmp_path, events))
    assert [(one["call"], round(1e6 * one["seconds"])) for one in calls] == [
        ("data.py(7): collate", 60),
        ("train.py(1): main", 30),
    ]


# --- traces without a device, and several ranks ----------------------------------------------------------


def gloo_rank(compute: float, arrives: float) -> list[Event]:
    """A step of 1,000 µs: ops until `compute`, an all-reduce from `arrives` to 900, the thread waits for it."""
    shapes = {"Input Dims": [[256]], "Input type": ["float"]}
    return [
        span("user_annotation", "ProfilerStep#4", 0, 1000, 1),
        span("cpu_op", "aten::mm", 50, compute - 50, 1),
        span("cpu_op", "c10d::allreduce_", arrives - 5, 5, 1),
        span("user_annotation", "gloo:all_reduce", arrives, 900 - arrives, 9, **shapes),
        span("cpu_op", "aten::add", 920, 30, 1),
        span("cpu_op", "aten::stack", 0, 1000, 5),  # a thread that prepares batches
    ]


def test_host_threads_are_the_device_of_a_cpu_run(tmp_path: Path) -> None:
    trace = read(tmp_path, gloo_rank(500, 510))
    ((step, parts),) = Activity(trace).of_steps
    assert not trace.on_device and step.number == 4
    assert (parts.compute, parts.exposed_comm, parts.hidden_comm) == (480_000, 390_000, 0)
    assert idle_causes(Activity(trace)).of(0) == {
        **dict.fromkeys(CAUSES, 0),
        "host_late": 50_000 + 5_000 + 20_000 + 50_000,
        "other_rank": 5_000,
    }
    (one,) = overlap(Activity(trace))["collectives"]
    assert (one["collective"], one["bytes"]) == ("all_reduce", 1024)


@pytest.mark.parametrize(("compute", "cause"), [(800, "slow_compute"), (300, "late_arrival")])
def test_skew_names_the_late_rank_and_why(tmp_path: Path, compute: float, cause: str) -> None:
    """Rank 1 arrives 500 µs after rank 0; its clock is 7 s ahead, which the ends of the collective show."""
    traces = [
        read(tmp_path, gloo_rank(300, 310), "rank0.json", baseTimeNanoseconds=0),
        read(tmp_path, gloo_rank(compute, 810), "rank1.json", baseTimeNanoseconds=7_000_000_000),
    ]
    found = skew([Activity(trace) for trace in traces])
    assert found is not None and found.late_rank == 1 and found.cause == cause
    assert found.wait_s == pytest.approx({0: 500e-6, 1: 0}) and found.late_share == pytest.approx(0.5)
    assert skew([Activity(traces[0])]) is None


def test_a_recorded_fsdp2_step_over_gloo() -> None:
    traces = [read_trace(DATA / f"fsdp2_gloo_rank{rank}.json.gz") for rank in (0, 1)]
    facts = summarise(traces)
    assert [(row["rank"], row["step"]) for row in facts["steps"]] == [(0, 3), (1, 3)]
    for row in facts["steps"]:
        whole = row["compute_s"] + row["exposed_comm_s"] + row["copy_s"] + row["idle_s"]
        assert whole == pytest.approx(row["seconds"])
        assert sum(row["idle_by_cause"].values()) == pytest.approx(row["idle_s"])
    # Rank 1 waits for rank 0 within nodes of autograd: that is no compute.
    assert [row["hidden_comm_s"] for row in facts["steps"]] == pytest.approx([0, 0], abs=1e-3)
    assert facts["steps"][1]["exposed_comm_s"] > 0.2 and facts["skew"]["cause"] == "slow_compute"
    # gloo reduce-scatters by an all-reduce: 2 blocks, the root and the loss; 2 + 1 gathers forward, 2 backward
    calls = {one["collective"]: one["calls"] for one in facts["overlap"]["collectives"]}
    assert calls == {"all_reduce": 2 * 4, "all_gather": 2 * 5}
    assert facts["skew"]["collectives"] == 9


def test_input_late_is_what_four_workers_mend() -> None:
    """Kineto's ResNet-50: the same job whose loader has no worker, and four."""
    shares = []
    for workers in (0, 4):
        facts = summarise([read_trace(DATA / f"resnet50_workers{workers}.json.gz")])
        shares.append(facts["idle_by_cause"]["input_late"] / facts["step_s"])
    assert shares[0] > 0.15 and shares[1] < 0.02


def test_a_trace_says_what_it_lacks(tmp_path: Path) -> None:
    lacks = summarise([read(tmp_path, [span("cpu_op", "aten::mm", 0, 10)])])["ranks"][0]["missing"]
    assert [text.partition(" (")[0].partition(":")[0] for text in lacks] == [
        "no device events",
        "no step annotations",
        "no shapes of inputs",
        "no Python calls",
        "no memory events",
    ]


def test_names_of_kernels_are_shortened() -> None:
    long = "void at::native::(anonymous namespace)::multi_tensor<at::Meta<4>, at::Adam<float, 4>>(at::Meta<4>, float)"
    assert short_name(long) == "at::native::multi_tensor"
    assert short_name("volta_sgemm_64x64_nt") == "volta_sgemm_64x64_nt"


@pytest.mark.parametrize(("world", "waited"), [(None, 0), (1, 0), (2, 30_000)])
def test_one_rank_waits_for_no_other(tmp_path: Path, world: int | None, waited: int) -> None:
    for on_device in (False, True):
        events = [
            span("user_annotation", "ProfilerStep#1", 0, 100),
            span("cpu_op", "aten::mm", 0, 50),
            span("user_annotation", "phase/communication", 60, 30),
            *([kernel("gemm", 0, 50)] if on_device else []),
        ]
        info = {} if world is None else {"rank": 0, "world_size": world}
        causes = idle_causes(Activity(read(tmp_path, events, distributedInfo=info))).of(0)
        assert (causes["other_rank"], causes["host_late"]) == (waited, 50_000 - waited)


def test_an_unrelated_pickle_beside_a_trace_is_said(tmp_path: Path) -> None:
    (tmp_path / "t.pickle").write_bytes(pickle.dumps({"weights": [1, 2]}))
    facts = summarise([read(tmp_path, gpu_step())])
    assert facts["memory"][0]["snapshot"] is None and facts["step_s"] == pytest.approx(1e-3)
    assert "t.pickle: no snapshot of PyTorch's allocator" in facts["ranks"][0]["missing"][-1]


def test_an_annotation_that_ends_in_another_op_hides_no_call(tmp_path: Path) -> None:
    """A hook begins it within the first op; what the op calls is still not its own time."""
    events = [
        span("user_annotation", "ProfilerStep#1", 0, 400),
        span("cpu_op", "aten::linear", 0, 100),
        span("user_annotation", "layer/0 backward", 10, 200),
        span("cpu_op", "aten::mm", 20, 70),
        span("cpu_op", "aten::add", 150, 100),
    ]
    ops = {one["op"]: one["seconds"] for one in summarise([read(tmp_path, events)])["ops"]}
    assert ops == pytest.approx({"aten::linear": 30e-6, "aten::mm": 70e-6, "aten::add": 100e-6})


def test_runs_of_elementwise_kernels(tmp_path: Path) -> None:
    """Three in a row for 90 µs save 60, one alone nothing, an optimizer's fused kernel ends a run."""
    add = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
    mean = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)"
    fused = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdam>(int)"
    kernels = [add, mean, add, "gemm", add, "gemm", fused, add]
    events = [span("user_annotation", "ProfilerStep#1", 0, 1000)]
    events += [launch(10 * place, place) for place in range(8)]
    events += [kernel(name, 100 + 30 * place, 30, correlation=place) for place, name in enumerate(kernels)]
    trace = read(tmp_path, events)
    assert unfused_share(trace, Nesting.of(trace)) == pytest.approx(60 / 1000)


def test_runs_of_elementwise_ops_on_a_cpu(tmp_path: Path) -> None:
    """Views between them do not end a run; the op that calls others has no time of its own."""
    ops = [("aten::mul", 40), ("aten::t", 10), ("aten::add", 40), ("aten::mm", 100), ("aten::pow", 40)]
    events = [span("user_annotation", "ProfilerStep#1", 0, 1000)]
    for place, (name, length) in enumerate(ops):
        events.append(span("cpu_op", name, 100 * place, length))
    trace = read(tmp_path, events)
    assert unfused_share(trace, Nesting.of(trace)) == pytest.approx(40 / 1000)


@pytest.mark.parametrize(("bytes_", "cause"), [(2**26, "input_late"), (8, "host_late")])
def test_a_gap_before_a_copy_from_pageable_memory(tmp_path: Path, bytes_: int, cause: str) -> None:
    """The host brings a batch to where the device can copy it from; a scalar is no batch."""
    events = [
        span("user_annotation", "ProfilerStep#1", 0, 1000),
        launch(0, 1),
        kernel("gemm", 0, 200, correlation=1),
        launch(500, 2, 400, "cudaMemcpyAsync"),
        kernel("Memcpy HtoD (Pageable -> Device)", 600, 400, correlation=2, bytes=bytes_),
    ]
    trace = read(tmp_path, events)
    idle = idle_causes(Activity(trace)).of(0)
    assert idle[cause] == 400_000 and sum(idle.values()) == 400_000
    assert exposed_copy_in(trace) == pytest.approx(0.4)


def test_one_late_step_is_no_straggler(tmp_path: Path) -> None:
    """Rank 1 comes 300 µs late in one of three steps: what it is late for in the median step is nothing."""

    def rank(number: int, late: int) -> Activity:
        events = []
        for step in range(3):
            began = 1000 * step
            computed = 400 + (late if step == 1 else 0)
            events += [
                span("user_annotation", f"ProfilerStep#{step}", began, 1000),
                span("cpu_op", "aten::mm", began, computed),
                span("user_annotation", "gloo:all_reduce", began + computed, 900 - computed, 9),
            ]
        return Activity(read(tmp_path, events, f"rank{number}.json"))

    found = skew([rank(0, 0), rank(1, 300)])
    assert found is not None and found.late_share == 0 and found.wait_s[0] == pytest.approx(300e-6)


def test_a_kernel_without_details_is_named_by_its_collective(tmp_path: Path) -> None:
    names = ["ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)"]
    events = [kernel(name, 100 * place, 50, correlation=place) for place, name in enumerate(names)]
    trace = read_trace(write_trace(tmp_path / "t.json", events))
    assert [message_of(trace, row).name for row in range(2)] == ["sendrecv", "allreduce"]
