"""`lmworks sweep`: real processes and real signals. Whoever is killed, every trial ends bitwise as if nobody was."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from sweeps import SECONDS, SPACE, TRIALS, check, is_gone, running, until

import lmworks.cli.trial_imports  # noqa: F401  # which forked workers find loaded
from forked import Forked
from lmworks.record.folder import attempts
from lmworks.sweep.folder import Sweep
from lmworks.sweep.space import Space


def start(name: str, *more: str, **options: Any) -> Forked:
    return Forked("sweep", "spec.toml", "--space", "space.toml", "--name", name, *more, **options)


@pytest.mark.slow
def test_kills_of_processes_with_interpreters_of_their_own(place: Path, expected: list[Any]) -> None:
    kill_each(expected)


@pytest.mark.usefixtures("forked_python")
def test_kills_of_a_trial_a_worker_and_the_driver_lose_nothing(place: Path, expected: list[Any]) -> None:
    kill_each(expected)


def kill_each(expected: list[Any]) -> None:
    driver = start("killed", "--workers", "2")
    number, _, trial = until(lambda: running("killed", 5, 24))
    os.kill(trial, signal.SIGKILL)
    killed = Sweep.open("sweeps/killed").folder(number)
    until(lambda: len(attempts(killed)) > 1)  # a worker goes on with it
    _, worker, orphan = until(lambda: running("killed", 5, 24))
    os.kill(worker, signal.SIGKILL)
    until(lambda: is_gone(orphan))  # it saved and ended: nothing trains on without a worker
    _, worker, orphan = until(lambda: running("killed"))
    driver.kill()
    until(lambda: is_gone(worker) and is_gone(orphan))
    again = start("killed", "--json")
    out, err = again.communicate(SECONDS)
    assert again.returncode == 0, err
    assert json.loads(out)["sweep"] == "sweeps/killed"
    check("killed", expected)
    assert attempts(killed)[0].done is False  # it was killed, and did not stop by itself


@pytest.mark.usefixtures("forked_python")
def test_two_drivers_at_once_run_each_trial_once_and_share_the_cores(place: Path, expected: list[Any]) -> None:
    cores = len(os.sched_getaffinity(0))
    drivers = [start("twice", "--workers", str(min(2, cores)), "--json") for _ in range(2)]
    most = 0
    while any(driver.poll() is None for driver in drivers):
        allowed = [affinity(pid) for pid in trials_of("twice")]
        sets = [one for one in allowed if one]
        assert all(not one & other for one, other in combinations(sets, 2)), sets
        assert all(len(one) == 1 for one in sets)
        most = max(most, len(sets))
        time.sleep(0.01)
    outs = [driver.communicate()[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0]
    assert json.loads(outs[0])["trials"] == json.loads(outs[1])["trials"]
    assert most == min(2, cores)
    check("twice", expected)
    for number in range(TRIALS):
        kinds = [event["kind"] for event in Sweep.open("sweeps/twice").folder(number).events()]
        assert kinds.count("start") == 1 and kinds.count("finish") == 1 and "resume" not in kinds


def trials_of(name: str) -> list[int]:
    """Processes that train."""
    found = []
    for folder in Path("sweeps", name, "trials").glob("*"):
        try:
            worker = json.loads((folder / "claim").read_text()).get("pid")
            found += Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        except (OSError, ValueError):
            continue
    return [pid for pid in map(int, dict.fromkeys(found)) if is_training(pid)]


def is_training(pid: int) -> bool:
    """Whether it has become a trial: its output goes to the trial's log."""
    try:
        return os.readlink(f"/proc/{pid}/fd/1").endswith("trial.log") and len(os.sched_getaffinity(pid)) == 1
    except OSError:
        return False


def affinity(pid: int) -> set[int]:
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return set()


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow)]
)
def test_ctrl_c_stops_trials_with_a_checkpoint_and_the_same_command_goes_on(
    number: signal.Signals, code: int, place: Path, expected: list[Any]
) -> None:
    driver = start("stopped", "--workers", "1")
    trial, worker, _ = until(lambda: running("stopped", 5, 20))
    driver.send_signal(number)
    _, err = driver.communicate(SECONDS)
    assert driver.returncode == code
    assert "lmworks: stopped; the same command goes on with the trials that are left" in err
    assert is_gone(worker)
    folder = Sweep.open("sweeps/stopped").folder(trial)
    end = folder.events()[-1]
    assert end["kind"] == "interrupt"
    assert (folder.checkpoints / f"step-{end['step']:06d}" / "COMMITTED").exists()
    again = start("stopped")
    out, _ = again.communicate(SECONDS)
    assert again.returncode == 0
    assert "best: trial" in out and "3 finished; ETA 0:00" in out
    check("stopped", expected)


@pytest.mark.parametrize(
    ("space", "more", "said"),
    [
        ("", [], "space.toml: the space is empty"),
        ("optim.lrr.values = [1]", [], "space.toml: unknown key 'optim.lrr'; did you mean 'lr'?"),
        ("optim.lr.values = [-1.0]", [], "optim.lr=-1.0: optim.lr = -1.0 is out of range"),
        ("optim.lr.range = [1e-3, 1e-2]", [], "add points = 5 or step"),
        (SPACE, ["--workers", "4096"], "--workers 4096 with 1 rank × 1 thread a trial need 4096 cores, and there are"),
        (SPACE, ["--name", "a/b"], "--name 'a/b' cannot name a folder"),
        (SPACE, ["optim.lrr=1"], "unknown key 'optim.lrr'"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(space: str, more: list[str], said: str, place: Path) -> None:
    (place / "space.toml").write_text(space)
    command = start("wrong", *more)
    out, err = command.communicate(SECONDS)
    assert command.returncode == 2 and not out
    assert said in err and err.count("\n") == 1
    assert not list(place.glob("sweeps/*/trials/*/spec.toml"))


def test_another_space_is_refused(place: Path) -> None:
    Sweep.create("sweeps/lr", {"name": "tiny"}, Space.of({"seed": {"values": [1]}}))
    command = start("lr")
    _, err = command.communicate(SECONDS)
    assert command.returncode == 2
    assert "sweeps/lr is a sweep of another space: seed: values = [1] there, not in the space here" in err
