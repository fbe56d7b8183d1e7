"""Out of memory: errors of allocators, and resident memory of processes."""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from ..spec import TrainingError

# Texts of errors without a type of their own: PyTorch's CPU allocator, C++, the system, cuBLAS.
OOM_MESSAGES = ("out of memory", "allocate memory", "not enough memory", "std::bad_alloc", "cublas_status_alloc_failed")
ASKED = re.compile(r"(?i)tried to allocate ([\d.]+) (bytes|[KMG]iB)")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
CGROUPS, CGROUP_ROOT, VMSTAT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/proc/vmstat")
OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
POLL_S = 0.1  # between two reads of process memory


class OutOfMemory(TrainingError):
    """A failed allocation. `final` if no step was taken: a restart would fail in the same way."""

    def __init__(
        self, message: str, predicted: int | None = None, measured: int | None = None, final: bool = True
    ) -> None:
        super().__init__(message)
        self.final = final
        self.facts = {"cause": "oom", "predicted_bytes": predicted, "measured_bytes": measured}


def is_oom(error: BaseException) -> bool:
    """Whether an allocation failed; torch.OutOfMemoryError is a RuntimeError with such a text."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and is_oom_message(str(error)))


def is_oom_message(message: str) -> bool:
    """Of an error in another process, which left no more than its text."""
    return any(text in message.lower() for text in (*OOM_MESSAGES, "memoryerror"))


def as_oom(error: Exception) -> Exception:
    """An out-of-memory error as `OutOfMemory` with the allocator's message; any other unchanged."""
    if not is_oom(error):
        return error
    return OutOfMemory(f"out of memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory: those of this process' cgroup where it counts them, else
    those of the machine.
    """
    cgroups = CGROUPS.read_text().splitlines() if CGROUPS.is_file() else []
    counters = [counter for line in cgroups if (counter := oom_counter(*line.split(":", 2))) is not None]
    for counter in (*counters, VMSTAT):
        with suppress(OSError):
            if found := OOM_KILL.search(counter.read_text()):
                return int(found[1])
    return 0


def oom_counter(_number: str, controllers: str, path: str) -> Path | None:
    """Of a line of /proc/self/cgroup, in which version 2 names no controllers."""
    if controllers == "":
        return CGROUP_ROOT / path.strip("/") / "memory.events"
    return CGROUP_ROOT / "memory" / path.strip("/") / "memory.oom_control" if controllers == "memory" else None


def requested_bytes(error: BaseException) -> int | None:
    """Bytes of the failed allocation, if the message has them."""
    found = ASKED.search(str(error))
    return round(float(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else None


def resident_peak(pid: int | str = "self") -> int | None:
    """Peak resident memory of a process; None if it has ended, or is unknown."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


class ChildPeaks:
    """While entered, polls the peak resident memory of every child process, by pid: the last value before a kill."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.loop, name="rank-memory", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def loop(self) -> None:
        while not self.over.wait(POLL_S):
            for pid in children():
                if peak := resident_peak(pid):
                    self.bytes[pid] = peak


def children() -> list[int]:
    """Child processes of all threads; none if the kernel does not list them."""
    found: list[int] = []
    for thread in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, thread.read_text().split())
    return found
