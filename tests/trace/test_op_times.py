"""The time of a step by op and pass: real steps against sums over their JSON, and a device's step by hand."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from layouts import SPARSE, layout, with_meshes
from lmworks.parallel.local_ranks import on_ranks
from lmworks.spec import RunSpec
from lmworks.trace import read_trace, read_traces
from lmworks.trace.op_times import op_times, rank_times
from lmworks.train import Trainer
from traces import Event, kernel, launch, span, write_trace

PASSES = ("forward", "backward")
ROWS = {
    "attention_norm": "attention norm", "mlp_norm": "mlp norm", "norm": "final norm", "attention.out": "out-projection",
    "attention.q": "qkv", "attention.k": "qkv", "attention.v": "qkv", "mlp.gate": "ffn up", "mlp.up": "ffn up",
    "mlp.down": "ffn down", "mlp": "activation", "embed": "embedding",
}  # fmt: skip


def record(dataset: Path, run: Path, *overrides: str) -> Path:
    spec = layout(dataset, "log.profile=[2,3]", "optim.steps=4", "checkpoint.every=0", *overrides)
    Trainer(spec, run, quiet=True).run()
    return run / "traces" / "rank0-steps-2-3.json.gz"


def by_hand(file: Path) -> dict[tuple[str, str], float]:
    """Milliseconds of a step, of a dense model without recomputation, from the JSON alone.

    An outermost op, or a node of autograd, takes the time since the one before it in its phase; a node is of the module
    whose span holds the last op with its sequence number.
    """
    content: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    events = [event for event in content["traceEvents"] if event.get("ph") == "X" and "ts" in event]
    spans = [event for event in events if event["cat"] == "user_annotation"]
    thread = next(event["tid"] for event in spans if event["name"].startswith("ProfilerStep#"))
    ops = sorted(
        (event for event in events if event["cat"] == "cpu_op" and event["tid"] == thread),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    modules = [event for event in spans if event["name"].startswith("module/")]
    maker = {}
    for op in ops:
        if op["args"].get("Fwd thread id") == 0 and "Sequence number" in op["args"]:
            maker[op["args"]["Sequence number"]] = op

    def module_of(op: Event) -> str:
        around = [one for one in modules if one["ts"] <= op["ts"] < one["ts"] + one["dur"]]
        return min(around, key=lambda one: one["dur"])["name"].removeprefix("module/") if around else ""

    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for way in PASSES:
        for phase in (event for event in spans if event["name"] == f"phase/{way}"):
            end, last = phase["ts"], ("", "")
            for op in ops:
                if not end <= op["ts"] < phase["ts"] + phase["dur"]:
                    continue
                source: Event | None = op
                if way == "backward" and "evaluate_function" in op["name"]:
                    source = maker.get(op["args"].get("Sequence number"))
                last = (module_of(source) if source else "", way)
                found[last] += op["ts"] + op["dur"] - end
                end = op["ts"] + op["dur"]
            found[last] += phase["ts"] + phase["dur"] - end
    steps = sum(event["name"].startswith("ProfilerStep#") for event in spans)
    rows: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (module, way), length in found.items():
        if module in ROWS:
            rows[ROWS[module], way] += length / 1e3 / steps
    return rows


def test_a_dense_step(dataset: Path, tmp_path: Path) -> None:
    file = record(dataset, tmp_path / "run", "model.positions=learned")
    trace = read_trace(file)
    times = rank_times(trace)
    assert times is not None
    mean = sum(step.seconds for step in trace.steps) / 2
    assert sum(times.values()) == pytest.approx(mean, rel=0.001)
    assert times["unassigned", ""] < 0.05 * mean
    expected = by_hand(file)
    assert {op for op, _ in expected} == set(ROWS.values())
    ours = {key: 1e3 * times.get(key, 0.0) for key in expected if key[0] != "embedding"}
    assert ours == pytest.approx({key: expected[key] for key in ours}, rel=0.01, abs=0.01)
    assert times["attention", "backward"] > 0 and times["head and loss", "forward"] > 0 and times["update", ""] > 0
    assert not any(way == "recompute" for _, way in times)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_experts_and_recomputation(dataset: Path, tmp_path: Path, recompute: str) -> None:
    trace = read_trace(record(dataset, tmp_path / "run", *SPARSE, f"parallel.recompute={recompute}"))
    times = op_times([trace])
    assert times is not None
    assert sum(times.values()) == pytest.approx(sum(step.seconds for step in trace.steps) / 2, rel=0.001)
    for op in ("experts", "router", "shared experts", "qkv", "rotary", "attention norm"):
        assert all(times[op, way] > 0 for way in (*PASSES, "recompute")), op
    assert ("head and loss", "recompute") not in times and ("ffn up", "forward") not in times


def sequence(number: int, thread: int = 0) -> dict[str, int]:
    return {"Sequence number": number, "Fwd thread id": thread}


def device_step() -> list[Event]:
    """A step of 2,000 µs. The host launches from two threads; the same sequence numbers occur in both."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    return [
        span("user_annotation", "ProfilerStep#1", 0, 2000),
        span("user_annotation", "phase/forward", 0, 300),
        span("user_annotation", "layer/0", 10, 200),
        span("user_annotation", "module/mlp", 20, 180),
        span("user_annotation", "module/mlp.up", 30, 40),
        span("cpu_op", "aten::mm", 40, 20, **sequence(5)),
        launch(42, 1),
        kernel("gemm", 100, 300, correlation=1),
        span("cpu_op", "aten::silu", 80, 20, **sequence(6)),
        launch(82, 2),
        kernel("silu", 390, 60, stream=8, correlation=2),  # 10 µs beside the product
        span("user_annotation", "module/norm", 220, 20),
        span("cpu_op", "RMSNorm", 222, 10, **sequence(7)),
        launch(224, 3),
        kernel("norm", 450, 50, correlation=3),
        span("cpu_op", "LinearCrossEntropy", 250, 30, **sequence(8)),
        launch(252, 4),
        kernel("gemm", 500, 100, correlation=4),
        span("user_annotation", "phase/backward", 300, 500),
        span("cpu_op", node, 310, 30, thread=2, **sequence(5, 1)),
        span("cpu_op", "aten::mm", 312, 20, thread=2),
        {**launch(314, 5), "tid": 2},
        kernel("gemm", 620, 400, correlation=5),
        # Recomputation: the module runs again within a node, and its own op has number 5 of the other thread.
        span("cpu_op", "autograd::engine::evaluate_function: X", 350, 60, thread=2, **sequence(6, 1)),
        span("user_annotation", "layer/0", 355, 40, thread=2),
        span("user_annotation", "module/attention_norm", 360, 20, thread=2),
        span("cpu_op", "RMSNorm", 362, 10, thread=2, **sequence(5)),
        {**launch(364, 6), "tid": 2},
        kernel("norm", 1020, 80, correlation=6),
        span("cpu_op", "autograd::engine::evaluate_function: RMSNormBackward", 420, 30, thread=2, **sequence(5, 2)),
        {**launch(424, 7), "tid": 2},
        kernel("norm_backward", 1100, 90, correlation=7),
        # FSDP2's hooks run before a node, whose number the call within has alone.
        span("cpu_op", "autograd::engine::evaluate_function: LinearCrossEntropyBackward", 460, 40, thread=2),
        span("user_annotation", "FSDP::pre_backward (blocks.0)", 462, 10, thread=2),
        {**launch(464, 10), "tid": 2},
        kernel("split_with_sizes_copy", 1400, 30, correlation=10),
        span("cpu_op", "LinearCrossEntropyBackward", 480, 15, thread=2, **sequence(8, 1)),
        {**launch(482, 11), "tid": 2},
        kernel("mul", 1430, 20, correlation=11),
        launch(700, 8),
        kernel("ncclDevKernel_AllReduce_Sum", 1150, 240, stream=20, correlation=8, **{"Collective name": "allreduce"}),
        span("user_annotation", "phase/optimizer", 800, 100),
        span("cpu_op", "aten::_fused_adamw_", 810, 20),
        launch(812, 9),
        kernel("adam", 1500, 100, correlation=9),
        kernel("of nobody", 1700, 20, correlation=77),
    ]


