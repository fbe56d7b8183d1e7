"""A worker: claims queued trials of a sweep one after the other, and runs each in a process of its own.

Workers know nothing of each other. The folder tells them what to do, so it does not matter who starts them: the driver
on this machine, a Slurm array, Ray.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..record.claims import Claim
from ..spec import LMWorksError
from ..spec.errors import PREEMPTED, STOPPED
from .folder import STOP, Sweep, Trial
from .slots import Resources, Slots, take_slots

POLL_S = 0.1  # of a running trial
IDLE_S = 0.5  # between looks for a trial that can be claimed
MOST_KILLS = 3  # of a trial that gets no further


class Process(Protocol):
    """A trial that runs; as `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...


@dataclass(frozen=True)
class Launch:
    """How a trial is started: `lmworks …arguments` on these cores and GPUs, printing into a log."""

    arguments: Sequence[str]
    log: Path
    cores: Sequence[int]
    gpus: Sequence[str] | None  # None: as visible to the worker
    threads: int


class Worker:
    """`run` until every trial is settled, or SIGTERM. `start` runs a trial; it shares open files with this process."""

    def __init__(self, sweep: Sweep, resources: Resources, start: Callable[[Launch], Process]) -> None:
        self.sweep, self.resources, self.start = sweep, resources, start
        self.stopping = False
        self.settled: set[int] = set()  # trials that need not be looked at again
        self.ranks: dict[int, int] = {}  # of trials

    def run(self) -> int:
        """Returns an exit code: 0, or 75 where it was stopped while there was work."""
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        while not self.stopping:
            work = self.next_work()
            if work is not None:
                self.work_on(*work)
            elif self.is_done():
                return 0
            else:
                self.wait(IDLE_S)
        return PREEMPTED

    def stop(self, _number: int, _frame: Any) -> None:
        self.stopping = True

    def wait(self, seconds: float) -> None:
        """A signal ends the wait."""
        end = time.monotonic() + seconds
        while not self.stopping and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S))

    def is_done(self) -> bool:
        """Whether nothing is queued, not even for others that may be killed, and nobody will queue more."""
        return not self.sweep.is_driven and not self.queued()

    def queued(self) -> list[Trial]:
        """By number. Ends are remembered: a driver may queue what has paused, rarely what has ended."""
        driven = self.sweep.is_driven
        found = [self.sweep.trial(number) for number in self.sweep.numbers() if number not in self.settled]
        if not driven:
            self.settled |= {trial.number for trial in found if trial.settled}
        return [trial for trial in found if not trial.settled]

    def next_work(self) -> tuple[Trial, Claim, Slots] | None:
        """The first queued trial that nobody works on, with a claim and its cores and GPUs."""
        free = float("inf")  # as many ranks have no room now
        for trial in self.queued():
            if self.sweep.is_running(trial.number):
                continue
            if trial.number not in self.ranks:
                self.ranks[trial.number] = self.sweep.spec(trial.overrides, trial.number).ranks
            ranks = self.ranks[trial.number]
            if ranks >= free:
                continue
            gpus = ranks if self.resources.gpus else 0
            slots = take_slots(self.resources, ranks * self.sweep.threads, gpus, self.sweep.path)
            if slots is None:
                free = ranks
                continue
            claim = Claim.take(self.sweep.folder(trial.number).path)
            if claim is None:
                slots.release()
                continue
            trial = self.sweep.trial(trial.number)  # as its last owner left it
            if not trial.settled:
                return trial, claim, slots
            claim.release()
            slots.release()
        return None

    def work_on(self, trial: Trial, claim: Claim, slots: Slots) -> None:
        try:
            self.wait_for_ranks(trial, claim)
            now = self.sweep.update(trial)
            if not now.settled and not self.stopping:  # else its worker was killed before it wrote so
                now = self.outcome(trial, *self.run_trial(trial, claim, slots))
            if claim.is_own():
                self.sweep.write(now)
        finally:
            claim.release()
            slots.release()

    def wait_for_ranks(self, trial: Trial, claim: Claim) -> None:
        """Until nobody trains in its folder: ranks of a killed trial that still save, or somebody who resumed it."""
        while self.sweep.folder(trial.number).is_locked() and claim.renew() and not self.stopping:
            time.sleep(POLL_S)

    def run_trial(self, trial: Trial, claim: Claim, slots: Slots) -> tuple[int, bool]:
        """The exit code of the trial's process, and whether it was asked to stop for good."""
        folder = self.sweep.folder(trial.number)
        stop_file = folder.path / STOP
        launch = Launch(
            arguments(trial, folder.path, folder.spec_path.exists()),
            folder.path / "trial.log",
            slots.cores,
            slots.gpus if self.resources.gpus else None,
            self.sweep.threads,
        )
        if stop_file.exists():
            return PREEMPTED, True
        process, signalled = self.start(launch), False
        while (code := process.poll()) is None:
            lost = not claim.renew()
            if (self.stopping or lost or stop_file.exists()) and not signalled:
                os.kill(process.pid, signal.SIGTERM)  # it saves a checkpoint and ends
                signalled = True
            time.sleep(POLL_S)
        return code, stop_file.exists()

    def outcome(self, trial: Trial, code: int, asked: bool) -> Trial:
        """trial.json after its process has ended with `code`."""
        after = self.sweep.update(trial)
        if after.state in ("finished", "paused"):
            return replace(after, error="", kills=0)
        if asked:
            return replace(after, state="stopped")
        if code in STOPPED or self.stopping:
            return after
        log = self.sweep.folder(trial.number).path / "trial.log"
        if 0 <= code < 128:
            return replace(after, state="failed", error=last_error(log))
        kills = 1 if after.step > trial.step else trial.kills + 1
        ended = replace(after, kills=kills, error=f"ended by {signal_name(code)} after step {after.step}")
        return replace(ended, state="failed") if kills >= MOST_KILLS else ended


def signal_name(code: int) -> str:
    """Of an exit code: negative, or more than 128 as a shell has it."""
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else f"exit code {code}"


def arguments(trial: Trial, folder: Path, begun: bool) -> list[str]:
    """Of the `lmworks` command that starts the trial, or goes on with it."""
    what = ["resume", str(folder)] if begun else ["train", str(folder / "trial.toml"), "--run-dir", str(folder)]
    until = ["--until", str(trial.until)] if trial.until is not None else []
    return [*what, *until, "--no-report", "--json"]


def last_error(log: Path) -> str:
    """The error line of the command, or the last line of a traceback."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "it left no log"
    said = [line for line in lines if line.startswith("lmworks: error: ")]
    return said[-1].removeprefix("lmworks: error: ") if said else next((line for line in reversed(lines) if line), "")


# --- a trial as a forked process ------------------------------------------------------------------------


class Forked:
    """A process forked from this one, which has imported all that a trial needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code


def start_forked(launch: Launch, command: Callable[[], object], variables: dict[str, str]) -> Forked:
    """`command` in a fork, with `lmworks …arguments` as its command line."""
    pid = os.fork()
    if pid:
        return Forked(pid)
    code = 1
    try:
        set_up_child(launch, variables)
        command()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 1
        os._exit(code)


def set_up_child(launch: Launch, variables: dict[str, str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    try:
        log = os.open(launch.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise LMWorksError(f"cannot write {launch.log}: {error.strerror}") from None
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(variables | {"OMP_NUM_THREADS": str(launch.threads)})
    if launch.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(launch.gpus)
    os.sched_setaffinity(0, set(launch.cores))
    sys.argv = ["lmworks", *launch.arguments]
