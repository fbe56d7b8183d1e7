"""What goes into the sandbox and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ..spec.errors import LMWorksError, SpecError
from .python_program import MAIN


class SandboxError(LMWorksError):
    """The sandbox itself does not work here; no fault of the program in it."""


@dataclass(frozen=True)
class Program:
    """Python source, or a command with its arguments; its standard input; files by their path in its folder."""

    code: str | Sequence[str]
    stdin: str | bytes = b""
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise SpecError(f"Program.files[{name!r}]: a path inside the folder of the program, without '..'")
        if isinstance(self.code, str) and MAIN in self.files:
            raise SpecError(f"Program.files[{MAIN!r}]: the program itself has this name")
        if not self.code and not isinstance(self.code, str):
            raise SpecError("Program.code: a command has at least one word")


@dataclass(frozen=True)
class SandboxResult:
    exit_code: int | None  # None: a signal ended it
    signal: int | None  # 9 where a limit did
    limit: str | None  # cpu, wall, memory, processes, output or disk: the limit for which it was killed
    stdout: bytes
    stderr: bytes
    truncated: bool  # one of both was cut at output_bytes
    wall_seconds: float
    cpu_seconds: float  # of the program and its children
    isolation: str  # namespaces, landlock or seccomp

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; what is not UTF-8 is replaced."""
        return self.stdout.decode(errors="replace")
