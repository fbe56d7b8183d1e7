"""`lmworks profile train`: traces of every rank of a layout, of any method, with the phases of its step."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest

import post_training
from layouts import layout
from lmworks.bench.profile_train import profile_train
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import RunFolder, read_metrics
from lmworks.spec import RunSpec, SpecError, dump_toml
from lmworks.train import Trainer
from lmworks.train.signals import Interrupted, StopSignals
from tiny import events, make_spec, train
from typed import lmworks


def annotations(trace: Path) -> list[str]:
    content: dict[str, Any] = json.loads(gzip.decompress(trace.read_bytes()))
    found = [event for event in content["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: float(event["ts"]))]


def test_steps_after_warm_up_are_recorded_and_nothing_is_saved(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "checkpoint.every=1", "log.eval_every=1", "optim.steps=2")
    (trace,) = profile_train(spec, tmp_path / "run", steps=2, warm_up=1)
    names = annotations(trace)
    assert [name for name in names if name.startswith("ProfilerStep")] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert not {"phase/checkpoint", "phase/evaluate"} & set(names)
    assert not list((tmp_path / "run" / "checkpoints").glob("*")) and events(tmp_path / "run", "eval") == []
    assert [line["step"] for line in read_metrics(RunFolder(tmp_path / "run").metrics_path)] == [1, 2, 3, 4]


def test_stacks_adds_python_calls(dataset: Path, tmp_path: Path) -> None:
    (trace,) = profile_train(make_spec(dataset), tmp_path / "run", steps=1, warm_up=0, stacks=True)
    content = json.loads(gzip.decompress(trace.read_bytes()))
    calls = {event["name"] for event in content["traceEvents"] if event.get("cat") == "python_function"}
    assert any("train_step" in call for call in calls)


def test_the_page_lies_beside_the_traces(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec.toml").write_text(dump_toml(make_spec(dataset).to_dict()))
    options = ["--steps", "1", "--warmup", "0", "--run-dir", str(tmp_path / "run"), "--json"]
    code, out, err = lmworks(capsys, "profile", "train", str(tmp_path / "spec.toml"), *options)
    assert code == 0, err
    facts = json.loads(out)
    page = tmp_path / "run" / "traces" / "steps-1-1.html"
    assert facts["page"] == str(page) and facts["verdict"] in page.read_text()


def test_missing_nsys_is_said_in_one_line(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = lmworks(capsys, "profile", "train", "tiny", f"data.path={dataset}", "--nsys")
    assert code == 2
    assert err.splitlines() == [
        "lmworks: error: --nsys: nsys is not on the PATH; install NVIDIA Nsight Systems, or leave --nsys out"
    ]


def test_step_of_an_online_method_shows_generation_and_scores(tmp_path: Path) -> None:
    spec = post_training.make_spec(tmp_path, "grpo")
    (trace,) = profile_train(spec, tmp_path / "run", steps=1, warm_up=0)
    names = [name for name in annotations(trace) if name.startswith(("ProfilerStep", "phase/"))]
    order = [names.index(name) for name in ("ProfilerStep#1", "phase/generate", "phase/reward", "phase/forward")]
    assert order == sorted(order) and "phase/optimizer" in names


def test_passes_of_a_pipeline_are_named(dataset: Path, tmp_path: Path) -> None:
    """1F1B of two stages and two micro-batches; stages do not share a micro-batch's span, so there is none."""
    spec = layout(dataset, "parallel.pp=2", "parallel.schedule=1f1b", "data.micro_batch=2")
    traces = on_ranks(2, profile_on_rank, spec, tmp_path / "run")[0]
    for rank, trace in enumerate(traces):
        passes = [name for name in annotations(trace) if name.startswith("stage/")]
        warm_up = ["F 0", "F 1", "B 0", "B 1"] if rank == 0 else ["F 0", "B 0", "F 1", "B 1"]
        assert passes == [f"stage/{rank} {name}" for name in warm_up]
        assert not any(name.startswith("micro_batch") for name in annotations(trace))


def profile_on_rank(rank: int, spec: RunSpec, run: Path) -> list[Path]:
    return profile_train(spec, run, steps=1, warm_up=0)


# --- NVTX -------------------------------------------------------------------------------------------------


def test_nvtx_names_every_step(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.cuda.nvtx would be given, on a machine without it: pushed and popped in pairs."""
    open_ranges: list[str] = []
    pushed: list[str] = []

    @contextmanager
    def recorded(name: str) -> Iterator[None]:
        pushed.append("/".join([str(len(open_ranges)), name]))
        open_ranges.append(name)
        yield
        assert open_ranges.pop() == name  # as range_pop does: the last one

    monkeypatch.setattr("lmworks.train.profile.nvtx_ranges", lambda device: recorded)
    monkeypatch.setattr("lmworks.train.trainer.nvtx_ranges", lambda device: recorded)
    spec = make_spec(dataset, "optim.steps=2", "log.nvtx=true", "log.profile=[2,2]", "data.global_batch=2")
    trainer = train(spec, tmp_path / "run")
    step = [
        "1/phase/input", "1/micro_batch/0", "2/phase/forward", "3/layer/0", "2/phase/backward", "3/layer/0 backward",
        "1/phase/communication", "1/phase/optimizer",
    ]  # fmt: skip
    second = pushed.index("0/ProfilerStep#2")
    assert pushed[:second] == ["0/ProfilerStep#1", *step]
    assert pushed[second : second + 9] == ["0/ProfilerStep#2", *step]
    assert open_ranges == [] and all(block._compiled_call_impl is None for block in trainer.model.layers())
    assert annotations(tmp_path / "run" / "traces" / "rank0-steps-2-2.json.gz")[0] == "ProfilerStep#2"  # beside it


def test_nvtx_needs_a_gpu(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"log.nvtx = true: Nsight Systems records GPUs, and this run is on the CPU"):
        Trainer(make_spec(dataset, "log.nvtx=true", "cluster.device=cpu"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_interrupted_recording_is_not_resumed(dataset: Path, tmp_path: Path) -> None:
    """`lmworks resume` would train the spec to its end."""

    class Stopping(StopSignals):
        def __enter__(self) -> Self:
            entered = super().__enter__()
            self.signal = signal.SIGINT
            return entered

    with mock.patch("lmworks.train.trainer.StopSignals", Stopping), pytest.raises(Interrupted) as stopped:
        profile_train(make_spec(dataset), tmp_path / "run", steps=2, warm_up=1)
    assert "choose another --run-dir" in str(stopped.value) and "resume" not in str(stopped.value)
    assert stopped.value.exit_code == 128 + signal.SIGINT
