"""Workers as actors of a local Ray cluster (make test-ray): one is killed, Ctrl-C stops them, results are equal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sweeps import check, is_gone, running, until

from lmworks.spec import SpecError
from lmworks.sweep.ray import connect

SECONDS = 240.0  # a cluster of its own takes half a minute to start, more where tests run beside it


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpecError, match=r"--ray needs Ray: pip install 'lmworks\[ray\]'"):
        connect(cores=1, gpus=0)


def start() -> subprocess.Popen[str]:
    words = ["sweep", "spec.toml", "--space", "space.toml", "--ray", "--workers", "2", "--name", "ray"]
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", "lmworks", *words], stdout=pipe, stderr=pipe, text=True)


@pytest.mark.ray
def test_ray_actors_run_a_sweep(place: Path, expected: list[Any]) -> None:
    pytest.importorskip("ray")
    driver = start()
    _, worker, trial = until(lambda: running("ray", 5, 24), SECONDS)
    driver.send_signal(signal.SIGINT)
    _, err = driver.communicate(timeout=SECONDS)
    assert driver.returncode == 130 and "the same command goes on" in err, err
    assert is_gone(worker) and is_gone(trial)
    again = start()
    _, worker, trial = until(lambda: running("ray", 5, 24), SECONDS)
    os.kill(worker, signal.SIGKILL)
    out, err = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, err
    assert "3 finished" in out and is_gone(trial)
    check("ray", expected)


@pytest.mark.ray
def test_a_trial_that_no_machine_has_room_for(place: Path) -> None:
    pytest.importorskip("ray")
    words = ["sweep", "spec.toml", "--space", "space.toml", "--ray", "--threads", "4096", "--name", "large"]
    ended = subprocess.run([sys.executable, "-m", "lmworks", *words], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 2
    assert "--ray: a trial needs 4096 cores, and no machine of the Ray cluster has them" in ended.stderr
    assert not Path("sweeps").exists()
