"""What cannot run is refused by one line before a rank or a run folder is made, and no rank is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from lmworks.cli import train as command
from lmworks.parallel import pipeline, world
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.precision import LossScale
from lmworks.parallel.preflight import check_requirements
from lmworks.parallel.world import init_distributed
from lmworks.record import RunFolder
from lmworks.spec import Cluster, LMWorksError, ParallelSpec, PrecisionSpec, SpecError, TrainingError, load_run
from lmworks.train import Trainer
from lmworks.train.device import pick_device
from tiny import make_spec


def test_wrong_world_size_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpecError, match="needs 4 ranks, but 2 were started") as error:
        init_distributed(ParallelSpec(tp=4), torch.device("cpu"))
    assert error.value.collective


def test_missing_gpu_reports_gpu_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device(Cluster()) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(TrainingError, match=r"there are 2; .* cluster\.device=cpu"):
        pick_device(Cluster())


def test_change_to_fp16_resets_loss_scale() -> None:
    scale = LossScale(PrecisionSpec(dtype="fp16", loss_scale=512.0))
    scale.load_state_dict(LossScale(PrecisionSpec(dtype="bf16")).state_dict())
    assert scale.scale == 512
    scale.load_state_dict({"scale": 64.0, "good": 3})
    assert (scale.scale, scale.good) == (64, 3)


@pytest.mark.parametrize("schedule", ["zbv", "1f1b"])
def test_schedules_unsupported_by_older_torch_are_rejected(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with 2.11, where the metadata of such a node is no attribute."""
    monkeypatch.setattr(pipeline, "splits_backward", lambda: False)
    spec = load_run(
        "tiny", ["model.layers=4", "parallel.pp=2", f"parallel.schedule={schedule}", "data.global_batch=32"]
    )
    if schedule == "1f1b":
        check_requirements(spec, torch.device("cpu"))
        return
    with pytest.raises(SpecError, match=r"parallel\.schedule = 'zbv' needs a newer PyTorch"):
        check_requirements(spec, torch.device("cpu"))


def test_used_folder_starts_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "spec.toml").write_text("")
    with mock.patch.object(command, "supervise") as start, pytest.raises(SpecError, match="already holds a run"):
        command.train("tiny", ["parallel.dp=2"], run_dir=tmp_path)
    start.assert_not_called()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("parallel.recompute=budget", "parallel.recompute_budget=1e-9"), "parallel.recompute_budget = 1e-09 GiB"),
        (("parallel.recompute=budget",), "fills the memory of a GPU: name it with cluster.gpu"),
        (("parallel.engine=deepspeed", "parallel.strategy=zero", "parallel.zero=1"), "needs DeepSpeed"),
        (("model.attention=flash", "cluster.device=cpu"), "'flash' needs a GPU, and this run is on cpu; use 'sdpa'"),
    ],
)
def test_unsupported_spec_creates_no_folder(
    overrides: tuple[str, ...], says: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(SpecError, match=says):
        Trainer(make_spec(dataset, *overrides), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def go_on(rank: int, run: Path) -> str:
    with pytest.raises(LMWorksError) as error:
        Trainer.resume(run, quiet=True).run()
    assert error.value.collective
    return str(error.value)


def test_locked_run_is_rejected_on_every_rank(dataset: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", make_spec(dataset, "parallel.dp=2"))
    with folder.locked():
        said = on_ranks(2, go_on, folder.path)
    assert said == [f"{folder.path} is in use: another process is training this run"] * 2


# --- how ranks end ---------------------------------------------------------------------------------

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked, and Linux alone knows how")
STARTER = """
import os, subprocess, sys
os.environ["LMWORKS_STARTED_BY"] = str(os.getpid())
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""
RANK = """
import time
from lmworks.record.parent_death import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(600)
"""


@ON_LINUX
def test_rank_ends_with_its_launcher() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER, RANK], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None and starter.stdout.readline() == "ready\n"
        starter.kill()
        starter.communicate(timeout=60)  # the pipe is closed when the rank is gone, too


@ON_LINUX
def test_rank_without_launcher_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from lmworks.record.parent_death import die_with_parent\ndie_with_parent()"
    monkeypatch.setenv("LMWORKS_STARTED_BY", "1")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == (
        143 if sys.platform == "linux" else 0
    )


@pytest.mark.parametrize(
    ("collective", "rank_lost", "is_shut_down"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_only_collective_errors_shut_down(collective: bool, rank_lost: bool, is_shut_down: bool) -> None:
    error = LMWorksError("")
    error.collective, error.rank_lost = collective, rank_lost
    with mock.patch.object(world, "shutdown") as shutdown, pytest.raises(LMWorksError), world.distributed_shutdown():
        raise error
    assert shutdown.called == is_shut_down
