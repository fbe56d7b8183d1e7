"""A run under way is profiled on request: the same steps on every rank, and the same numbers as without."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from layouts import layout, with_meshes
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import RunFolder, read_metrics
from lmworks.record.profile_request import ProfileRequest, remove_request, request_path, write_request
from lmworks.spec import RunSpec
from lmworks.train import Trainer
from tiny import before_step, curve, events, make_spec, train, write_spec

FSDP2 = ("parallel.dp=2", "parallel.strategy=fsdp2")
ENDLESS = ("optim.schedule=constant", "optim.warmup=0", "optim.steps=100000", "checkpoint.every=0")


def spans(trace: Path) -> list[str]:
    """The names that the program gave, in the order in which they begin."""
    content: dict[str, Any] = json.loads(gzip.decompress(trace.read_bytes()))
    found = [event for event in content["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: float(event["ts"]))]


def profiled_steps(trace: Path) -> list[int]:
    return [int(name.partition("#")[2]) for name in spans(trace) if name.startswith("ProfilerStep#")]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "traces").glob("*"))


# --- ranks agree ------------------------------------------------------------------------------------------


@with_meshes
def train_with_requests(rank: int, runs: dict[Path, tuple[RunSpec, dict[int, ProfileRequest | None]]]) -> None:
    """`requests`: before a step, what rank 0 finds from then on (None: it was withdrawn)."""
    for path, (spec, requests) in runs.items():
        trainer = Trainer(spec, path, quiet=True)
        for number, request in requests.items() if rank == 0 else ():
            before_step(trainer, number, partial(put, trainer.folder, request))
        trainer.run()


def put(folder: RunFolder, request: ProfileRequest | None) -> None:
    if request is None:
        remove_request(folder)
    else:
        write_request(folder, request)


@pytest.mark.slow  # tests/train/test_profile.py traces ranks, the tests above ask one
def test_all_ranks_profile_the_same_steps_and_compute_the_same(dataset: Path, tmp_path: Path) -> None:
    spec = layout(dataset, *FSDP2, "optim.steps=9", "checkpoint.every=0")
    planned = spec.replace(log=spec.log.replace(profile=[4, 5], profile_ranks=[0]))
    asked, late = ProfileRequest("all", 2), ProfileRequest("late", 9, [1])
    jobs: dict[str, tuple[RunSpec, dict[int, ProfileRequest | None]]] = {
        "plain": (spec, {}),
        "asked": (spec, {2: asked, 5: late}),
        "withdrawn": (spec, {2: asked, 3: None}),
        "beside": (planned, {2: asked}),
    }
    on_ranks(2, train_with_requests, {tmp_path / name: job for name, job in jobs.items()})
    runs = {name: tmp_path / name for name in jobs}

    traces = [runs["asked"] / "traces" / f"rank{rank}-steps-4-5.json.gz" for rank in (0, 1)]
    last = runs["asked"] / "traces" / "rank1-steps-8-9.json.gz"  # after the first request, as many as are left
    assert names(runs["asked"]) == [traces[0].name, traces[1].name, last.name]
    assert [profiled_steps(trace) for trace in (*traces, last)] == [[4, 5], [4, 5], [8, 9]]
    assert names(runs["withdrawn"]) == [] and events(runs["withdrawn"], "profile") == []
    # Steps of log.profile come first; what was asked for follows.
    assert names(runs["beside"]) == ["rank0-steps-4-5.json.gz", "rank0-steps-6-7.json.gz", "rank1-steps-6-7.json.gz"]
    keys = ("id", "first", "last", "ranks")
    recorded = [tuple(event[key] for key in keys) for event in events(runs["asked"], "profile")]
    assert recorded == [("all", 4, 5, [0, 1]), ("late", 8, 9, [1])]
    for run in runs.values():
        assert not request_path(RunFolder(run)).exists()
        assert curve(run) == curve(runs["plain"])  # bitwise


def test_spans_are_nested_and_named(dataset: Path, tmp_path: Path) -> None:
    """Two micro-batches of two layers; with recomputation the backward pass runs the layers again."""
    spec = layout(dataset, "log.profile=[2,2]", "optim.steps=3", "checkpoint.every=2", "data.micro_batch=2")
    train(spec, tmp_path / "run")
    (trace,) = (tmp_path / "run" / "traces").iterdir()
    micro_batch = [
        "phase/forward", "layer/0", "layer/1", "phase/backward", "layer/1 backward", "layer/0 backward",
    ]  # fmt: skip
    found = [name for name in spans(trace) if not name.startswith(("Optimizer.", "module/"))]
    save = found.index("phase/checkpoint")
    assert found[:save] == [
        "ProfilerStep#2", "phase/input", "micro_batch/0", *micro_batch, "micro_batch/1", *micro_batch,
        "phase/communication", "phase/optimizer",
    ]  # fmt: skip
    assert set(found[save:]) == {"phase/checkpoint"}  # which belongs to the step before it
    whole = spans(trace)
    first = whole[whole.index("layer/0") + 1 : whole.index("layer/1")]
    assert [name.removeprefix("module/") for name in first] == [
        "attention_norm", "attention", "attention.q", "attention.k", "attention.v", "attention.out",
        "mlp_norm", "mlp", "mlp.gate", "mlp.up", "mlp.down",
    ]  # fmt: skip
    assert whole.count("module/embed") == whole.count("module/norm") == 2  # once a micro-batch

    content = json.loads(gzip.decompress(trace.read_bytes()))
    assert content["lmworks"]["steps"] == [2, 2] and content["lmworks"]["spec"]["optim"]["steps"] == 3
    timed = [event for event in content["traceEvents"] if event.get("cat") == "user_annotation"]
    assert_nested([(float(event["ts"]), float(event["dur"])) for event in timed])


def assert_nested(ranges: list[tuple[float, float]]) -> None:
    """None ends within another that began after it."""
    open_until: list[float] = []
    for start, seconds in sorted(ranges, key=lambda one: (one[0], -one[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or start + seconds <= open_until[-1] + 1e-3
        open_until.append(start + seconds)


def test_nothing_stays_installed_after_the_last_step(dataset: Path, tmp_path: Path) -> None:
    from lmworks.record import phase

    listeners = list(phase.listeners)
    trainer = train(layout(dataset, "log.profile=[1,2]"), tmp_path / "run")
    assert phase.listeners == listeners
    assert all(module._compiled_call_impl is None for module in trainer.model.modules())


def test_the_event_is_written_before_the_request_goes(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`profile attach` looks for the one, then for the other."""
    trainer = Trainer(layout(dataset, "optim.steps=5", "checkpoint.every=0"), tmp_path / "run", quiet=True)
    before_step(trainer, 2, partial(put, trainer.folder, ProfileRequest("all", 1)))
    removed_after = []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "profile-request.json" and path.exists():
            removed_after.append([event["id"] for event in events(tmp_path / "run", "profile")])
        os.unlink(path) if path.exists() or not missing_ok else None

    monkeypatch.setattr(Path, "unlink", unlink)
    trainer.run()
    assert removed_after == [["all"]]


