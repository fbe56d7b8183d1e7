"""What the kernel of this machine allows, asked without the sandbox's own code: a test is skipped for a kind of
isolation that the kernel refuses, and fails where the kernel allows it and the sandbox does not work."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import sys

import pytest

KINDS = ("namespaces", "landlock", "seccomp")
# unshare(2) and the mounts that a root of one's own needs, in a process that ends with them.
NAMESPACES = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        sys.exit(f"{name}: {os.strerror(ctypes.get_errno())}")
uid, gid, user = os.getuid(), os.getgid(), int(sys.argv[1])
call("unshare", 0x6C020000 | (0x10000000 if user else 0))  # NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS; NEWUSER
if user:
    for name, text in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
        try:
            open(f"/proc/self/{name}", "w").write(text)
        except OSError as error:
            sys.exit(f"{name}: {error.strerror}")
call("mount", b"none", b"/", None, 0x44000, None)  # MS_REC, MS_PRIVATE
call("mount", b"tmpfs", b"/tmp", b"tmpfs", 6, b"size=1m")  # MS_NOSUID, MS_NODEV
"""


@functools.cache
def refusal(kind: str, as_root: bool = os.geteuid() == 0) -> str:
    """Why the kernel refuses this kind; empty where it allows it. Root needs no user namespace."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"{sys.platform} on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if kind == "seccomp":  # PR_GET_SECCOMP
        return "" if libc.prctl(21, 0, 0, 0, 0) >= 0 else os.strerror(ctypes.get_errno())
    if kind == "landlock":  # landlock_create_ruleset(NULL, 0, LANDLOCK_CREATE_RULESET_VERSION)
        version = libc.syscall(ctypes.c_long(444), None, ctypes.c_ulong(0), ctypes.c_uint(1))
        return "" if version >= 3 else f"Landlock's version is {max(0, version)}, not 3"
    tries = [["0"], ["1"]] if as_root else [["1"]]
    said = [subprocess.run([sys.executable, "-S", "-c", NAMESPACES, *one], capture_output=True) for one in tries]
    return "" if any(one.returncode == 0 for one in said) else said[-1].stderr.decode().strip()


def skip_refused(*kinds: str) -> None:
    """Skip the test where the kernel refuses one of these kinds, and say which."""
    for kind in kinds:
        if why := refusal(kind):
            pytest.skip(f"isolation {kind!r} was tried: the kernel refuses it ({why})")
