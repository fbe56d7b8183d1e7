"""Verdicts on traces with one planted cause each, on their undisturbed twin, and on traces that others published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmworks.diagnose.causes import cause as cause_of
from lmworks.diagnose.causes import figures_of
from lmworks.diagnose.remedies import remedy_of
from lmworks.diagnose.verdict import VERDICTS, Judgement, judge
from lmworks.spec import RunSpec
from lmworks.trace import Trace, read_trace
from lmworks.trace.summary import summarise
from traces import Event, kernel, launch, span, write_trace

DATA = Path(__file__).parents[1] / "trace" / "data"
GEMM = "nvjet_tst_128x256_64x4_bf16"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)"


class Job:
    """A host that launches ahead of a device, event by event; times in µs."""

    def __init__(self) -> None:
        self.host = self.device = 1000.0
        self.events: list[Event] = []
        self.calls = 0

    def run(self, name: str, length: float, every: float = 5, stream: int = 7, **args: Any) -> None:
        self.calls += 1
        self.events.append(launch(self.host, self.calls))
        self.device = max(self.device + 1, self.host + 4)
        self.events.append(kernel(name, self.device, length, stream, self.calls, **args))
        self.host, self.device = self.host + every, self.device + length

    def call(self, name: str, length: float) -> None:
        self.events.append(span("cuda_runtime", name, self.host, length))
        self.host += length

    def wait(self, name: str = "cudaStreamSynchronize") -> None:
        self.call(name, max(self.device - self.host, 0) + 2)

    def message(self, name: str, length: float, elements: int) -> None:
        facts = {"Collective name": name, "In msg nelems": elements, "dtype": "BFloat16", "Group size": 8}
        self.run(f"ncclDevKernel_{name}", length, stream=20, **facts)

    def op(self, name: str, since: float) -> None:
        self.events.append(span("cpu_op", name, since, self.host - since))


def planted(job: Job, cause: str) -> None:
    """20 products of 100 µs, and the cause."""
    if cause == "input_bound":
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        job.events.append(span("user_annotation", name, job.host, 3000))
        job.host += 3000
    for place in range(20):
        began = job.host
        job.run(ADD if cause == "memory_bound" else "volta_sgemm_128x64" if cause == "compute_bound" else GEMM, 100)
        if cause == "host_bound":
            for _ in range(20):
                job.run(GEMM, 3, every=12)
        elif cause == "sync_bound":
            job.wait()
            job.host += 60
        elif cause == "allocator_bound":
            job.wait("cudaMalloc")
            job.call("cudaFree", 80)
        elif cause == "comm_bound latency":
            job.message("allreduce", 60, 4096)
        elif cause == "recompute_heavy" and place >= 10:
            job.op("autograd::engine::evaluate_function: MmBackward0", began)
            job.op("aten::linear", began)
    if cause == "comm_bound order":
        job.message("allreduce", 1200, 2**26)
    elif cause == "pipeline_bubble":
        job.message("recv", 1200, 2**26)


def trace(tmp_path: Path, cause: str) -> Trace:
    job = Job()
    for number in range(3):
        began = job.host
        planted(job, cause)
        job.wait()
        job.events.append(span("user_annotation", f"ProfilerStep#{number}", began, job.host - began))
    return read_trace(write_trace(tmp_path / "t.json", job.events))


def verdict(*traces: Trace, spec: RunSpec | None = None) -> Judgement:
    return judge(traces, summarise(traces), spec)


PLANTED = [
    "input_bound",
    "host_bound",
    "sync_bound",
    "comm_bound order",
    "comm_bound latency",
    "memory_bound",
    "compute_bound",
    "pipeline_bubble",
    "allocator_bound",
    "recompute_heavy",
]


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_found(tmp_path: Path, cause: str) -> None:
    found = verdict(trace(tmp_path, cause))
    assert f"{found.verdict} {found.kind}".strip() == cause
    assert found.verdict in VERDICTS and len(found.evidence) == 3 and found.advice
    low, high = found.gain
    assert (low + high) / 2 >= 0.05 and low < high < 1


def test_its_twin_is_healthy(tmp_path: Path) -> None:
    found = verdict(trace(tmp_path, "none"))
    assert found.verdict == "healthy" and not found.overrides and found.evidence[0].value > 0.95


def test_a_late_rank_is_the_straggler(tmp_path: Path) -> None:
    def rank(number: int, compute: float) -> Trace:
        events = [
            span("user_annotation", "ProfilerStep#1", 0, 1000),
            span("cpu_op", "aten::mm", 0, compute),
            span("user_annotation", "gloo:all_reduce", compute, 990 - compute, 9),
        ]
        return read_trace(write_trace(tmp_path / f"rank{number}.json", events))

    found = verdict(rank(0, 400), rank(1, 900), rank(2, 400))
    assert (found.verdict, found.kind) == ("straggler", "slow_compute") and "rank 1" in found.advice
    assert found.gain[1] == pytest.approx(0.5)


def test_traces_that_others_published() -> None:
    """Kineto's ResNet-50 without a loader worker waits for its input, with four it does not; HTA's DDP job idles."""
    first = verdict(read_trace(DATA / "resnet50_workers0.json.gz"))
    assert first.verdict == "input_bound" and first.overrides == ("data.workers=4",)
    four = verdict(read_trace(DATA / "resnet50_workers4.json.gz"))
    assert "input_bound" not in {four.verdict, *(one.verdict for one in four.others)}
    assert verdict(read_trace(DATA / "ddp_nccl.json.gz")).verdict == "host_bound"


def test_the_gain_predicted_for_four_workers_holds() -> None:
    """Kineto's two traces are one job before and after the remedy of the first verdict."""
    facts = [summarise([read_trace(DATA / f"resnet50_workers{count}.json.gz")]) for count in (0, 4)]
    before, after = (one["step_s"] / len(one["steps"]) for one in facts)
    low, high = verdict(read_trace(DATA / "resnet50_workers0.json.gz")).gain
    assert low - 0.03 <= 1 - after / before <= high + 0.03


