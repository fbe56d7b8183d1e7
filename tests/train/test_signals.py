"""SIGTERM and its deadline: the process ends with 75 wherever its main thread is, and is not hurried by an echo."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lmworks.train import signals
from lmworks.train.signals import StopSignals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mutexes of its C library are used to stand still")
FORK = multiprocessing.get_context("fork")
LONG = 600.0


def stand_still() -> None:
    """As in a collective whose other ranks are gone: in C, in a wait that no signal ends, without Python's lock."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


class Child:
    """`work(stop, say)` in a process of its own; `say` tells the test where it is."""

    def __init__(self, work: Callable[[StopSignals, Callable[[str], None]], None], deadline_s: float = LONG) -> None:
        self.ear, mouth = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=self.run, args=(work, deadline_s, mouth.send), daemon=True)
        self.process.start()
        mouth.close()

    @staticmethod
    def run(work: Callable[..., None], deadline_s: float, say: Callable[[str], None]) -> None:
        with StopSignals(deadline_s) as stop:
            work(stop, say)

    def hears(self, word: str) -> None:
        assert self.ear.poll(60) and self.ear.recv() == word

    def kill(self, number: int = signal.SIGTERM) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def code(self) -> int | None:
        self.process.join(60)
        code = self.process.exitcode
        self.process.kill()
        return code


def stuck(stop: StopSignals, say: Callable[[str], None]) -> None:
    stop.defer_to_step_end()
    say("in a step")
    stand_still()


def noting(stop: StopSignals, say: Callable[[str], None], count: int = 1) -> None:
    """Tells of each of `count` signals, and leaves in peace."""
    seen: list[int] = []
    note = stop.note

    def telling(number: int, frame: Any) -> None:
        note(number, frame)
        seen.append(number)
        say("noted")

    signal.signal(signal.SIGTERM, telling)
    stop.defer_to_step_end()
    say("in a step")
    while len(seen) < count:
        time.sleep(0.01)


def interrupted(stop: StopSignals, say: Callable[[str], None]) -> None:
    """Tells of a signal, and then does not come to the end of its step."""
    stop.defer_to_step_end()
    say("in a step")
    while not stop.signal:
        time.sleep(0.01)
    say("noted")
    stand_still()


def test_deadline_ends_rank_blocked_in_collective() -> None:
    child = Child(stuck, deadline_s=0.2)
    child.hears("in a step")
    child.kill()
    assert child.code() == 75


def test_sigterm_before_first_step_ends_at_once() -> None:
    def work(stop: StopSignals, say: Callable[[str], None]) -> None:
        say("loading")
        stand_still()

    child = Child(work)
    child.hears("loading")
    child.kill()
    assert child.code() == 75


def test_deadline_is_not_enforced_if_met() -> None:
    child = Child(noting)
    child.hears("in a step")
    child.kill()
    child.hears("noted")
    assert child.code() == 0


def test_second_sigterm_ends_at_once() -> None:
    def work(stop: StopSignals, say: Callable[[str], None]) -> None:
        noting(stop, say)
        stand_still()

    with mock.patch.object(signals, "ONE_REQUEST_S", 0.0):
        child = Child(work)
    child.hears("in a step")
    child.kill()
    child.hears("noted")
    child.kill()
    assert child.code() == 75


def test_repeated_sigterm_within_window_counts_once() -> None:
    """A scheduler signals every process of a job, and the agent its ranks: each gets it twice."""
    with mock.patch.object(signals, "ONE_REQUEST_S", LONG):
        child = Child(lambda stop, say: noting(stop, say, count=2))
    child.hears("in a step")
    child.kill()
    child.hears("noted")
    child.kill()
    child.hears("noted")
    assert child.code() == 0


def test_sigterm_after_ctrl_c_ends_at_once() -> None:
    with mock.patch.object(signals, "ONE_REQUEST_S", 0.0):
        child = Child(interrupted)
    child.hears("in a step")
    child.kill(signal.SIGINT)
    child.hears("noted")
    child.kill()
    assert child.code() == 75


def test_second_ctrl_c_ends_by_signal() -> None:
    child = Child(interrupted)
    child.hears("in a step")
    child.kill(signal.SIGINT)
    child.hears("noted")
    child.kill(signal.SIGINT)
    assert child.code() == -signal.SIGINT


def test_signal_to_forked_child_is_ignored() -> None:
    """Data workers are forked from the rank, with the pipe that wakes its watcher."""

    def work(stop: StopSignals, say: Callable[[str], None]) -> None:
        stop.defer_to_step_end()
        worker = os.fork()
        if not worker:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            say("worker is there")
            stand_still_in_python()
        os.waitpid(worker, 0)
        say("worker is gone")
        while not stop.signal:
            time.sleep(0.01)

    with mock.patch.object(signals, "ONE_REQUEST_S", 0.0):
        child = Child(work)
    child.hears("worker is there")
    assert child.process.pid is not None
    (worker,) = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGTERM)
    child.hears("worker is gone")
    child.kill()  # the first that it gets
    assert child.code() == 0


def stand_still_in_python() -> None:
    while True:
        time.sleep(0.01)


def test_signal_handlers_are_restored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with StopSignals(LONG) as stop:
        assert signal.getsignal(signal.SIGTERM) == stop.note
    assert {number: signal.getsignal(number) for number in before} == before
    waker = signal.set_wakeup_fd(-1)
    assert waker == -1 and not stop.watcher.is_alive()
