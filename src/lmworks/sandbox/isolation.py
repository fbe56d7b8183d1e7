"""Which isolation this machine allows, found by trying, strongest first; and what it does not protect from."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass

from ..spec.errors import SpecError, did_you_mean
from . import landlock, seccomp
from .confine import Isolation, interpreter
from .limits import Limits
from .program import Program, SandboxError
from .worker import Worker

KINDS = ("namespaces", "landlock", "seccomp")

ALWAYS = (
    "no sockets, no capabilities, no setuid programs; system calls for mounts, tracing, keys, BPF, io_uring fail",
    "an environment without variables of ours",
    "limits on CPU and wall seconds, memory, processes, output, open files and file size",
    "killed with all its children",
)
PROTECTS = {
    "namespaces": (
        "sees the system and the Python interpreter, read-only, and a temporary folder in memory; no other file",
        "sees and signals its own processes only",
        "has a network without interfaces",
    ),
    "landlock": (
        "opens the system and the Python interpreter, read-only, and its temporary folder; no other file",
        "signals its own processes only",
    ),
    "seccomp": ("writes, makes and removes no file at all", "signals itself only"),
}
KERNEL_BUGS = "bugs of the kernel itself, and side channels"
EXISTENCE = "names, sizes and dates of files can be read"
RESTRICTED = "(programs fail that change modes or times of their files, or use locks of multiprocessing)"
GAPS = {
    "namespaces": (KERNEL_BUGS,),
    "landlock": (
        EXISTENCE,
        RESTRICTED,
        "files that were deleted but are still open do not count against disk_bytes",
        KERNEL_BUGS,
    ),
    "seccomp": (
        "every file that the user it runs as may read can be read, and printed",
        "(programs that write files fail)",
        KERNEL_BUGS,
    ),
}
SAME_USER = "runs as our own user: processes are counted every 25 ms, not limited by the kernel"
SAME_USER_READS = "the environment of our own process can be read in /proc"


PROBE = "import os; os.stat(os.environ['HOME']); print(6 * 7)"  # reaches the interpreter and its own folder


@dataclass(frozen=True)
class IsolationReport:
    kind: str
    protects: tuple[str, ...]
    gaps: tuple[str, ...]  # what it does not protect from
    refused: tuple[str, ...]  # why a stronger kind is not used


def candidates(kind: str) -> list[Isolation]:
    root = os.geteuid() == 0
    users = (True, False) if root else (False,)
    if kind == "namespaces":
        without = [Isolation(kind, own_user=True)] if root else []
        return without + [Isolation(kind, own_user, user_namespace=True) for own_user in users]
    return [Isolation(kind, own_user) for own_user in users]


@functools.cache
def probe(kind: str) -> tuple[Isolation | None, str]:
    """The first way to do it in which Python starts, or why there is none."""
    if sys.platform != "linux" or not seccomp.supported():
        return None, f"{sys.platform} on {os.uname().machine}: needs Linux on x86_64 or aarch64"
    if kind == "landlock" and landlock.version() < landlock.LEAST_VERSION:
        return None, f"Landlock {landlock.version()}: needs version {landlock.LEAST_VERSION} (Linux 6.2)"
    why = ""
    for isolation in candidates(kind):
        worker = Worker(isolation)
        try:
            result = worker.run(Program([interpreter(), "-S", "-c", PROBE]), Limits(wall_seconds=60.0))
            if result.stdout == b"42\n":
                return isolation, ""
            why = why or result.stderr.decode(errors="replace").strip() or f"signal {result.signal}"
        except SandboxError as error:
            why = why or str(error)
        finally:
            worker.close()
    return None, why


def choose(kind: str) -> Isolation:
    """The strongest for `auto`; else the one of that name, or SandboxError."""
    if kind not in ("auto", *KINDS):
        raise SpecError(f"isolation = {kind!r}{did_you_mean(kind, ('auto', *KINDS))}")
    for one in KINDS if kind == "auto" else (kind,):
        if found := probe(one)[0]:
            return found
    refused = "; ".join(f"{one}: {probe(one)[1]}" for one in (KINDS if kind == "auto" else (kind,)))
    raise SandboxError(f"no isolation for untrusted programs here ({refused})")


def describe_isolation(kind: str = "auto") -> IsolationReport:
    chosen = choose(kind)
    stronger = KINDS[: KINDS.index(chosen.kind)] if kind == "auto" else ()
    gaps = GAPS[chosen.kind]
    if chosen.kind != "namespaces" and not chosen.own_user:
        gaps = (SAME_USER, *((SAME_USER_READS,) if chosen.kind == "seccomp" else ()), *gaps)
    return IsolationReport(
        chosen.kind, (*PROTECTS[chosen.kind], *ALWAYS), gaps, tuple(f"{one}: {probe(one)[1]}" for one in stronger)
    )
