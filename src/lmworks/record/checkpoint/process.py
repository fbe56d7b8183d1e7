"""A rank's end of its writer process: start it, give it jobs, hear what became of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from .. import phase
from .jobs import Answer, Entered, Failed, Job, Setup

# Called in every new writer before its first job. They must be picklable: functions of modules that it can import.
startup: list[Callable[[], None]] = []


class Writer:
    """One process. It imports no torch, is ready in a fraction of a second, and has nothing of ours but the buffer."""

    def __init__(self, setup: Setup, buffer: int = -1) -> None:
        ours, theirs = socket.socketpair()
        call = f"main({theirs.fileno()}, {buffer}, {os.getpid()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__package__}.writer import main; {call}"
        passed = [descriptor for descriptor in (theirs.fileno(), buffer) if descriptor >= 0]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        self.channel = Connection(ours.detach())
        self.busy = False
        self.send(setup)
        self.busy = False

    def send(self, job: Job | Setup | None) -> None:
        self.busy = True
        with suppress(OSError):  # it is gone, as `answer` will find
            self.channel.send(job)

    def answer(self, patience_s: float = 0.0) -> Answer | None:
        """What became of the job, or None where it is still at work. Where it got to is entered as our phase."""
        try:
            while self.channel.poll(patience_s):
                message = self.channel.recv()
                if not isinstance(message, Entered):
                    self.busy = False
                    return message
                phase.enter(message.phase)
        except (EOFError, OSError):
            self.busy = False
            return Failed(f"its writer process {self.fate()}")
        return None

    def fate(self) -> str:
        code = self.process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended by itself with code {code}"

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """It ends by itself where it has nothing to do; what it is in the middle of is given up."""
        if self.busy:
            self.process.kill()
        self.send(None)  # said, since processes forked from this one may keep the channel open
        self.channel.close()
        self.process.wait()
