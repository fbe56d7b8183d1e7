"""The bubble of a pipeline from its traces, against sums by hand over real ranks' JSON, and against the planner's."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from layouts import layout, with_meshes
from lmworks.cli.plan_lookup import describe
from lmworks.diagnose.schedule_bubble import bubble_table, with_schedule
from lmworks.parallel.local_ranks import on_ranks
from lmworks.plan.pipelines.bubble import ideal_idle
from lmworks.spec import RunSpec
from lmworks.trace import read_trace, read_traces
from lmworks.trace.own_runs import recorded_spec
from lmworks.trace.pipeline import bubbles, pass_seconds, pipeline_facts, stage_passes
from lmworks.train import Trainer
from traces import Event, kernel, launch, span, write_trace

SCHEDULES = {"gpipe": 2, "1f1b": 2, "interleaved": 4, "interleaved-zero-bubble": 4, "zbv": 4}  # → layers


@with_meshes
def train_profiled(rank: int, runs: dict[Path, RunSpec]) -> None:
    for folder, spec in runs.items():
        Trainer(spec, folder, quiet=True).run()


def record(dataset: Path, folder: Path, ranks: int, schedules: dict[str, int]) -> dict[str, list[Path]]:
    """Both steps of a run with every schedule; the traces of each, by rank."""
    common = ("optim.steps=2", "log.profile=[1,2]", f"log.profile_ranks={list(range(ranks))}", "checkpoint.every=0")
    specs = {
        folder / name: layout(
            dataset, *common, f"parallel.pp={ranks}", f"parallel.schedule={name}", f"model.layers={layers}",
            "data.global_batch=4",
        )
        for name, layers in schedules.items()
    }  # fmt: skip
    on_ranks(ranks, train_profiled, specs)
    return {path.name: sorted((path / "traces").glob("*.json.gz")) for path in specs}


def by_hand(files: list[Path]) -> tuple[list[float], dict[tuple[int, str], float]]:
    """The idle share of each rank, and the mean seconds of a stage's passes, from the events of the files alone."""
    busy = [0.0 for _ in files]
    edges: defaultdict[int, list[float]] = defaultdict(list)
    lengths: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for rank, file in enumerate(files):
        content: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
        shown = [event for event in content["traceEvents"] if event.get("cat") == "user_annotation"]
        steps = {event["name"]: event for event in shown if event["name"].startswith("ProfilerStep#")}
        for event in shown:
            if not event["name"].startswith("stage/"):
                continue
            stage, kind, _ = event["name"].removeprefix("stage/").split()
            (number,) = (
                int(name.partition("#")[2])
                for name, step in steps.items()
                if step["ts"] <= event["ts"] < step["ts"] + step["dur"]
            )
            busy[rank] += event["dur"]
            begin = event["ts"] + content["baseTimeNanoseconds"] / 1e3
            edges[number] += [begin, begin + event["dur"]]
            lengths[int(stage), kind].append(event["dur"] / 1e6)
    whole = sum(max(times) - min(times) for times in edges.values())
    return [1 - own / whole for own in busy], {key: sum(own) / len(own) for key, own in lengths.items()}


def check(files: list[Path], schedule: str, ranks: int) -> None:
    traces = read_traces(files)
    spec = recorded_spec(traces)
    assert spec is not None and spec.parallel.schedule == schedule
    facts = with_schedule(pipeline_facts(traces, spec), spec)
    assert facts is not None and facts["schedule"] == schedule and facts["micro_batches"] == 4
    measured, lengths = by_hand(files)
    rows = facts["ranks"]
    assert [one["rank"] for one in rows] == [one["place"] for one in rows] == list(range(ranks))
    assert [one["measured"] for one in rows] == pytest.approx(measured, abs=1e-4)
    assert {(one["stage"], one["kind"]): one["seconds"] for one in facts["passes"]} == pytest.approx(lengths, rel=1e-3)
    virtual = spec.parallel.virtual_stages
    assert sum(one["passes"] for one in facts["passes"]) == sum(map(len, map(stage_passes, traces)))
    assert all(len(one["stages"]) == virtual and one["whole"] for one in rows)
    assert [one["schedule"] for one in rows] == describe(spec, None)[0]["idle"]["this_split"]  # of `plan pipeline`
    assert all(0 < one["replayed"] < 1 for one in rows)
    assert all(0 < one["of_step"] < one["measured"] for one in rows)


def test_two_ranks(dataset: Path, tmp_path: Path) -> None:
    for schedule, files in record(dataset, tmp_path, 2, {"1f1b": 2, "interleaved": 4}).items():
        check(files, schedule, 2)


