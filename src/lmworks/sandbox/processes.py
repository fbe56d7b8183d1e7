"""The processes below this one: what they use, and how all of them are ended."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass

TICK = os.sysconf("SC_CLK_TCK")
RESIDENT = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
PATIENCE_S = 20.0  # for killed processes to be gone


def read(path: str) -> str:
    with open(path, errors="replace") as file:  # a program may give itself any name
        return file.read()


def children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, read(f"/proc/{pid}/task/{thread}/children").split())
    except FileNotFoundError:
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # a kernel without CONFIG_PROC_CHILDREN
            return children_by_scan(pid)
    except ProcessLookupError:
        pass
    return found


def children_by_scan(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = read(f"/proc/{name}/stat").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(name))
    return found


def descendants(pid: int) -> list[int]:
    found, ahead = [], [pid]
    while ahead:
        below = children(ahead.pop())
        found += below
        ahead += below
    return found


def tasks_of_user(uid: int) -> int:
    """Threads of all processes of a user, which is what RLIMIT_NPROC counts."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


@dataclass
class Usage:
    tasks: int = 0  # processes and threads
    cpu_s: float = 0.0  # of those that run and of those they have waited for
    memory: int = 0  # resident bytes that no file backs; what processes share counts for each


def usage(pids: Collection[int]) -> Usage:
    total = Usage()
    for pid in pids:
        try:
            fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            resident = RESIDENT.findall(read(f"/proc/{pid}/status"))
        except (FileNotFoundError, ProcessLookupError):
            continue
        total.cpu_s += sum(map(int, fields[11:15])) / TICK
        total.tasks += int(fields[17])
        total.memory += sum(map(int, resident)) << 10
    return total


def kill_descendants() -> float:
    """SIGKILL to every process below this one, until none is left; this one has to be their subreaper, so that what
    loses its parent becomes its child. Stopped first: one that forks all the time would outrun us. Returns the CPU
    seconds of all that were waited for."""
    cpu_s = 0.0
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            while True:
                pid, _, used = os.wait4(-1, os.WNOHANG)
                if not pid:
                    break
                cpu_s += used.ru_utime + used.ru_stime
        except ChildProcessError:
            return cpu_s
        stopped: set[int] = set()
        while new := set(descendants(os.getpid())) - stopped:
            send(new, signal.SIGSTOP)
            stopped |= new
        send(stopped, signal.SIGKILL)
        time.sleep(0.0005)
    raise TimeoutError(f"processes {sorted(descendants(os.getpid()))} cannot be killed")


def send(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # of another user: it goes with process 1 of its namespace
            continue
