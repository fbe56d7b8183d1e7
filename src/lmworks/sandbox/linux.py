"""Linux system calls that Python's `os` has not got (3.11), through ctypes."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_int, c_long, c_ulong

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x4_0000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 0x1, 0x2, 0x4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

# Numbers that all architectures share (those of 2019 and later).
CLOSE_RANGE, MOUNT_SETATTR = 436, 442
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

AT_FDCWD, AT_RECURSIVE = -100, 0x8000


def checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    return checked(LIBC.syscall(c_long(number), *arguments), name)


def prctl(option: int, value: int) -> None:
    checked(LIBC.prctl(c_int(option), c_ulong(value), c_ulong(0), c_ulong(0), c_ulong(0)), f"prctl({option})")


def unshare(flags: int) -> None:
    checked(LIBC.unshare(c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_bytes = None if kind is None else os.fsencode(kind)
    result = LIBC.mount(
        c_char_p(os.fsencode(source)), c_char_p(os.fsencode(target)), kind_bytes, c_ulong(flags), options.encode()
    )
    checked(result, f"mount of {kind or source}")


class MountAttr(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def set_mount_attributes(path: str, attributes: int, recursive: bool = True) -> None:
    """Of a mount, and of those below it: what `mount -o remount,bind` does to one only (Linux 5.12)."""
    value = MountAttr(attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    where = c_char_p(os.fsencode(path))
    size = c_ulong(ctypes.sizeof(value))
    syscall("mount_setattr", MOUNT_SETATTR, c_int(AT_FDCWD), where, c_int(flags), ctypes.byref(value), size)


def pivot_root_here() -> None:
    """The working directory becomes /; the old root is gone."""
    syscall("pivot_root", PIVOT_ROOT[os.uname().machine], c_char_p(b"."), c_char_p(b"."))
    checked(LIBC.umount2(c_char_p(b"."), c_int(MNT_DETACH)), "umount of the old root")
    os.chdir("/")


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    nothing = (ctypes.c_uint32 * 6)()
    checked(LIBC.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")


def close_from(first: int) -> None:
    """All descriptors from `first` on."""
    if LIBC.syscall(c_long(CLOSE_RANGE), c_int(first), c_int(-1), c_int(0)) < 0:  # before Linux 5.9
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