def test_a_step_of_a_device(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.json", device_step()))
    times = rank_times(trace)
    assert times is not None
    assert {key: round(1e6 * length) for key, length in times.items()} == {
        ("ffn up", "forward"): 300,
        ("activation", "forward"): 50,  # from the end of the product on
        ("final norm", "forward"): 50,
        ("head and loss", "forward"): 100,
        ("ffn up", "backward"): 400,
        ("attention norm", "recompute"): 80,
        ("attention norm", "backward"): 90,  # its number is that of the recomputed op, by the thread that it names
        ("sharding", ""): 30,
        ("head and loss", "backward"): 20,
        ("communication", "allreduce"): 200,
        ("update", ""): 100,
        ("unassigned", ""): 20,
        ("idle", ""): 100 + 20 + 10 + 50 + 100 + 280,
    }
    (step,) = trace.steps
    assert sum(times.values()) == pytest.approx(step.seconds)


def test_ranges_that_overlap_in_part(tmp_path: Path) -> None:
    """A mode of the dispatcher is left for a module and ends within it: no moment is in two rows."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        span("user_annotation", "ProfilerStep#1", 0, 200),
        span("user_annotation", "phase/backward", 0, 200),
        span("cpu_op", node, 0, 190),  # a block runs again within it
        span("user_annotation", "layer/0", 5, 175),
        span("user_annotation", "module/attention", 10, 160),
        span("cpu_op", "PythonDispatchMode", 20, 60),
        span("user_annotation", "module/attention.q", 30, 100),
        span("cpu_op", "aten::mm", 90, 20),
        span("cpu_op", "PythonDispatchMode", 120, 30),
    ]
    times = rank_times(read_trace(write_trace(tmp_path / "t.json", events)))
    assert times is not None
    assert {key: round(1e6 * length) for key, length in times.items()} == {
        ("qkv", "recompute"): 90,  # until the second mode begins
        ("rotary", "recompute"): 10 + 30,  # both modes: ops of attention's own
        ("attention", "recompute"): 10 + 20,
        ("ffn", "recompute"): 5 + 10,
        ("unassigned", ""): 5 + 10 + 10,
    }


def test_other_programs_have_no_ops_of_a_network(tmp_path: Path) -> None:
    foreign = write_trace(tmp_path / "t.json", [span("user_annotation", "ProfilerStep#1", 0, 9), kernel("k", 1, 2)])
    assert op_times(read_traces([foreign])) is None


@with_meshes
def train_sharded(rank: int, spec: RunSpec, run: Path) -> None:
    Trainer(spec, run, quiet=True).run()


@pytest.mark.slow
def test_sharded_ranks(dataset: Path, tmp_path: Path) -> None:
    """What FSDP2 does in hooks and nodes of its own is no time of the ops that they lie within."""
    overrides = ("parallel.dp=2", "parallel.strategy=fsdp2", "parallel.recompute=full", "log.profile_ranks=[0,1]")
    spec = layout(dataset, "log.profile=[2,3]", "optim.steps=4", "checkpoint.every=0", *overrides)
    on_ranks(2, train_sharded, spec, tmp_path / "run")
    traces = read_traces(sorted((tmp_path / "run" / "traces").iterdir()))
    times = op_times(traces)
    assert times is not None
    mean = sum(step.seconds for trace in traces for step in trace.steps) / 4
    assert sum(times.values()) == pytest.approx(mean, rel=0.001)
    assert times["unassigned", ""] < 0.03 * mean and times["sharding", ""] > times["residual", "forward"]
    assert times["communication", "all_gather"] > 0