def test_remedies_are_overrides_that_a_spec_takes(tmp_path: Path) -> None:
    from lmworks.spec import load_run

    keys = ["data.workers=3", "data.micro_batch=4", "parallel.dp=2", "parallel.recompute=full", "precision.dtype=fp32"]
    base = load_run("tiny", keys)
    for cause in PLANTED:
        found = verdict(trace(tmp_path, cause), spec=base)
        load_run("tiny", [*keys, *found.overrides])
        assert found.overrides or cause == "sync_bound"
    assert verdict(trace(tmp_path, "input_bound"), spec=base).overrides == ("data.workers=6",)


@pytest.mark.parametrize(
    "cause, keys, wanted",
    [
        ("host_bound", "data.global_batch=8 data.micro_batch=8", ["parallel.compile=true"]),  # 16 do not divide 8
        ("host_bound", "data.global_batch=8 data.micro_batch=8 parallel.compile=true", []),
        ("host_bound", "data.global_batch=8 data.micro_batch=4 parallel.compile=true", ["data.micro_batch=8"]),
        ("memory_bound", "parallel.compile=true", []),
        ("compute_bound", "precision.dtype=bf16", []),
        ("allocator_bound", "data.micro_batch=1", []),
        ("recompute_heavy", "parallel.recompute=full", ["parallel.recompute=selective"]),
        ("recompute_heavy", "parallel.recompute=selective", ["parallel.recompute=none"]),
        ("recompute_heavy", "parallel.recompute=none", []),
        ("comm_bound latency", "parallel.dp=2 parallel.bucket_mb=0.1", ["parallel.bucket_mb=100"]),
        ("comm_bound latency", "model.hidden=4096 parallel.dp=2 parallel.bucket_mb=100", ["parallel.bucket_mb=400"]),
        ("comm_bound latency", "parallel.dp=2 data.global_batch=16", ["data.global_batch=32"]),  # one message already
        ("comm_bound latency", "parallel.dp=2 parallel.strategy=fsdp2", ["parallel.reshard=false"]),
        ("comm_bound latency", "parallel.dp=2 parallel.strategy=fsdp2 parallel.reshard=false", []),
        ("comm_bound latency", "parallel.tp=2", []),  # no gradients are sent
        ("comm_bound order", "model.hidden=4096 parallel.dp=2 parallel.bucket_mb=10", ["parallel.bucket_mb=5"]),
        ("comm_bound order", "parallel.dp=2", ["parallel.bucket_mb=0.133"]),  # a quarter of all gradients
        ("comm_bound order", "parallel.dp=2 parallel.strategy=fsdp2 parallel.prefetch=2", ["parallel.prefetch=4"]),
        ("comm_bound order", "parallel.dp=2 parallel.strategy=fsdp1", []),
    ],
)
def test_remedies_change_the_spec(tmp_path: Path, cause: str, keys: str, wanted: list[str]) -> None:
    """None that the spec has already, none that it would refuse, none of another strategy."""
    from lmworks.spec import load_run

    found = verdict(trace(tmp_path, cause), spec=load_run("tiny", keys.split()))
    assert list(found.overrides) == wanted and found.advice


def test_no_gain_is_more_than_the_step(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.json", [span("cpu_op", "aten::add", 0, 5)]))
    found = judge([trace], summarise([trace]))
    assert found.verdict == "host_bound" and found.gain[1] == 1.0


def test_nothing_to_judge_is_unknown(tmp_path: Path) -> None:
    only = read_trace(write_trace(tmp_path / "t.json", [kernel("Memcpy HtoD", 0, 5)]))
    assert verdict(only).verdict == "unknown"


def test_remedies_of_kinds(tmp_path: Path) -> None:
    """Workers do not shorten a copy, nor do micro-batches a stage that has too many layers."""
    from lmworks.spec import load_run

    spec = load_run("tiny", ["data.workers=1"])
    one = trace(tmp_path, "none")
    figures = figures_of([one], summarise([one]))
    overrides, advice = remedy_of(cause_of("input_bound", 0.5, "", kind="copies"), figures, spec)
    assert not overrides and "pin_memory" in advice
    overrides, advice = remedy_of(cause_of("pipeline_bubble", 0.5, "", kind="uneven"), figures, spec)
    assert not overrides and "fewer layers" in advice
    assert remedy_of(cause_of("pipeline_bubble", 0.5, ""), figures, spec)[0]
