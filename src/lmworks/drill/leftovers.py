"""Processes that drills started, and all that those started: known by a mark in their environment, and ended.

Drills stop processes in the middle of their work, and a runbook's command starts some that leave their parents. Nobody
else ends those where the drill itself is killed: a second process waits for that, and ends them all.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MARK = "LMWORKS_DRILL"  # environment variable of every process that is started here
OWN_MARK = secrets.token_hex(8)  # of this process's drills
PATIENCE_S = 20.0  # for processes to be gone after SIGKILL
POLL_S = 0.05

_watcher: subprocess.Popen[bytes] | None = None


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a process of a drill. One thread each: several servers share the cores of this machine."""
    watch_this_process()
    return {**os.environ, "OMP_NUM_THREADS": "1", MARK: OWN_MARK, **(more or {})}


def disk_name(mark: str = OWN_MARK) -> str:
    """What file systems that are mounted by drills are called."""
    return f"lmworks-drill-{mark}"


def watch_this_process() -> None:
    """Starts what ends everything when this process has ended, however it did. Its input is closed by that alone."""
    global _watcher
    if _watcher is None:
        words = [sys.executable, "-m", __name__, OWN_MARK]
        _watcher = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)


def marked(mark: str = OWN_MARK) -> list[int]:
    """Processes that have not ended. Those that only wait for their parents have no environment any more."""
    wanted, found = f"{MARK}={mark}".encode(), list[int]()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def end_marked(mark: str = OWN_MARK) -> None:
    """SIGKILL, which ends stopped processes too, until there are none; then the file systems."""
    end = time.monotonic() + PATIENCE_S
    while (left := marked(mark)) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        name, place = line.split()[:2]
        if name == disk_name(mark):
            subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # until the process that started this one has ended
    end_marked(sys.argv[1])
