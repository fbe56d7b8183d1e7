"""The client of a writer process: start it, send it jobs, receive their results."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...record import phase
from ...record.heartbeat import Heartbeat, activity_counters, own_heartbeat, process_state, started_at
from .folders import RetentionPolicy
from .manifest import Files


@dataclass(frozen=True)
class WriterSetup:
    """The first message: the rank, and what is the same in every save."""

    rank: int
    header: bytes
    size: int  # bytes in the staging buffer
    index: bytes  # only on rank 0
    hash: str
    startup: tuple[Callable[[], None], ...]


@dataclass(frozen=True)
class WriteJob:
    """Write the staging buffer."""

    step: int
    work: Path


@dataclass(frozen=True)
class SealJob:
    """The files of all ranks are on disk: write the manifest and commit."""

    step: int
    work: Path
    final: Path
    meta: dict[str, Any]
    files: Files
    torch: str
    hash: str
    keep: RetentionPolicy


@dataclass(frozen=True)
class AbandonJob:
    """A rank has failed: remove the files of the others."""

    step: int
    work: Path


@dataclass(frozen=True)
class CopyJob:
    """Copy a committed checkpoint to remote storage."""

    step: int
    folder: Path
    remote: str
    keep: RetentionPolicy


Job = WriteJob | SealJob | AbandonJob | CopyJob


@dataclass(frozen=True)
class PhaseEntered:
    """The writer has entered this phase."""

    phase: str


@dataclass(frozen=True)
class JobDone:
    files: Files
    seconds: float


@dataclass(frozen=True)
class JobFailed:
    reason: str


Answer = JobDone | JobFailed


# --- client ----------------------------------------------------------------------------------------------

# Called in every new writer before its first job. They must be picklable: functions of modules that it can import.
startup: list[Callable[[], None]] = []

STOPPED_TIMEOUT_S = 10.0  # for which a writer may be stopped while its rank runs; suspending a job stops both
CHECK_S = 0.5
KILL_S = 5.0  # to wait for its end: a killed process in a hung file system does not end


class WriterClient:
    """One process. It does not import torch, starts in a fraction of a second, and shares only the staging buffer."""

    def __init__(
        self, setup: WriterSetup, buffer: int = -1, timeout_s: float = 1800.0, heartbeat_path: Path | None = None
    ) -> None:
        """`timeout_s`: without progress in a job. `heartbeat_path`: its heartbeat, for `diagnose`."""
        self.timeout_s, self.heartbeat_path = timeout_s, heartbeat_path
        parent, child = socket.socketpair()
        call = f"main({child.fileno()}, {buffer}, {os.getpid()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__package__}.writer_process import main; {call}"
        passed = [descriptor for descriptor in (child.fileno(), buffer) if descriptor >= 0]
        with child:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        self.channel = Connection(parent.detach())
        heartbeat = own_heartbeat(setup.rank)
        self.heartbeat = replace(heartbeat, pid=self.process.pid, started=started_at(self.process.pid))
        self.busy = self.given_up = False
        self.send(setup)
        self.busy = False

    def send(self, job: Job | WriterSetup | None) -> None:
        self.busy = True
        self.counters = activity_counters(self.heartbeat)
        self.last_check = self.last_progress = self.last_running = time.monotonic()
        if isinstance(job, WriteJob | SealJob | CopyJob):
            self.write_heartbeat(job.step)
        with suppress(OSError):  # the process has ended, as `answer` will find
            self.channel.send(job)

    def answer(self, timeout_s: float = 0.0) -> Answer | None:
        """The result of the job; None while it runs. Its phases are entered here."""
        try:
            while self.channel.poll(timeout_s):
                message = self.channel.recv()
                if not isinstance(message, PhaseEntered):
                    self.mark_idle()
                    return message
                phase.enter(message.phase)
        except (EOFError, OSError):
            self.mark_idle()
            return JobFailed(f"its writer process {self.exit_reason()}")
        why = self.stall_reason(time.monotonic()) if self.busy else ""
        if why:
            self.mark_idle()
            self.process.kill()
            self.given_up = True
            return JobFailed(f"its writer process {why}")
        return None

    @property
    def stalled_s(self) -> float:
        """Seconds without progress in a job."""
        return self.last_check - self.last_progress if self.busy else 0.0

    def stall_reason(self, now: float) -> str:
        """Why it is given up: stopped, or without progress for too long; empty otherwise."""
        if now - self.last_check < CHECK_S:
            return ""
        self.last_check = now
        counters = activity_counters(self.heartbeat)
        if counters != self.counters:
            self.counters, self.last_progress = counters, now
        stopped = process_state(self.heartbeat) == "stopped"
        self.last_running = self.last_running if stopped else now
        if stopped and now - self.last_running > min(STOPPED_TIMEOUT_S, self.timeout_s):
            return f"(pid {self.process.pid}) is stopped (by SIGSTOP or a debugger)"
        if now - self.last_progress > self.timeout_s:
            return f"(pid {self.process.pid}) has made no progress for {self.timeout_s:g} s: does the file system hang?"
        return ""

    def write_heartbeat(self, step: int) -> None:
        """In the run's `watch` folder; errors are ignored."""
        if self.heartbeat_path is not None:
            with suppress(OSError):
                self.heartbeat_path.parent.mkdir(exist_ok=True)
                self.heartbeat_path.write_bytes(
                    self.heartbeat.first() + Heartbeat.second(time.time(), "save.write", step)
                )

    def mark_idle(self) -> None:
        self.busy = False
        if self.heartbeat_path is not None:
            with suppress(OSError):
                self.heartbeat_path.unlink(missing_ok=True)

    def exit_reason(self) -> str:
        code = self.process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended by itself with code {code}"

    def alive(self) -> bool:
        return not self.given_up and self.process.poll() is None

    def close(self) -> None:
        """An idle writer ends by itself; a running job is abandoned."""
        if self.busy or process_state(self.heartbeat) == "stopped":
            self.process.kill()
        self.send(None)  # explicit: processes forked from this one may keep the channel open
        self.mark_idle()
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_S)