def test_request_of_a_killed_attempt_is_dropped(dataset: Path, tmp_path: Path) -> None:
    from tiny import Crash, crash, resume

    run = tmp_path / "run"
    trainer = Trainer(make_spec(dataset, "optim.steps=6"), run, quiet=True)
    before_step(trainer, 3, crash)
    with pytest.raises(Crash):
        trainer.run()
    write_request(RunFolder(run), ProfileRequest("old", 2))
    resume(run)
    assert events(run, "profile") == [] and not request_path(RunFolder(run)).exists()


# --- the command, beside a run in processes of its own ----------------------------------------------------


def wait_for(condition: Callable[[], bool], what: str, patience_s: float = 120) -> None:
    give_up = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < give_up, f"no {what} after {patience_s} s"
        time.sleep(0.05)


def steps_of(run: Path) -> int:
    lines = read_metrics(RunFolder(run).metrics_path)
    return lines[-1]["step"] if lines else 0


def begin(dataset: Path, tmp_path: Path, *overrides: str) -> tuple[Path, Forked]:
    run, file = tmp_path / "run", write_spec(layout(dataset, *ENDLESS), tmp_path / "spec.toml")
    process = Forked("train", file, *overrides, "--run-dir", run)
    wait_for(lambda: steps_of(run) >= 2, "step 2")
    return run, process


def lmworks(*arguments: str | Path) -> tuple[int | None, str, str]:
    process = Forked(*arguments)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.slow
def test_attach_to_two_ranks_under_way(dataset: Path, tmp_path: Path) -> None:
    run, process = begin(dataset, tmp_path, *FSDP2)
    try:
        code, out, err = lmworks("profile", "attach", run, "--steps", "3", "--json")
        assert code == 0, err
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
    traces = [Path(trace) for trace in json.loads(out)["traces"]]
    assert "<h2>One step</h2>" in Path(json.loads(out)["page"]).read_text()
    (asked,) = events(run, "profile")
    assert [profiled_steps(trace) for trace in traces] == [list(range(asked["first"], asked["first"] + 3))] * 2
    taken = asked["last"] + 1
    spec = layout(dataset, *ENDLESS, *FSDP2, f"optim.steps={taken}")
    on_ranks(2, train_with_requests, {tmp_path / "plain": (spec, {})})
    assert [line[:4] for line in curve(run)[:taken]] == [line[:4] for line in curve(tmp_path / "plain")]


def test_interrupted_attach_withdraws_its_request(dataset: Path, tmp_path: Path) -> None:
    """The run is stopped (SIGSTOP), so that it cannot take the request; and that is what a third attach says."""
    run, process = begin(dataset, tmp_path)
    request = request_path(RunFolder(run))
    process.send_signal(signal.SIGSTOP)
    try:
        waiting = Forked("profile", "attach", run)
        wait_for(request.exists, "request")
        code, _, err = lmworks("profile", "attach", run)
        assert (code, err) == (2, f"lmworks: error: {run} has a request to profile already; wait until it is done\n")
        assert request.exists()
        waiting.send_signal(signal.SIGINT)
        waiting.communicate()
        assert waiting.returncode == 130 and not request.exists()
        code, _, err = lmworks("profile", "attach", run, "--timeout", "1")
        assert code == 1 and f"{run}: no step for 1 s; the request is withdrawn" in err
        assert not request.exists()
        code, _, err = lmworks("profile", "attach", run, "--ranks", "0,1")
        assert (code, err) == (2, f"lmworks: error: --ranks 0,1: {run} trains on rank 0 alone\n")
        waiting = Forked("profile", "attach", run)
        wait_for(request.exists, "request")
        process.kill()
        _, err = waiting.communicate()
        assert waiting.returncode == 1
        assert f"{run}: the run ended before it took the request: no process trains it; no step was profiled" in err
        assert not request.exists()
    finally:
        process.kill()
    code, _, err = lmworks("profile", "attach", run)
    assert (code, err) == (
        2, f"lmworks: error: {run} is not running: no process trains it; there is no step to profile\n",
    )  # fmt: skip


def test_attach_names_the_end_of_a_finished_run(dataset: Path, tmp_path: Path) -> None:
    train(make_spec(dataset, "optim.steps=2"), tmp_path / "run")
    code, _, err = lmworks("profile", "attach", tmp_path / "run")
    assert code == 2 and "is not running: it has finished after step 2" in err
