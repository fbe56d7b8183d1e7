"""What a worker makes of the end of a trial's process, and a driver of the end of its workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sweeps import figures, make_sweep, until

import lmworks.cli.main  # which forked workers find loaded
import lmworks.cli.trial_imports  # noqa: F401
from lmworks.record.jsonl import LineWriter
from lmworks.spec import LMWorksError
from lmworks.sweep.folder import Sweep
from lmworks.sweep.pool import Workers
from lmworks.sweep.slots import Resources, missing_resources
from lmworks.sweep.worker import Launch, Worker

ONE = {"seed": {"values": [1]}}


class Ended:
    """A process that has ended."""

    pid = 0

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


@pytest.fixture(autouse=True)
def own_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    yield


def run(sweep: Sweep, ends: Sequence[tuple[int, int]], said: str = "") -> list[Launch]:
    """A worker whose trials end so: the last step that they have recorded, and the exit code."""
    launches: list[Launch] = []
    left = list(ends)

    def start(launch: Launch) -> Ended:
        step, code = left.pop(0)
        launches.append(launch)
        folder = sweep.folder(0)
        launch.log.write_text(said)
        with LineWriter(folder.metrics_path) as lines:
            lines.append({"step": step, "attempt": len(launches), "loss": 1.0, "step_s": 0.1})
        if code == 0:
            folder.event("finish", step)
        return Ended(code)

    assert Worker(sweep, Resources((0,)), start).run() == 0
    assert not left
    return launches


@pytest.fixture
def sweep(tmp_path: Path, dataset: Path) -> Sweep:
    made = make_sweep(tmp_path / "sweep", dataset, ONE)
    made.propose({"seed": 1})
    return made


def test_slots_say_which_sweep_has_them(sweep: Sweep, tmp_path: Path) -> None:
    seen: list[str] = []

    def start(launch: Launch) -> Ended:
        seen.append(missing_resources(Resources((0,)), 1, 0, tmp_path / "another"))
        sweep.folder(0).event("finish", 12)
        return Ended(1)

    Worker(sweep, Resources((0,)), start).run()
    assert seen == [f"1 core: held by {sweep.path}"]
    assert missing_resources(Resources((0,)), 1, 0, tmp_path / "another") == ""


def test_a_killed_trial_is_started_again(sweep: Sweep) -> None:
    run(sweep, [(3, -9), (7, 137), (12, 0)])
    trial = sweep.trial(0)
    assert (trial.state, trial.step, trial.kills, trial.error) == ("finished", 12, 0, "")


def test_one_that_is_killed_at_the_same_step_has_failed(sweep: Sweep) -> None:
    run(sweep, [(3, -9), (3, -9), (2, -11)])
    trial = sweep.trial(0)
    assert (trial.state, trial.kills, trial.error) == ("failed", 3, "ended by SIGSEGV after step 3")
    sweep.run_until(0, None)
    run(sweep, [(12, 0)])
    assert sweep.trial(0).state == "finished"


def test_one_that_was_stopped_from_outside_goes_on(sweep: Sweep) -> None:
    """Somebody sent it SIGTERM or Ctrl-C: no error."""
    run(sweep, [(3, 75), (3, 130), (3, 75), (3, 75), (12, 0)])
    assert sweep.trial(0).state == "finished"


@pytest.mark.parametrize(
    ("code", "said", "error"),
    [
        (1, "step 3\nlmworks: error: the loss is not finite\nmore\n", "the loss is not finite"),
        (1, "Traceback\nValueError: no\n\n", "ValueError: no"),
    ],
)
def test_an_error_is_final(code: int, said: str, error: str, sweep: Sweep) -> None:
    run(sweep, [(3, code)], said)
    assert (sweep.trial(0).state, sweep.trial(0).error) == ("failed", error)


def test_what_is_started(sweep: Sweep) -> None:
    sweep.run_until(0, 6)
    (launch,) = run(sweep, [(6, 0)])
    folder = sweep.folder(0).path
    more = ["--until", "6", "--no-report", "--json"]
    assert launch.arguments == ["train", str(folder / "trial.toml"), "--run-dir", str(folder), *more]
    assert (launch.cores, launch.gpus, launch.threads) == ([0], None, 1)
    (folder / "spec.toml").write_text("")
    sweep.run_until(0, None)
    (folder / "events.jsonl").unlink()
    (launch,) = run(sweep, [(12, 0)])
    assert launch.arguments == ["resume", str(folder), "--no-report", "--json"]


def test_a_trial_whose_worker_was_killed_after_its_end_is_not_run_again(sweep: Sweep) -> None:
    with LineWriter(sweep.folder(0).metrics_path) as lines:
        lines.append({"step": 12, "attempt": 0, "loss": 1.0, "step_s": 0.1})
    sweep.folder(0).event("finish", 12)
    assert run(sweep, []) == []
    assert (sweep.trial(0).state, sweep.trial(0).step) == ("finished", 12)


@pytest.mark.usefixtures("forked_python")
def test_workers_that_cannot_work_are_an_error(sweep: Sweep) -> None:
    with (
        pytest.raises(LMWorksError, match=r"workers of .*/sweep fail: .*No such option"),
        Workers(sweep, 1, ["--nonsense"]) as workers,
    ):
        workers.wait_for(lambda trials: all(trial.settled for trial in trials))


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_killed_trial_of_two_ranks_goes_on_bitwise(tmp_path: Path, dataset: Path) -> None:
    """Its ranks save and end after their launcher is killed; the next attempt waits for them."""
    made = []
    for name in ("whole", "killed"):
        steps = ["parallel.dp=2", "optim.steps=60", "checkpoint.every=7"]
        sweep = make_sweep(tmp_path / name, dataset, ONE, *steps)
        sweep.propose({"seed": 1})
        with Workers(sweep, 1) as workers:
            if name == "killed":
                metrics = sweep.folder(0).metrics_path
                until(lambda path=metrics: path.exists() and path.read_bytes().count(b"\n") > 9)
                (trial,) = children(workers.processes[0].pid)  # type: ignore[attr-defined]
                assert len(children(trial)) >= 2
                os.kill(trial, signal.SIGKILL)
            workers.wait_for(lambda trials: all(trial.settled for trial in trials))
        assert (sweep.trial(0).state, sweep.trial(0).error) == ("finished", "")
        made.append(figures(sweep, 0))
    assert made[0] == made[1] and len(made[0]) == 60
    kinds = [event["kind"] for event in sweep.folder(0).events()]
    assert kinds.count("resume") == 1
