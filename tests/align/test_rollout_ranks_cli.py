"""`lmworks train` with rollout ranks: ranks that are killed, and a run that is asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmworks.record import RunFolder, read_metrics
from post_training import make_spec
from tiny import write_spec

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A run of a trainer and a rollout rank that has taken a few steps."""
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    often = ["optim.steps=5000", "checkpoint.every=50", "optim.schedule=constant", "cluster.device=cpu"]
    path = write_spec(make_spec(tmp_path, "grpo", "align.rollout_ranks=1", *often), tmp_path / "spec.toml")
    command = [sys.executable, "-m", "lmworks", "train", path, "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 240
        while (
            not (tmp_path / "run" / "metrics.jsonl").exists() or len(read_metrics(tmp_path / "run/metrics.jsonl")) < 6
        ):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield process
    finally:
        process.kill()


def rank_of(job: subprocess.Popen[str], rank: int) -> int:
    """The process of a rank."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        if parent == job.pid and f"RANK={rank}".encode() in variables:
            return int(path.name)
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_when_one_is_killed(rank: int, job: subprocess.Popen[str], tmp_path: Path) -> None:
    other, began = rank_of(job, 1 - rank), time.monotonic()
    os.kill(rank_of(job, rank), signal.SIGKILL)
    _, errors = job.communicate(timeout=60)
    assert job.returncode and f"rank {rank} was ended by SIGKILL; the run can be resumed" in errors, errors
    assert time.monotonic() - began < 20 and not Path(f"/proc/{other}").exists()
    assert "Traceback" not in errors


def test_a_run_that_is_asked_to_stop_saves_the_answers_under_way(job: subprocess.Popen[str], tmp_path: Path) -> None:
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 75, errors
    events = RunFolder(tmp_path / "run").events()
    assert events[-1]["kind"] == "interrupt"
    steps = len(read_metrics(tmp_path / "run/metrics.jsonl"))
    text = (tmp_path / "run" / "spec.toml").read_text()
    (tmp_path / "run" / "spec.toml").write_text(text.replace("steps = 5000", f"steps = {steps + 4}"))
    command = [sys.executable, "-m", "lmworks", "resume", str(tmp_path / "run")]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(rows) == steps + 4
    assert [row["staleness/max"] for row in rows if "staleness/max" in row][-1] == 1
