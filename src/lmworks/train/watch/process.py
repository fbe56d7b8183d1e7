"""Processes as the system sees them: which of this host's ranks is stopped, gone, or asleep. Linux tells, in /proc."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

from ...record import phase
from ...record.hang import UNSEEN, Beat

STATES = {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}


def read_stat(path: str) -> list[str]:
    """The fields of a stat file from the third on; a name in parentheses before them may hold anything."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(") ")[2].split()


def own_beat(rank: int) -> Beat:
    host, pid = socket.gethostname(), os.getpid()
    return Beat(rank, host, pid, started_at(pid), time.time(), phase.name, phase.step)


def started_at(pid: int) -> int:
    try:
        return int(read_stat(f"/proc/{pid}/stat")[19])
    except (OSError, IndexError, ValueError):
        return 0


def state_of(beat: Beat) -> str:
    """running, stopped or gone; unknown where this is another host, or no Linux."""
    if beat.host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return UNSEEN
    try:
        fields = read_stat(f"/proc/{beat.pid}/stat")
    except OSError:
        return "gone"
    if int(fields[19]) != beat.started:  # the number was given to another process
        return "gone"
    return STATES.get(fields[0], "running")


class MainThread:
    """Whether the main thread of this process sleeps: in a collective of the CPU's it does nothing else."""

    def __init__(self) -> None:
        self.path = f"/proc/self/task/{threading.main_thread().native_id}/stat"

    def sleeps(self) -> bool:
        try:
            return read_stat(self.path)[0] == "S"
        except OSError:
            return True
