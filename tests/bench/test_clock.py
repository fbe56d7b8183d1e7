"""Timing on a machine that others use: what a call takes alone is found under any load, and the load is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from lmworks.bench import clock as clocks
from lmworks.bench.clock import EXTRA_RUNS, MIN_RUNS, RUNS, Clock, Run, Timing, cpu_timed
from lmworks.plan.devices.machine import QUIET_NOISE

CPU = torch.device("cpu")


def runs(*walls: float, share: float = 1.0) -> list[Run]:
    return [Run(wall, wall * share) for wall in walls]


def test_a_quiet_machine_takes_the_median() -> None:
    timing = Timing.of(runs(1.0, 1.02, 1.05, 1.1, 1.15))
    assert timing == Timing(1.05, 1.05) and timing.quiet


def test_a_steady_load_is_seen_though_no_run_spreads() -> None:
    """Eight processes on one core: every run takes eight times as long, and all take the same."""
    timing = Timing.of(runs(8.0, 8.0, 8.1, 8.0, 7.9, share=1 / 8))
    assert timing.typical == 8.0 and timing.isolated == pytest.approx(1.2 * 7.9 / 8) and not timing.quiet


def test_one_that_disturbs_now_and_then_does_not_count() -> None:
    timing = Timing.of([*runs(1.0, 1.0, 1.1), *runs(9.0, 12.0, 30.0, 40.0, share=0.1)])
    assert timing.typical == 9.0 and timing.isolated == pytest.approx(1.08)


def test_threads_that_spin_are_no_work() -> None:
    """Two threads, one of them put aside in every run: the other spins for it, and its processor time tells nothing."""
    spun = [Run(16.0, 2.0)] * 5
    assert Timing.of(spun).isolated == pytest.approx(2.4)
    assert Timing.of(spun, runs(0.3, 0.4), threads=2).isolated == pytest.approx(0.36)
    assert Timing.of([Run(90.0, 11.0)] * 5, runs(21.0), threads=2).isolated == pytest.approx(
        13.2
    )  # most of it was work
    assert Timing.of([Run(90.0, 4.0)] * 5, runs(21.0), threads=2).isolated == pytest.approx(12.6)  # no less than a half


class Scripted(Clock):
    """Runs as they are told, each as long on the clock as it says."""

    def __init__(self, told: Iterator[Run], now: SimpleNamespace) -> None:
        self.device, self.max_overrun, self.told, self.now = CPU, 8.0, told, now
        self.timings, self.threads = [], list[int]()
        self.progress = lambda *_: None

    def time_once(self, work: Callable[[], object]) -> Run:
        self.threads.append(torch.get_num_threads())
        run = next(self.told)
        self.now.wall += run.wall
        return run


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock on the wall, set by what runs."""
    fake = SimpleNamespace(wall=0.0, own=0.0, all=0.0)
    times = {"perf_counter": lambda: fake.wall, "thread_time": lambda: fake.own, "process_time": lambda: fake.all}
    monkeypatch.setattr(clocks, "time", SimpleNamespace(**times))
    return fake


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_runs_that_spread_are_repeated_on_one_thread(now: SimpleNamespace) -> None:
    busy = [Run(0.1, 0.02)] * RUNS + [Run(0.2, 0.03)] * EXTRA_RUNS
    clock = Scripted(iter([*busy, *[Run(0.1, 0.1)] * RUNS]), now)
    clock.begin("products", seconds=1.0, points=2)
    assert clock(lambda: None) == pytest.approx(0.024)
    assert clock.threads == [2] * RUNS + [1] * EXTRA_RUNS and torch.get_num_threads() == 2
    assert clock(lambda: None) == pytest.approx(0.1)
    assert len(clock.threads) == RUNS + EXTRA_RUNS + RUNS  # quiet: no more than that
    assert clock.noise == pytest.approx((0.1 + 0.1) / (0.024 + 0.1)) and clock.noise > QUIET_NOISE


def test_time_for_repeats_is_bounded(now: SimpleNamespace) -> None:
    clock = Scripted(iter([Run(5.0, 0.5)] * 100), now)
    clock.begin("products", seconds=1.0, points=2)  # 8 s at most
    clock(lambda: None)
    assert len(clock.threads) == 1 + MIN_RUNS  # each is late by itself, and nothing is left for more
    assert clock.timings == [Timing(0.6, 5.0)]


def test_processor_time_of_a_call(now: SimpleNamespace) -> None:
    def isolated() -> None:
        now.wall, now.own, now.all = now.wall + 1.0, now.own + 0.98, now.all + 1.9

    def beside_others() -> None:
        now.wall, now.own, now.all = now.wall + 8.0, now.own + 1.0, now.all + 2.0

    def waiting_for_its_threads() -> None:
        now.wall, now.own, now.all = now.wall + 1.0, now.own + 0.1, now.all + 1.8

    for work, wall, expected in [(isolated, 1.0, 0.98), (beside_others, 8.0, 1.0), (waiting_for_its_threads, 1.0, 0.9)]:
        found = cpu_timed(work)
        assert (found.wall, found.isolated) == (pytest.approx(wall), pytest.approx(expected))
