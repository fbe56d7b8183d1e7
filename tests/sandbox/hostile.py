"""Hostile programs: what each tries, and what must hold of its end.

A program that tries to do harm calls `attempt`, which prints HARMED where it was let; one that reaches its end prints
END, so that a program that broke off early is not taken for one that was refused. Names in angle brackets are filled in
with canaries of the host (`Host.fill` in test_hostile_programs.py). Harm that a program could do if it were let is to
these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lmworks.sandbox import Limits

ALL = frozenset({"namespaces", "landlock", "seccomp"})
WITH_FILES = frozenset({"namespaces", "landlock"})  # where files of ours cannot be read, and programs can write

PRELUDE = """\
import ctypes, os, signal, socket, subprocess, sys, threading, time
LIBC = ctypes.CDLL(None, use_errno=True)
def attempt(what, call):
    try:
        call()
    except (OSError, MemoryError, subprocess.SubprocessError, RuntimeError) as error:
        print("refused", what, repr(error))
    else:
        print("HARMED", what)
def write(path):
    with open(path, "w") as file:
        file.write("harm")
def look(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
def raw(number, *arguments):
    if LIBC.syscall(ctypes.c_long(number), *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
ARM = os.uname().machine == "aarch64"
"""
END = '\nprint("END")\n'


@dataclass(frozen=True)
class Hostile:
    name: str
    source: str
    ends: str = "END"  # what standard output has to contain
    limit: frozenset[str | None] = frozenset({None})  # those for which it may be killed
    signal: int | None = None
    exit_code: int | None = 0
    limits: dict[str, float] = field(default_factory=dict)
    kinds: frozenset[str] = ALL  # where it is held back; elsewhere `describe_isolation` names the gap

    @property
    def program(self) -> str:
        return PRELUDE + self.source + END

    def within(self) -> Limits:
        return Limits(**{"cpu_seconds": 5.0, "wall_seconds": 20.0, **self.limits})  # type: ignore[arg-type]


def stopped(name: str, source: str, *limit: str, **limits: float) -> Hostile:
    """A program that goes on until it is killed."""
    return Hostile(name, source, "", frozenset(limit), 9, None, limits)
