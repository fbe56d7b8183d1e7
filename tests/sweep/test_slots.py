"""Cores and GPUs: each to one trial at a time, over all sweeps of this machine; freed by whoever is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from lmworks.spec import SpecError
from lmworks.sweep import slots
from lmworks.sweep.slots import Resources, Slots, missing_resources, take_slots, visible_gpus

SWEEP, OTHER = Path("sweeps/lr"), Path("sweeps/other")
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path))


def must(found: Slots | None) -> Slots:
    assert found is not None
    return found


def test_cores_are_given_once() -> None:
    four = Resources((0, 1, 2, 3))
    first = must(take_slots(four, 2, 0, SWEEP))
    assert first.cores == [0, 1]
    assert take_slots(four, 3, 0, SWEEP) is None  # and keeps none of the two that are free
    second = must(take_slots(four, 2, 0, SWEEP))
    assert second.cores == [2, 3] and take_slots(four, 1, 0, SWEEP) is None
    first.release()
    assert must(take_slots(four, 1, 0, SWEEP)).cores == [0]


def test_gpus_are_shared_by_as_many_as_is_said() -> None:
    two = Resources(tuple(range(8)), ("0", "GPU-5e/1"), trials_per_gpu=2)
    taken = [must(take_slots(two, 1, 1, SWEEP)).gpus for _ in range(4)]
    assert taken == [["0"], ["GPU-5e/1"], ["0"], ["GPU-5e/1"]]  # an idle one first
    assert take_slots(two, 1, 1, SWEEP) is None


def test_a_trial_of_two_ranks_has_two_gpus() -> None:
    two = Resources(tuple(range(8)), ("0", "1"), trials_per_gpu=2)
    assert must(take_slots(two, 2, 2, SWEEP)).gpus == ["0", "1"]
    assert must(take_slots(two, 2, 2, SWEEP)).gpus == ["0", "1"]
    assert take_slots(two, 2, 2, SWEEP) is None


def test_gpus_of_a_scheduler_are_not_compared_by_number() -> None:
    """Two jobs on a machine may both call their GPU 0."""
    own = Resources(tuple(range(8)), ("0",), allocated=True)
    assert must(take_slots(own, 1, 1, SWEEP)).gpus == must(take_slots(own, 1, 1, SWEEP)).gpus == ["0"]


def hold(ready: object) -> None:
    assert take_slots(Resources((0, 1)), 2, 0, SWEEP) is not None
    ready.send("")  # type: ignore[attr-defined]
    time.sleep(60)


def test_a_killed_process_frees_its_cores() -> None:
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=hold, args=(there,), daemon=True)
    process.start()
    assert here.poll(20)
    assert take_slots(Resources((0, 1)), 1, 0, SWEEP) is None
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert must(take_slots(Resources((0, 1)), 2, 0, SWEEP)).cores == [0, 1]


def test_who_has_what_a_trial_waits_for() -> None:
    four = Resources((0, 1, 2, 3))
    assert missing_resources(four, 4, 0, OTHER) == ""  # nothing was ever taken
    first, second = must(take_slots(four, 2, 0, SWEEP)), must(take_slots(four, 1, 0, Path("/elsewhere/lr")))
    assert missing_resources(four, 1, 0, OTHER) == ""
    assert missing_resources(four, 2, 0, OTHER) == "2 cores: held by /elsewhere/lr and sweeps/lr"
    assert missing_resources(four, 2, 0, SWEEP) == "2 cores: held by /elsewhere/lr"
    second.release()
    assert missing_resources(four, 3, 0, SWEEP) == ""  # its own trials are in the way, and it shows those
    assert missing_resources(four, 3, 0, OTHER) == "3 cores: held by sweeps/lr"
    first.release()
    assert must(take_slots(four, 4, 0, OTHER)).cores == [0, 1, 2, 3]  # who looked has kept nothing


def test_who_has_the_gpu_that_a_trial_waits_for() -> None:
    two = Resources(tuple(range(8)), ("0", "1"), trials_per_gpu=2)
    for _ in range(2):
        must(take_slots(Resources(tuple(range(8)), ("0",), trials_per_gpu=2), 1, 1, SWEEP))
    assert missing_resources(two, 1, 1, OTHER) == ""
    assert missing_resources(two, 2, 2, OTHER) == "2 GPUs: held by sweeps/lr"  # both shares of the other are one GPU


@pytest.mark.parametrize(
    ("resources", "ranks", "threads", "workers"),
    [
        (Resources(tuple(range(8))), 1, 1, 8),
        (Resources(tuple(range(8))), 2, 2, 2),
        (Resources(tuple(range(8)), ("0", "1")), 1, 1, 2),
        (Resources(tuple(range(8)), ("0", "1"), 3), 1, 1, 6),
        (Resources((0,)), 4, 1, 1),  # which `check` refuses
    ],
)
def test_as_many_workers_as_fit(resources: Resources, ranks: int, threads: int, workers: int) -> None:
    assert resources.workers(ranks, threads) == workers


@pytest.mark.parametrize(
    ("resources", "workers", "ranks", "said"),
    [
        (
            Resources((0, 1)),
            3,
            1,
            "with 1 rank × 1 thread a trial need 3 cores, and there are 2; --workers 2 fits",
        ),
        (Resources((0, 1)), 1, 4, "--workers 1 with 4 ranks × 1 thread a trial need 4 cores.*no trial fits"),
        (
            Resources(tuple(range(8)), ("0",)),
            2,
            1,
            "need 2 GPUs, and there are 1; --trials-per-gpu lets",
        ),
    ],
)
def test_too_many_workers_are_refused(resources: Resources, workers: int, ranks: int, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        resources.check(workers, ranks, 1)


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
    assert visible_gpus() == ("2", "GPU-abc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(slots, "DEVICES", tmp_path)
    assert visible_gpus() == ("0", "1")  # CUDA counts those that a container sees from 0
