"""What the launchers write, started for real: two nodes that meet, stop with a checkpoint, and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import end, slurm

from lmworks.launch import Allocation, Job, Pods, manifests, slurm_script
from tiny import curve, events, make_spec, write_spec


def two_nodes(dataset: Path, root: Path, *overrides: str) -> Job:
    spec = make_spec(dataset, "parallel.dp=2", "cluster.device=cpu", *overrides)
    return Job.of(spec, str(write_spec(spec, root / "tiny.toml")), nodes=2, run_dir="runs/tiny")


def start(script: Path, root: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", script], cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def logs(root: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(root.glob("node*.log")))


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], root: Path) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert process.poll() is None, process.communicate()[0] + logs(root)
        assert time.monotonic() < deadline, logs(root)
        time.sleep(0.1)


@pytest.fixture
def job_script(dataset: Path, tmp_path: Path) -> Path:
    job = two_nodes(dataset, tmp_path, "optim.steps=3000", "data.seq=16")
    script = tmp_path / "job.sbatch"
    script.write_text(slurm_script(job, Allocation()))
    return script


@pytest.mark.slow
def test_sbatch_script_stops_before_the_limit_and_goes_on(job_script: Path, tmp_path: Path) -> None:
    environment = slurm(tmp_path, nodes=2)
    run = tmp_path / "runs/tiny"
    process = start(job_script, tmp_path, environment)
    try:
        wait_for(lambda: run.exists() and len(curve(run)) > 2, process, tmp_path)
        process.send_signal(signal.SIGUSR1)  # what Slurm sends when the time is nearly up
        said, _ = process.communicate(timeout=240)
    finally:
        end(process)
    assert process.returncode == 75
    assert "queued again" in said
    assert (tmp_path / "requeued").read_text().split() == [environment["SLURM_JOB_ID"]]
    (stopped,) = events(run, "interrupt")
    assert "SIGTERM" in stopped["error"], logs(tmp_path)
    assert list(run.glob(f"checkpoints/step-{stopped['step']:06d}")), "no checkpoint of the step it stopped at"

    # What Slurm does next: the same script again. It finds the folder and goes on.
    process = start(job_script, tmp_path, environment)
    try:
        wait_for(lambda: bool(events(run, "resume")), process, tmp_path)
        assert events(run, "resume")[0]["step"] == stopped["step"]
    finally:
        end(process)


@pytest.mark.slow
def test_start_script_of_kubernetes_meets_through_pet_variables(dataset: Path, tmp_path: Path) -> None:
    """Both operators, and our plain Job, say to torchrun where it is by PET_ variables alone."""
    job = two_nodes(dataset, tmp_path)
    files = manifests(job, Pods("image", "claim"), "job")[0]["data"]
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("/etc/lmworks/", f"{tmp_path}/"))
    place = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "29523", "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**slurm(tmp_path, 2), **place}
    nodes = [
        start(tmp_path / "start.sh", tmp_path, {**environment, "PET_NODE_RANK": str(number)}) for number in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            end(node)
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert len(curve(tmp_path / "runs/tiny")) == job.spec.optim.steps


TORCHRUN = """\
#!/bin/bash
trap 'exit 1' TERM # as torchrun does, when its ranks have saved
echo started >started
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(("asked", "code"), [(True, 75), (False, 137)])
def test_start_script_of_kubernetes_tells_a_stop_that_was_asked_for_from_a_failure(
    asked: bool, code: int, tmp_path: Path, dataset: Path
) -> None:
    """The pod's SIGTERM goes to the script, its first process, alone."""
    job = two_nodes(dataset, tmp_path)
    (tmp_path / "start.sh").write_text(manifests(job, Pods("image", "claim"), "job")[0]["data"]["start.sh"])
    (tmp_path / "torchrun").write_text(TORCHRUN)
    (tmp_path / "torchrun").chmod(0o755)
    process = start(tmp_path / "start.sh", tmp_path, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    try:
        wait_for((tmp_path / "started").exists, process, tmp_path)
        if asked:
            process.send_signal(signal.SIGTERM)
        else:
            (agent,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(agent), signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == code
