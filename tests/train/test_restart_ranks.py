"""Real ranks under real agents, killed and asked to go: each run ends bitwise where the one that was let alone ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from layouts import Job, do, layout
from lmworks.record import RunFolder, read_metrics
from tiny import curve, differences, events, saved, start, write_spec

FSDP2 = ("parallel.dp=2", "parallel.strategy=fsdp2")
LENGTH = ("optim.steps=60", "checkpoint.every=5", "checkpoint.keep=0")


def wait_until(what: Callable[[], object], process: subprocess.Popen[str], patience_s: float = 120) -> None:
    give_up = time.monotonic() + patience_s
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.01)


def came_to(run: Path, step: int) -> Callable[[], bool]:
    path = RunFolder(run).metrics_path
    return lambda: path.exists() and any(line["step"] >= step for line in read_metrics(path))


def ranks_of(agent: int) -> dict[int, int]:
    """The process of each rank that is there now."""
    found = {}
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(line.removeprefix(b"RANK=")): int(pid) for line in environment if line.startswith(b"RANK=")}
    return found


def is_like(run: Path, straight: Path) -> bool:
    return differences(saved(run), saved(straight)) == [] and curve(run) == curve(straight)


@pytest.fixture(scope="module")
def straight(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    do([Job(run, layout(dataset, *FSDP2, *LENGTH))])
    return run


@pytest.fixture
def spec(dataset: Path, tmp_path: Path) -> Path:
    return write_spec(layout(dataset, *FSDP2, *LENGTH), tmp_path / "spec.toml")


@pytest.mark.slow  # so does tests/prove/test_chaos.py every day, and compares more
def test_killed_rank_restarts_and_run_is_bitwise_equal(spec: Path, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("train", spec, "--run-dir", run, "--max-restarts", "1")
    wait_until(came_to(run, 7), process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "lmworks: rank 1 was ended by SIGKILL; started again (1 of 1)" in said.splitlines()
    (again,) = events(run, "restart")
    assert (again["cause"], again["attempt"]) == ("rank 1 was ended by SIGKILL", 1)
    assert again["step"] % 5 == 0 and 0 <= again["lost"] < 10
    assert is_like(run, straight)


@pytest.mark.slow
def test_torchrun_restart_resumes_run(spec: Path, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "2", "-m", "lmworks.train", str(spec), "--run-dir", str(run)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for kill, rank in enumerate((0, 1)):
        wait_until(came_to(run, 12 + 20 * kill), process)
        os.kill(ranks_of(process.pid)[rank], signal.SIGKILL)
        wait_until(lambda count=kill + 1: len(events(run, "restart")) == count, process)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert [(event["restarts"], event["attempt"]) for event in events(run, "restart")] == [(1, 1), (2, 2)]
    assert is_like(run, straight)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_killed_agent_makes_ranks_save_and_end(spec: Path, straight: Path, tmp_path: Path, asynchronous: str) -> None:
    run = tmp_path / "run"
    saves = f"checkpoint.asynchronous={asynchronous}"
    process = start("train", spec, saves, "--run-dir", run, "--max-restarts", "1")
    wait_until(came_to(run, 7), process)
    process.kill()
    _, said = process.communicate(timeout=120)  # its pipes are closed when the ranks are gone
    assert not RunFolder(run).is_locked()
    (stopped,) = events(run, "interrupt")
    assert stopped["error"].startswith("the agent that started the ranks was killed: stopped after step ")
    assert said.splitlines() == [f"lmworks: {stopped['error']}"]  # and no stack
    assert (run / "checkpoints" / f"step-{stopped['step']:06d}").exists()
    process = start("resume", run)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert is_like(run, straight)


@pytest.mark.slow
def test_sigterm_saves_and_exits_75(spec: Path, straight: Path, tmp_path: Path) -> None:
    """As a scheduler does it: the command and all its ranks; the command hands it on, so the ranks get two."""
    run = tmp_path / "run"
    process = start("train", spec, "--run-dir", run, "--max-restarts", "3")
    wait_until(came_to(run, 7), process)
    for pid in (*ranks_of(process.pid).values(), process.pid):
        os.kill(pid, signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75 and "started again" not in said
    (stopped,) = events(run, "interrupt")
    assert saved(run)["step"] == stopped["step"]
    process = start("resume", run)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert is_like(run, straight)


@pytest.mark.slow
def test_single_rank_restarts_bitwise(dataset: Path, tmp_path: Path) -> None:
    one = layout(dataset, *LENGTH, "fault.max_restarts=1")
    do([Job(tmp_path / "straight", one)])  # without an agent
    run = tmp_path / "run"
    process = start("train", write_spec(one, tmp_path / "spec.toml"), "--run-dir", run)
    wait_until(came_to(run, 7), process)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert len(events(run, "restart")) == 1
    assert is_like(run, tmp_path / "straight")


@pytest.mark.slow
def test_elastic_resume_from_two_to_one_rank(dataset: Path, straight: Path, tmp_path: Path) -> None:
    """The same samples in every step; sums in another order: losses within 1e-6 of each other after a few steps."""
    spec = layout(dataset, *FSDP2, *LENGTH, "optim.steps=12", "fault.elastic=true")
    do([Job(tmp_path / "straight", spec)])
    run = tmp_path / "run"
    process = start("train", write_spec(spec, tmp_path / "spec.toml"), "--run-dir", run)
    wait_until(came_to(run, 6), process)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == 137
    process = start("resume", run, "--ranks", "1")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert events(run, "resume")[-1]["ranks"] == 1
    for one, other in zip(curve(run), curve(tmp_path / "straight"), strict=True):
        assert one[1] == pytest.approx(other[1], rel=1e-6), one[0]
