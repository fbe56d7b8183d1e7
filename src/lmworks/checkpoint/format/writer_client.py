"""A rank's end of its writer process: start it, give it jobs, hear what became of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from ...record import phase
from ...record.life import Beat, moved, own_beat, started_at, state_of
from .writer_messages import Answer, Copy, Entered, Failed, Job, Seal, Setup, Write

# Called in every new writer before its first job. They must be picklable: functions of modules that it can import.
startup: list[Callable[[], None]] = []

STOPPED_S = 10.0  # that a writer may be stopped while its rank runs on; a job that is suspended stops both
LOOK_S = 0.5
KILL_S = 5.0  # that a process has to end: a killed one that waits for a hung file system does not


class Writer:
    """One process. It imports no torch, is ready in a fraction of a second, and has nothing of ours but the buffer."""

    def __init__(self, setup: Setup, buffer: int = -1, timeout_s: float = 1800.0, sign: Path | None = None) -> None:
        """`timeout_s`: how long it may stand still in a job. `sign`: where it is told what it does, for `diagnose`."""
        self.timeout_s, self.sign_path = timeout_s, sign
        ours, theirs = socket.socketpair()
        call = f"main({theirs.fileno()}, {buffer}, {os.getpid()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__package__}.writer_process import main; {call}"
        passed = [descriptor for descriptor in (theirs.fileno(), buffer) if descriptor >= 0]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        self.channel = Connection(ours.detach())
        beat = own_beat(setup.rank)
        self.beat = replace(beat, pid=self.process.pid, started=started_at(self.process.pid))
        self.busy = self.given_up = False
        self.send(setup)
        self.busy = False

    def send(self, job: Job | Setup | None) -> None:
        self.busy = True
        self.mark = moved(self.beat)
        self.looked = self.moved = self.ran = time.monotonic()
        if isinstance(job, Write | Seal | Copy):
            self.show(job.step)
        with suppress(OSError):  # it is gone, as `answer` will find
            self.channel.send(job)

    def answer(self, patience_s: float = 0.0) -> Answer | None:
        """What became of the job, or None where it is still at work. Where it got to is entered as our phase."""
        try:
            while self.channel.poll(patience_s):
                message = self.channel.recv()
                if not isinstance(message, Entered):
                    self.rest()
                    return message
                phase.enter(message.phase)
        except (EOFError, OSError):
            self.rest()
            return Failed(f"its writer process {self.fate()}")
        why = self.stuck(time.monotonic()) if self.busy else ""
        if why:
            self.rest()
            self.process.kill()
            self.given_up = True
            return Failed(f"its writer process {why}")
        return None

    @property
    def still_s(self) -> float:
        """For how long it has neither computed nor written anything, in a job."""
        return self.looked - self.moved if self.busy else 0.0

    def stuck(self, now: float) -> str:
        """Why it will not go on, if so: it is stopped, or has neither computed nor written anything for too long."""
        if now - self.looked < LOOK_S:
            return ""
        self.looked = now
        mark = moved(self.beat)
        if mark != self.mark:
            self.mark, self.moved = mark, now
        stopped = state_of(self.beat) == "stopped"
        self.ran = self.ran if stopped else now
        if stopped and now - self.ran > min(STOPPED_S, self.timeout_s):
            return f"(pid {self.process.pid}) is stopped (by SIGSTOP or a debugger)"
        if now - self.moved > self.timeout_s:
            return f"(pid {self.process.pid}) has stood still for {self.timeout_s:g} s: does the file system hang?"
        return ""

    def show(self, step: int) -> None:
        """What it is at, in the run's `watch` folder. Nobody waits for that, and a run goes on without it."""
        if self.sign_path is not None:
            with suppress(OSError):
                self.sign_path.parent.mkdir(exist_ok=True)
                self.sign_path.write_bytes(self.beat.first() + Beat.second(time.time(), "save.write", step))

    def rest(self) -> None:
        self.busy = False
        if self.sign_path is not None:
            with suppress(OSError):
                self.sign_path.unlink(missing_ok=True)

    def fate(self) -> str:
        code = self.process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended by itself with code {code}"

    def alive(self) -> bool:
        return not self.given_up and self.process.poll() is None

    def close(self) -> None:
        """It ends by itself where it has nothing to do; what it is in the middle of is given up."""
        if self.busy or state_of(self.beat) == "stopped":
            self.process.kill()
        self.send(None)  # said, since processes forked from this one may keep the channel open
        self.rest()
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_S)
