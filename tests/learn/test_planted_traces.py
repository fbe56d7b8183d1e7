"""Traces with a planted bottleneck: what they hold could have happened, and LMWorks names each of them right."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from lmworks.diagnose.verdict import VERDICTS, judge
from lmworks.learn.answers import failure_of, load, write_references
from lmworks.learn.checking.expect import Mismatch
from lmworks.learn.checks import CHECKS
from lmworks.learn.planted_traces import BOTTLENECKS, WORKSPACE_SEED, planted_jobs, planted_traces, write_job
from lmworks.learn.workspace import Workspace
from lmworks.trace import read_traces
from lmworks.trace.summary import summarise

FILE = "src/profiling/bottleneck.py"


@pytest.mark.parametrize("bottleneck", BOTTLENECKS)
def test_a_trace_is_in_order(bottleneck: str) -> None:
    """A stream does one thing at a time, after its launch; an all-reduce ends on all ranks at once."""
    ends = []
    for document in planted_traces(bottleneck, 3):
        events = [one for one in document["traceEvents"] if one["ph"] == "X"]
        launched = {one["args"]["correlation"]: one["ts"] for one in events
                    if one["cat"] == "cuda_runtime" and "correlation" in one["args"]}  # fmt: skip
        gpu = [one for one in events if "stream" in one["args"]]
        assert len({one["args"]["correlation"] for one in gpu}) == len(gpu) == len(launched)
        assert all(one["ts"] > launched[one["args"]["correlation"]] and one["dur"] > 0 for one in gpu)
        for stream in (7, 20):
            on_stream = [one for one in gpu if one["tid"] == stream]
            assert all(one["ts"] + one["dur"] <= after["ts"] for one, after in pairwise(on_stream))
        ends.append([one["ts"] + one["dur"] for one in gpu if one["name"].startswith("nccl")])
    assert ends[0] == pytest.approx(ends[1], abs=0.01) and len(ends[0]) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 12))  # those of seed 0 are beside the solution's names (test_checks.py)
def test_lmworks_names_what_is_planted(seed: int, tmp_path: Path) -> None:
    found = {}
    for letter, bottleneck, job in planted_jobs(seed):
        traces = read_traces(write_job(tmp_path / letter, job))
        found[bottleneck] = judge(traces, summarise(traces)).verdict
    assert found == {one: one for one in BOTTLENECKS} and set(BOTTLENECKS) < set(VERDICTS)


def test_a_workspace_has_the_traces_and_the_names(tmp_path: Path) -> None:
    """Letters do not follow the order of the names, and another seed has another order and other durations."""
    workspace = Workspace.create(tmp_path / "course")
    jobs = planted_jobs(WORKSPACE_SEED)
    for letter, _, job in jobs:
        files = sorted((workspace.folder / "traces" / letter).iterdir())
        assert [file.name for file in files] == ["rank0.json", "rank1.json"]
        assert [json.loads(file.read_text()) for file in files] == job
    names, fresh = ([name for _, name, _ in each] for each in (jobs, planted_jobs(1)))
    assert (
        sorted(names) == sorted(fresh) == sorted(BOTTLENECKS) and len({*map(tuple, (names, fresh, BOTTLENECKS))}) == 3
    )
    assert planted_traces("healthy", WORKSPACE_SEED) != planted_traces("healthy", 1)
    write_references(tmp_path / "lmworks-learn-reference")
    module = load(tmp_path / "lmworks-learn-reference", FILE)
    assert tuple(module.BOTTLENECKS) == BOTTLENECKS


def test_a_trace_that_is_named_wrongly_is_shown_with_its_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A threshold in seconds is right for the small cases, which take ten, and wrong for the traces."""
    monkeypatch.chdir(tmp_path)
    write_references(tmp_path / "lmworks-learn-wrong")
    file = tmp_path / "lmworks-learn-wrong" / FILE
    right = "0.1 * sum(rank.end - rank.start for rank in ranks)"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, "2"))
    wrong = failure_of(CHECKS["bottleneck"], tmp_path / "lmworks-learn-wrong", FILE)
    assert isinstance(wrong, Mismatch)
    assert (wrong.case, wrong.expected, wrong.got) == ("traces/A", "memory_bound", "healthy")
    assert "traces/A" in wrong.remark and "lmworks profile trace" in wrong.remark
    assert list(wrong.inputs) == ["shares", "GPU", "kernels"]
    first, *others = wrong.inputs["shares"].split(", ")
    assert first == "memory_bound 29%" and all(one.split()[1] in ("0%", "1%") for one in others)
    assert wrong.inputs["GPU"].startswith("compute 98%, ")
