"""Out of memory, as it shows from outside: in the errors of allocators, and in the resident memory of processes."""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ..spec import TrainingError

# What allocators say in errors that have no type of their own: PyTorch's for CPUs, C++'s, the system's, cuBLAS's.
SAYS = ("out of memory", "allocate memory", "not enough memory", "std::bad_alloc", "cublas_status_alloc_failed")
ASKED = re.compile(r"(?i)tried to allocate ([\d.]+) (bytes|[KMG]iB)")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
LOOK_S = 0.1  # between two looks at the memory of processes


class OutOfMemory(TrainingError):
    """An allocation that failed. `final` where no step had been taken: the next start would end the same way."""

    def __init__(
        self, message: str, predicted: int | None = None, measured: int | None = None, final: bool = True
    ) -> None:
        super().__init__(message)
        self.final = final
        self.facts = {"cause": "oom", "predicted_bytes": predicted, "measured_bytes": measured}


def is_oom(error: BaseException) -> bool:
    """Whether memory could not be allocated; torch.OutOfMemoryError is a RuntimeError that says so."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in said for word in SAYS))


def as_oom(error: Exception) -> Exception:
    """The same error; one of memory as one that speaks to the user, with what the allocator said."""
    if not is_oom(error):
        return error
    return OutOfMemory(f"out of memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


def asked_bytes(error: BaseException) -> int | None:
    """What was to be allocated, where the allocator says it."""
    found = ASKED.search(str(error))
    return round(float(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else None


def resident_peak(pid: int | str = "self") -> int | None:
    """The highest resident memory of a process; None where it is gone, or the system does not tell."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


class ChildPeaks:
    """While it is entered, the highest resident memory of every process that this one has started, by its number.

    Who is killed leaves no word: this is what was last seen of it.
    """

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.loop, name="rank-memory", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.over.set()
        self.thread.join()

    def loop(self) -> None:
        while not self.over.wait(LOOK_S):
            for pid in children():
                if peak := resident_peak(pid):
                    self.bytes[pid] = peak


def children() -> list[int]:
    """Of all threads of this process; none where the kernel does not list them."""
    found: list[int] = []
    for thread in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, thread.read_text().split())
    return found
