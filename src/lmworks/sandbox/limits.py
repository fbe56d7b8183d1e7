"""What a program may use."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Of one program with all its children."""

    cpu_seconds: float = 5.0
    wall_seconds: float = 10.0
    memory_bytes: int = 512 << 20  # address space of each process, and resident memory of all
    processes: int = 32  # and threads
    output_bytes: int = 1 << 20  # of standard output, and as many of standard error
    open_files: int = 64  # of each process
    disk_bytes: int = 64 << 20  # of the temporary folder, and of each file
    disk_files: int = 4096  # files and folders in the temporary folder

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) <= 0:
                from ..spec.errors import SpecError  # not at the top: a supervisor starts in half the time without

                raise SpecError(f"Limits.{one.name} = {getattr(self, one.name)}: a limit is above 0")
