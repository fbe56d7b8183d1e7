"""Signs of life: where each rank of a run is, and what its process does, for whoever has to ask.

A rank keeps a small file in the run's `watch` folder while it trains, mapped into its memory, and writes there at every
phase. What it was doing when it was killed or stopped can so be read by others; the system tells the rest, in /proc.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from . import phase

UNSEEN = "unknown"  # the state of a process that nobody on its host could look at
STATES = {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}


@dataclass(frozen=True)
class Beat:
    """What a rank wrote of itself while it was well: who it is, once, and where it is, at every phase."""

    rank: int
    host: str
    pid: int
    started: int  # of the process, so that its number is not taken for another's
    time: float
    phase: str
    step: int
    attempt: int = 0  # at the run: one that failed leaves its signs of life behind

    @property
    def place(self) -> str:
        return where(self.phase, self.step)

    def first(self) -> bytes:
        return (
            json.dumps({key: vars(self)[key] for key in ("rank", "host", "pid", "started", "attempt")}).encode() + b"\n"
        )

    @staticmethod
    def second(time: float, phase: str, step: int) -> bytes:
        """Always as long, so that it can be written in place."""
        return f"{time:.3f} {step} {phase}".encode().ljust(64)

    @classmethod
    def read(cls, content: bytes) -> Self:
        first, _, second = content.partition(b"\n")
        time, step, phase = second.decode().split()
        return cls(**json.loads(first), time=float(time), step=int(step), phase=phase)


def where(phase: str, step: int) -> str:
    return f"{phase} of step {step}" if step else phase


def read_beats(run: Path, attempt: int | None = None) -> dict[int, Beat]:
    """Of an attempt that is under way, or that did not end well; by default of the last one that left any.

    One that is half written is passed over.
    """
    found: dict[int, Beat] = {}
    for path in (run / "watch").glob("rank-*.life"):
        try:
            beat = Beat.read(path.read_bytes())
        except (OSError, ValueError, TypeError):
            continue
        found[beat.rank] = beat
    if attempt is None:
        attempt = max((beat.attempt for beat in found.values()), default=0)
    return {rank: beat for rank, beat in sorted(found.items()) if beat.attempt == attempt}


def read_stat(path: str) -> list[str]:
    """The fields of a stat file from the third on; a name in parentheses before them may hold anything."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(") ")[2].split()


def own_beat(rank: int, attempt: int = 0) -> Beat:
    host, pid = socket.gethostname(), os.getpid()
    return Beat(rank, host, pid, started_at(pid), time.time(), phase.name, phase.step, attempt)


def started_at(pid: int) -> int:
    try:
        return int(read_stat(f"/proc/{pid}/stat")[19])
    except (OSError, IndexError, ValueError):
        return 0


def moved(beat: Beat) -> tuple[int, ...]:
    """Changes whenever a process of this host computes, reads or writes; empty where that cannot be told."""
    try:
        ticks = read_stat(f"/proc/{beat.pid}/stat")[11:13]
        with open(f"/proc/{beat.pid}/io", encoding="utf-8") as file:
            counts = [line.split()[1] for line in file][:4]
    except (OSError, IndexError):
        return ()
    return tuple(map(int, (*ticks, *counts)))


def read_writers(run: Path) -> dict[int, Beat]:
    """Writer processes of asynchronous saves that are at one now, by rank."""
    found: dict[int, Beat] = {}
    for path in sorted((run / "watch").glob("writer-*.life")):
        try:
            beat = Beat.read(path.read_bytes())
        except (OSError, ValueError, TypeError):
            continue
        found[beat.rank] = beat
    return found


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
