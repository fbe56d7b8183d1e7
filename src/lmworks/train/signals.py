"""Preemption: SIGTERM and Ctrl-C end a run between two steps, with a checkpoint; a second signal ends it at once.

A scheduler sends SIGTERM to preempt a job. The run finishes its step, saves, and ends with exit code 75 (EX_TEMPFAIL:
start it again). It has `fault.deadline_s` seconds for that; then, or at a second SIGTERM, it ends at once with the same
code. That is safe: a checkpoint counts only once it is committed.

Python runs signal handlers between two bytecode instructions, so never while a rank hangs in a collective. For that
case there is a thread, woken through a pipe (signal.set_wakeup_fd).
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from ..parallel.rendezvous import AGENT_KILLED, agent_died
from ..spec.errors import PREEMPTED, LMWorksError

ONE_REQUEST_S = 3.0  # two SIGTERMs within this time are one request: see `watch`
STOP_WATCHER = 0  # no signal has this number


class Interrupted(LMWorksError):
    """The run was asked to stop, and can be resumed."""

    def __init__(self, number: int, step: int, folder: Path) -> None:
        name = signal.Signals(number).name
        # The kernel signals the ranks when their agent is killed.
        why = f"{AGENT_KILLED}: stopped" if agent_died() else f"stopped by {name}"
        super().__init__(f"{why} after step {step}; continue with: lmworks resume {folder}")
        self.exit_code = PREEMPTED if number == signal.SIGTERM else 128 + number


class StopSignals:
    """While active, the first SIGINT or SIGTERM only sets `signal`; what comes after it ends the process at once.

    Before `defer_to_step_end` there is no step to finish, and the first one ends it at once.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.signal = 0
        self.deferred = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self.woken, self.waker = os.pipe()
            os.set_blocking(self.waker, False)
            self.waker_before = signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.note)
            self.watcher = threading.Thread(target=self.watch, name="lmworks-signals", daemon=True)
            self.watcher.start()
        return self

    def defer_to_step_end(self) -> None:
        """From now on a signal takes effect at the end of a step."""
        self.deferred = True

    def note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self.deferred:
            raise KeyboardInterrupt
        self.signal = self.signal or number
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends the process wherever Python is

    def watch(self) -> None:
        """End the process after the deadline, or at a second SIGTERM.

        A scheduler signals every process of a job, torchrun's agent hands its own SIGTERM on, and so does `timeout`: a
        rank gets two or three for one request. They come within moments of each other, sooner than any second request.
        """
        first, terminated = 0.0, False
        while True:
            left = max(0.0, first + self.deadline_s - time.monotonic()) if terminated else None
            if not select.select([self.woken], [], [], left)[0]:
                end(f"SIGTERM: the step and its save took longer than fault.deadline_s = {self.deadline_s:g}")
            for number in os.read(self.woken, 64):  # several, where this thread came to it late
                if number == STOP_WATCHER:
                    return
                if number == signal.SIGTERM:
                    if not self.deferred:
                        end("SIGTERM before the first step")
                    if first and time.monotonic() - first >= ONE_REQUEST_S:
                        end("a second SIGTERM")
                    terminated = True
                if number in (signal.SIGINT, signal.SIGTERM):
                    first = first or time.monotonic()

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.before:
            signal.set_wakeup_fd(self.waker_before)
            os.write(self.waker, bytes([STOP_WATCHER]))  # closing is not enough: a forked process has it open, too
            self.watcher.join()
            os.close(self.waker)
            os.close(self.woken)
            self.before = {}


def end(reason: str) -> NoReturn:
    os.write(2, f"lmworks: {reason}; ended at once, the newest committed checkpoint is kept\n".encode())
    os._exit(PREEMPTED)


def disable_wakeup_in_child() -> None:
    """A forked process (a data worker) must not wake the watcher thread of its parent."""
    signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=disable_wakeup_in_child)
