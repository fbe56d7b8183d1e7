"""The driver's side: workers as processes of this machine, started again when one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from ..record.parent_death import until_this_process_ends
from ..spec import LMWorksError
from .folder import Sweep, Trial
from .slots import Resources

POLL_S = 0.2
IDLE = 4  # times as long as a look at all trials takes: thousands take a while
MOST_FAILURES = 3  # of workers in a row, none of which settled a trial


class Process(Protocol):
    """A worker, as `subprocess.Popen`."""

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


class Workers:
    """`with Workers(sweep, 4) as workers: workers.wait_for(…)`; on leaving, trials that run are stopped with a
    checkpoint, and the workers end. They end with the thread that started them, too."""

    def __init__(
        self, sweep: Sweep, count: int, options: Sequence[str] = (), resources: Resources | None = None
    ) -> None:
        """`resources`: what they share with other sweeps of this machine, for who wants to know what they wait for."""
        self.sweep, self.count, self.options, self.resources = sweep, count, list(options), resources
        self.processes: list[Process] = []
        self.failures = 0
        self.settled = -1

    def __enter__(self) -> Self:
        self.processes = self.start_all()
        return self

    def start_all(self) -> list[Process]:
        return [self.start() for _ in range(self.count)]

    def start(self) -> Process:
        """In a session of its own: Ctrl-C goes to the driver alone, which stops the workers."""
        words = [sys.executable, "-m", "lmworks", "sweep", "worker", str(self.sweep.path), *self.options]
        threads = {"OMP_NUM_THREADS": str(self.sweep.threads)}
        env = {**os.environ, **threads, **until_this_process_ends()}
        with (self.sweep.path / "workers.log").open("ab") as log:
            return subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def check(self) -> None:
        """Start workers again that were killed; workers that cannot work are an error."""
        for index, process in enumerate(self.processes):
            code = process.poll()
            if code in (None, 0):
                continue
            settled = sum(trial.settled for trial in self.sweep.trials())
            self.failures = self.failures + 1 if settled == self.settled else 1
            self.settled = settled
            if self.failures > MOST_FAILURES * self.count:
                raise LMWorksError(f"workers of {self.sweep.path} fail: {last_line(self.sweep.path / 'workers.log')}")
            self.processes[index] = self.start()

    def wait_for(
        self, done: Callable[[list[Trial]], bool], on_poll: Callable[[list[Trial]], None] | None = None
    ) -> None:
        """Until `done` of the trials holds; `on_poll` sees them in between."""
        while True:
            began = time.monotonic()
            trials = self.sweep.trials()
            if on_poll is not None:
                on_poll(trials)
            if done(trials):
                return
            self.check()
            if all(process.poll() == 0 for process in self.processes) and not done(trials := self.sweep.trials()):
                if all(trial.settled for trial in trials):
                    raise LMWorksError(f"every trial of {self.sweep.path} is settled, and more was waited for")
                self.processes = self.start_all()  # somebody queued trials since they ended
            time.sleep(max(POLL_S, IDLE * (time.monotonic() - began)))

    def wait_any(self, numbers: Sequence[int], on_poll: Callable[[list[Trial]], None] | None = None) -> Trial:
        """The first of these trials that pauses or ends."""
        found: list[Trial] = []

        def one_has(trials: list[Trial]) -> bool:
            ended = [trial for trial in trials if trial.number in numbers and trial.settled]
            found[:] = [trial for trial in ended if not self.sweep.is_running(trial.number)]  # its worker has let it go
            return bool(found)

        self.wait_for(one_has, on_poll)
        return found[0]

    def stop(self) -> None:
        """SIGTERM: each worker stops its trial with a checkpoint, and ends. Returns when all have."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait()

    def kill(self) -> None:
        """At once; trials notice that their worker is gone, save and end."""
        for process in self.processes:
            process.kill()

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            self.stop()
        except KeyboardInterrupt:  # a second one: do not wait
            self.kill()
            raise


def last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "they left no log"
    return next((line for line in reversed(lines) if line.strip()), "they said nothing")
