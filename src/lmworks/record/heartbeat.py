"""Heartbeats: the current phase of each rank, and the state of its process.

A rank maps a small file in the run's `watch` folder into memory, and writes its phase there. So other processes can
read what it was doing when it was killed or stopped; the state of the process is read from /proc.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from . import phase

UNKNOWN = "unknown"  # the state of a process on another host
STATES = {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}


@dataclass(frozen=True)
class Heartbeat:
    """Identity of a rank, written once, and its phase, written at every change."""

    rank: int
    host: str
    pid: int
    started: int  # start time of the process, to detect a reused pid
    time: float
    phase: str
    step: int
    attempt: int = 0  # failed attempts leave their heartbeats behind

    @property
    def place(self) -> str:
        return phase_text(self.phase, self.step)

    def first(self) -> bytes:
        return (
            json.dumps({key: vars(self)[key] for key in ("rank", "host", "pid", "started", "attempt")}).encode() + b"\n"
        )

    @staticmethod
    def second(time: float, phase: str, step: int) -> bytes:
        """Of fixed length, so that it can be overwritten in place."""
        return f"{time:.3f} {step} {phase}".encode().ljust(64)

    @classmethod
    def read(cls, content: bytes) -> Self:
        first, _, second = content.partition(b"\n")
        time, step, phase = second.decode().split()
        return cls(**json.loads(first), time=float(time), step=int(step), phase=phase)


def read_owner(fields: Mapping[str, Any]) -> Heartbeat:
    """Of the identity that `Heartbeat.first` wrote; keys that others added are ignored."""
    identity = {key: fields[key] for key in ("rank", "host", "pid", "started", "attempt")}
    return Heartbeat(**identity, time=0.0, phase="init", step=0)


def phase_text(phase: str, step: int) -> str:
    return f"{phase} of step {step}" if step else phase


def read_heartbeats(run: Path, attempt: int | None = None) -> dict[int, Heartbeat]:
    """Of a running or failed attempt; by default of the last one that left any."""
    found = read_files(run, "rank-*.life")
    if attempt is None:
        attempt = max((heartbeat.attempt for heartbeat in found.values()), default=0)
    return {rank: heartbeat for rank, heartbeat in sorted(found.items()) if heartbeat.attempt == attempt}


def read_stat(path: str) -> list[str]:
    """The fields of a stat file from the third on; the process name before them may contain anything."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(") ")[2].split()


def own_heartbeat(rank: int, attempt: int = 0) -> Heartbeat:
    host, pid = socket.gethostname(), os.getpid()
    return Heartbeat(rank, host, pid, started_at(pid), time.time(), phase.name, phase.step, attempt)


def started_at(pid: int) -> int:
    try:
        return int(read_stat(f"/proc/{pid}/stat")[19])
    except (OSError, IndexError, ValueError):
        return 0


def activity_counters(heartbeat: Heartbeat) -> tuple[int, ...]:
    """CPU and IO counters of a local process, which change while it makes progress; empty if unknown."""
    try:
        ticks = read_stat(f"/proc/{heartbeat.pid}/stat")[11:13]
        with open(f"/proc/{heartbeat.pid}/io", encoding="utf-8") as file:
            counts = [line.split()[1] for line in file][:4]
    except (OSError, IndexError):
        return ()
    return tuple(map(int, (*ticks, *counts)))


def read_writer_heartbeats(run: Path) -> dict[int, Heartbeat]:
    """Of writer processes with a running save, by rank."""
    return read_files(run, "writer-*.life")


def read_files(run: Path, pattern: str) -> dict[int, Heartbeat]:
    """By rank. Torn files are ignored."""
    found: dict[int, Heartbeat] = {}
    for path in sorted((run / "watch").glob(pattern)):
        with suppress(OSError, ValueError, TypeError):
            heartbeat = Heartbeat.read(path.read_bytes())
            found[heartbeat.rank] = heartbeat
    return found


def process_state(heartbeat: Heartbeat) -> str:
    """running, stopped or gone; unknown on another host, or without /proc."""
    if heartbeat.host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return UNKNOWN
    try:
        fields = read_stat(f"/proc/{heartbeat.pid}/stat")
    except OSError:
        return "gone"
    if int(fields[19]) != heartbeat.started:  # the pid was reused
        return "gone"
    return STATES.get(fields[0], "running")
