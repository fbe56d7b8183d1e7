"""What a process does to itself before it runs what a model wrote: limits, identity, filters; none can be undone."""

from __future__ import annotations

import os
import resource
import signal
import sys
from dataclasses import dataclass

from . import landlock, linux, namespaces, seccomp
from .limits import Limits
from .processes import tasks_of_user

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
OWN_USERS = 0x7000_0000  # from here on nobody gives user ids away (systemd's UIDS-GIDS.md)
NOBODY = 65534


@dataclass(frozen=True)
class Isolation:
    """How programs are held: kind (namespaces, landlock, seccomp), and which privileges that takes."""

    kind: str
    own_user: bool  # programs run as a user that nobody else is: takes root
    user_namespace: bool = False  # namespaces without privileges


def own_user_id(pid: int) -> int:
    """Of the programs that process `pid` starts, one at a time."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    wanted = OWN_USERS + pid
    return wanted if any(first <= wanted < first + count for first, _, count in ranges) else NOBODY


def visible_paths() -> list[str]:
    """Of the host, to read: the system and this interpreter."""
    prefixes = {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    own = [path for path in sorted(prefixes) if not any(path == top or path.startswith(top + "/") for top in SYSTEM)]
    return [*SYSTEM, *SYSTEM_FILES, *own]


def interpreter() -> str:
    """The one that a virtual environment stands on: its files are in `visible_paths`."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def environment(work: str) -> dict[str, str]:
    return {
        "PATH": f"{os.path.dirname(interpreter())}:/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "TMPDIR": work,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",  # the same program gives the same reward
        "MALLOC_ARENA_MAX": "1",  # else every thread reserves 64 MiB of address space
    }


def set_limits(limits: Limits, isolation: Isolation) -> None:
    if isolation.user_namespace:
        tasks = limits.processes + 2  # process 1 of the namespace, and the one that waits for it
    elif isolation.own_user:
        tasks = limits.processes
    else:  # counted with all other processes of this user: a fence far out; the supervisor counts exactly
        tasks = tasks_of_user(os.getuid()) + 8 * limits.processes
    values = {
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_CPU: int(limits.cpu_seconds) + 2,  # of one process; the supervisor adds them up
        resource.RLIMIT_NPROC: tasks,
        resource.RLIMIT_FSIZE: limits.disk_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_STACK: 8 << 20,
    }
    for which, value in values.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def switch_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def confine(isolation: Isolation, uid: int, limits: Limits, work: str) -> None:
    apart = isolation.kind == "namespaces"
    rules = None  # made by a user that can reach all these paths
    if isolation.kind == "landlock":
        rules = landlock.make_ruleset([*visible_paths(), *namespaces.DEVICES], [work, "/dev/null"])
    set_limits(limits, isolation)
    if uid != os.getuid():
        switch_user(uid)
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # /proc/self is its own again
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if rules is not None:
        landlock.restrict(rules)
    scoped = apart or (rules is not None and landlock.scopes_signals())
    seccomp.install(seccomp.rules(signals=not scoped, metadata=not apart, writes=isolation.kind == "seccomp"))