@pytest.mark.slow
def test_two_ranks_of_other_schedules(dataset: Path, tmp_path: Path) -> None:
    for schedule, files in record(dataset, tmp_path, 2, {"gpipe": 2, "zbv": 4}).items():
        check(files, schedule, 2)


@pytest.mark.slow
def test_four_ranks(dataset: Path, tmp_path: Path) -> None:
    for schedule, files in record(dataset, tmp_path, 4, {"1f1b": 4, "interleaved-zero-bubble": 8}).items():
        check(files, schedule, 4)


@pytest.mark.parametrize("schedule, layers", SCHEDULES.items())
def test_replaying_equal_passes_gives_the_planners_bubble(schedule: str, layers: int) -> None:
    """(p−1)/(v·m+p−1) and so on, for passes of equal length."""
    spec = RunSpec.from_dict(
        {
            "model": {"preset": "tiny", "layers": layers},
            "parallel": {"pp": 2, "schedule": schedule},
            "data": {"micro_batch": 1, "global_batch": 8},
        }
    )
    stages = 2 * spec.parallel.virtual_stages
    passes = [
        {"stage": stage, "kind": kind, "seconds": 2.0 if kind == "B" else 1.0, "passes": 8}
        for stage in range(stages)
        for kind in "FBIW"
    ]
    ranks = [{"rank": place, "place": place} for place in range(2)]
    facts = with_schedule({"ranks": ranks, "passes": passes}, spec)
    assert facts is not None
    share, _ = ideal_idle(schedule, 2, spec.parallel.virtual_stages, 8, {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
    assert [one["replayed"] for one in facts["ranks"]] == pytest.approx([share, share])
    cut = with_schedule({"ranks": ranks, "passes": passes[4:]}, spec)  # nothing of stage 0 was recorded
    assert cut is not None and [one["replayed"] for one in cut["ranks"]] == [None, None]


def device_rank(rank: int, late: float) -> list[Event]:
    """A forward and a backward pass of a GPU: launches within the ranges of the host, kernels after them.

    Compute runs from 100 to 300 and from 500 to 900 µs after `late`. The backward pass launches from another thread;
    the message between them, and the kernel of the optimizer after them, belong to no pass.
    """
    return [
        span("user_annotation", "ProfilerStep#1", 0, 2000),
        span("user_annotation", f"stage/{rank} F 0", late + 10, 50),
        launch(late + 20, 1),
        kernel("gemm", late + 100, 150, correlation=1),
        launch(late + 30, 2),
        kernel("add", late + 260, 40, correlation=2),
        launch(late + 70, 3),
        kernel("ncclDevKernel_SendRecv", late + 310, 150, stream=20, correlation=3),
        span("user_annotation", f"stage/{rank} B 0", late + 80, 60),
        {**launch(late + 90, 4), "tid": 2},
        kernel("gemm", late + 500, 400, correlation=4),
        launch(late + 150, 5),
        kernel("adam", late + 950, 50, correlation=5),
    ]


def test_passes_of_a_device_last_as_their_kernels(tmp_path: Path) -> None:
    """One rank computes 600 of 800 µs alone; of two, 300 µs apart, the window is 1,100 µs."""
    files = [
        write_trace(
            tmp_path / f"rank{rank}.json",
            device_rank(rank, 300.0 * rank),
            host_name="one",
            distributedInfo={"rank": rank},
        )
        for rank in range(2)
    ]
    traces = [read_trace(file) for file in files]
    assert [(one.kind, one.start, one.end) for one in stage_passes(traces[0])] == [
        ("F", 100_000, 300_000),
        ("B", 500_000, 900_000),
    ]
    both = bubbles(traces, None)
    assert [one.share for one in both] == pytest.approx([1 - 600 / 1100] * 2)
    assert [one.step_share for one in both] == pytest.approx([500 / 2000] * 2)
    alone = RunSpec.from_dict({"model": {"preset": "tiny"}, "parallel": {"pp": 2}})
    (one,) = bubbles(traces[:1], alone)  # the other rank of the pipeline was not recorded
    assert not one.whole and one.share == pytest.approx(1 - 600 / 800)
    assert pass_seconds(traces)[0] == {"stage": 0, "kind": "B", "passes": 1, "seconds": pytest.approx(400e-6)}


def test_a_trace_without_stages_has_no_pipeline(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.json", [span("cpu_op", "aten::mm", 0, 10)]))
    assert pipeline_facts([trace], None) is None and with_schedule(None, None) is None
    traced = pipeline_facts([read_trace(write_trace(tmp_path / "r.json", device_rank(0, 0.0)))], None)
    assert traced is not None
    _, ((*_, replayed, planned, _),) = bubble_table(traced)
    assert (replayed, planned) == ("-", "-")  # not known without a spec
