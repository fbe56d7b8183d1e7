"""Landlock: which files a process may open, without any privilege (Linux 6.2 for truncation, 6.12 for signals)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from . import linux

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK, TRUNCATE, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE  # rights that a file can have; the others are of folders
READ = EXECUTE | READ_FILE | READ_DIR
SCOPE_ABSTRACT_UNIX, SCOPE_SIGNAL = 1, 2
LEAST_VERSION = 3  # truncation
SIGNALS_SINCE = 6
RULE_PATH_BENEATH = 1


class Ruleset(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("handled_fs", "handled_net", "scoped"))


class PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """Of the kernel's interface; 0: there is none."""
    asks_for_version = 1
    found = linux.LIBC.syscall(
        ctypes.c_long(linux.LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(asks_for_version)
    )
    return max(0, found)


def scopes_signals() -> bool:
    return version() >= SIGNALS_SINCE


def make_ruleset(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Its descriptor: `readable` may be read and executed, below `writable` anything made but device nodes."""
    known = version()
    all_rights = (IOCTL_DEV << 1) - 1 if known >= 5 else IOCTL_DEV - 1
    scoped = SCOPE_ABSTRACT_UNIX | SCOPE_SIGNAL if known >= SIGNALS_SINCE else 0
    rules = Ruleset(all_rights, 0, scoped)
    size = ctypes.c_size_t(ctypes.sizeof(rules))
    ruleset = linux.syscall("landlock", linux.LANDLOCK_CREATE_RULESET, ctypes.byref(rules), size, ctypes.c_uint32(0))
    write = all_rights & ~(MAKE_CHAR | MAKE_BLOCK)
    for paths, rights in ((readable, READ), (writable, write)):
        for path in paths:
            if not os.path.exists(path):
                continue
            with_folder = rights if os.path.isdir(path) else rights & OF_FILES
            beneath = PathBeneath(with_folder, os.open(path, os.O_PATH))
            what = (ctypes.c_int(ruleset), ctypes.c_int(RULE_PATH_BENEATH), ctypes.byref(beneath), ctypes.c_uint32(0))
            linux.syscall("landlock", linux.LANDLOCK_ADD_RULE, *what)
            os.close(beneath.parent_fd)
    return ruleset


def restrict(ruleset: int) -> None:
    """This process and its children open nothing else. Needs no_new_privs."""
    linux.syscall("landlock", linux.LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)
