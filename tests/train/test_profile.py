"""`log.profile` leaves traces of the steps and ranks that were asked for."""

from __future__ import annotations

import errno
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from layouts import layout, with_meshes
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.profiler import recorder
from lmworks.spec import LogSpec, RunSpec, SpecError
from lmworks.trace import read_trace
from lmworks.train import Trainer
from lmworks.train.profile import Profiler, Window
from tiny import Crash, before_step, crash

PASSES = ("forward", "backward")
PROFILE = ("log.profile=[3,4]", "log.profile_ranks=[0,1]", "optim.steps=5")


@with_meshes
def train_profiled(rank: int, runs: dict[Path, RunSpec]) -> None:
    for folder, spec in runs.items():
        Trainer(spec, folder, quiet=True).run()


def names(trace: Path) -> set[str]:
    """Of all that a Chrome trace shows."""
    content: dict[str, Any] = json.loads(gzip.decompress(trace.read_bytes()))
    return {event["name"] for event in content["traceEvents"] if event.get("ph") == "X"}


def traces(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "traces").iterdir())


def test_profile_traces_chosen_steps_and_ranks(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    spec = layout(dataset, *PROFILE, "parallel.dp=2", "parallel.strategy=fsdp2")
    on_ranks(2, train_profiled, {run: spec, tmp_path / "second": spec.replace(log=LogSpec(profile=[1, 1]))})
    assert traces(run) == ["rank0-steps-3-4.json.gz", "rank1-steps-3-4.json.gz"]
    assert traces(tmp_path / "second") == ["rank0-steps-1-1.json.gz"]  # only rank 0 unless others are named
    for path in (run / "traces").iterdir():
        shown = names(path)
        assert {"ProfilerStep#3", "ProfilerStep#4"} <= shown and not {"ProfilerStep#2", "ProfilerStep#5"} & shown
        assert any("all_gather" in name for name in shown) and any("reduce_scatter" in name for name in shown)
        assert b"[memory]" in gzip.decompress(
            path.read_bytes()
        )  # every allocation, where there is no device to take a snapshot of


def test_failed_run_writes_partial_trace(dataset: Path, tmp_path: Path) -> None:
    trainer = Trainer(layout(dataset, *PROFILE, "log.profile_ranks=[0]"), tmp_path / "run", quiet=True)
    before_step(trainer, 4, crash)
    with pytest.raises(Crash):
        trainer.run()
    assert traces(tmp_path / "run") == ["rank0-steps-3-4.json.gz"]
    assert "ProfilerStep#3" in names(tmp_path / "run" / "traces" / "rank0-steps-3-4.json.gz")


def test_memory_history_ends_though_its_snapshot_cannot_be_written(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every later allocation of the run would be recorded."""
    ended = []

    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled: ended.append(enabled))
    trainer = Trainer(layout(dataset), tmp_path / "run", quiet=True)
    trainer.build()
    profiler = Profiler(trainer.spec, trainer.folder, torch.device("cuda"), trainer.parallel_model)
    with pytest.raises(OSError, match="No space left"):
        profiler.write(recorder(torch.device("cpu")), Window(1, 2))
    assert ended == [None]


@pytest.mark.parametrize(
    "key, said",
    [
        ("log.profile=[4,3]", r"log.profile = \[4, 3\] must be \[first step, last step\]"),
        ("log.profile=[0,2]", r"log.profile = \[0, 2\] must be"),
        ("log.profile=[3]", r"log.profile = \[3\] must be"),
        ("log.profile=[4,9]", r"log.profile = \[4, 9\] begins after the last step: optim.steps = 3"),
        ("log.profile_ranks=[0,2]", r"log.profile_ranks = \[0, 2\]: the layout has ranks 0 to 1"),
        ("log.profile_ranks=[-1]", r"log.profile_ranks = \[-1\]"),
    ],
)
def test_empty_profile_ranges_are_rejected(dataset: Path, key: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        layout(dataset, "log.profile=[1,2]", "parallel.dp=2", key)


@pytest.mark.slow
def test_profiler_is_silent() -> None:
    """In a process of its own: the profiler asks once how much it should say."""
    code = (
        "import torch; from lmworks.parallel.profiler import recorder\n"
        "with recorder(torch.device('cpu')): torch.ones(3) + 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_step_holds_its_own_passes(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are launched behind the update of the step before, as on a GPU."""
    monkeypatch.setattr(Trainer, "is_async", True)
    spec = layout(dataset, "log.profile=[3,6]", "optim.steps=7")
    Trainer(spec, tmp_path / "run", quiet=True).run()
    trace = read_trace(next((tmp_path / "run" / "traces").glob("*.json.gz")))
    events, found = trace.events, []
    for step in trace.host_steps:
        inside = (events.start >= step.start) & (events.start < step.end)
        found.append([int((inside & trace.named(re.compile(f"^phase/{name}$"))).sum()) for name in PASSES])
    assert [step.number for step in trace.host_steps] == [3, 4, 5, 6]
    assert found == [[spec.accumulation] * 2] * 4
