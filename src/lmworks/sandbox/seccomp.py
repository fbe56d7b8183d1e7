"""A seccomp filter in classic BPF: system calls that a program under test has no business with fail with an error.

Everything is allowed but what is listed here. Numbers above LAST (newer calls, x32) are unknown to the filter and fail
with ENOSYS; another architecture's calling convention kills the process. One filter serves all kinds of isolation, and
what a missing namespace leaves open is closed by further rules (`rules`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable, Sequence

from . import linux

LAST = 449  # futex_waitv, the last one with a use here
ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}  # AUDIT_ARCH_*

# Name → number on x86_64, on aarch64 (None: has no such call).
KERNEL = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    # sockets; socketpair remains, for asyncio and multiprocessing
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    # memory and objects that outlive a process or that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "io_setup": (206, 0), "sync": (162, 81), "syncfs": (306, 267),
    # kernel
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "syslog": (103, 116), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "lookup_dcookie": (212, 18),
    "vhangup": (153, 58), "personality": (135, 92), "nfsservctl": (180, 42), "uselib": (134, None),
}  # fmt: skip
SIGNALS = {
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}  # fmt: skip
KILL, TGKILL = (62, 129), (234, 131)
METADATA = {  # of files: Landlock does not look at these
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
WRITES = {
    "truncate": (76, 45), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
    "creat": (85, None),
}  # fmt: skip
OPEN, OPENAT, OPENAT2 = (2, None), (257, 56), (437, 437)
CLONE, CLONE3, SOCKETPAIR, PRLIMIT64 = (56, 220), (435, 435), (53, 199), (302, 261)
SCHED_SETAFFINITY, FCNTL, IOCTL = (203, 122), (72, 25), (16, 29)

NEW_NAMESPACE = 0x7E02_0000  # every CLONE_NEW* flag that clone takes
OWNER_COMMANDS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a signal to any process, without kill
TERMINAL_REQUESTS = (0x8901, 0x8902, 0x5412, 0x541C)  # FIOSETOWN, SIOCSPGRP; TIOCSTI, TIOCLINUX type into a terminal
SOCK_DGRAM = 2  # may be sent to any address, connected or not
WRITE_FLAGS = 0o3 | 0o100 | 0o1000 | 0o20000000  # O_ACCMODE, O_CREAT, O_TRUNC, O_TMPFILE

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_SET, AND, RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant
Numbers = tuple[int, int | None]
Rule = tuple[Numbers, Sequence[Instruction]]


def fail(number: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | number)


def load_argument(index: int) -> Instruction:
    return (LOAD, 0, 0, 16 + 8 * index)  # its lower half, on a little-endian machine


def denied(calls: Iterable[Numbers], number: int) -> list[Rule]:
    return [(call, [fail(number)]) for call in calls]


def one_of(index: int, values: Sequence[int], then: Instruction, otherwise: Instruction) -> list[Instruction]:
    tests = [(JUMP_EQUAL, len(values) - place, 0, value & 0xFFFF_FFFF) for place, value in enumerate(values)]
    return [load_argument(index), *tests, otherwise, then]


def any_bit(index: int, mask: int, then: Instruction) -> list[Instruction]:
    return [load_argument(index), (JUMP_SET, 0, 1, mask), then, (RETURN, 0, 0, ALLOW)]


def rules(signals: bool, metadata: bool, writes: bool) -> list[Rule]:
    """signals: also keep it from signalling processes but itself (no PID namespace, no scope by Landlock).
    metadata: also from changing owner, mode and times of files (no mount namespace). writes: also from making, opening
    for writing and removing any file (no Landlock either)."""
    allow, refuse = (RETURN, 0, 0, ALLOW), fail(errno.EPERM)
    listed = denied(KERNEL.values(), errno.EPERM)
    listed += denied([CLONE3], errno.ENOSYS)  # its flags lie in memory: glibc then takes clone
    listed.append((CLONE, any_bit(0, NEW_NAMESPACE, refuse)))
    listed.append((PRLIMIT64, one_of(0, [0], allow, refuse)))
    listed.append((SCHED_SETAFFINITY, one_of(0, [0], allow, refuse)))
    listed.append((FCNTL, one_of(1, OWNER_COMMANDS, refuse, allow)))
    listed.append((IOCTL, one_of(1, TERMINAL_REQUESTS, refuse, allow)))
    kind = (AND, 0, 0, 0xF)
    listed.append((SOCKETPAIR, [load_argument(1), kind, (JUMP_EQUAL, 0, 1, SOCK_DGRAM), refuse, allow]))
    if signals:
        own = os.getpid()
        listed += denied(SIGNALS.values(), errno.EPERM)
        listed.append((KILL, one_of(0, [0, own, -own], allow, refuse)))
        listed.append((TGKILL, one_of(0, [own], allow, refuse)))
    if metadata:
        listed += denied(METADATA.values(), errno.EPERM)
    if writes:
        read_only = fail(errno.EROFS)
        listed += denied(WRITES.values(), errno.EROFS)
        listed += denied([OPENAT2], errno.ENOSYS)
        listed += [(OPEN, any_bit(1, WRITE_FLAGS, read_only)), (OPENAT, any_bit(2, WRITE_FLAGS, read_only))]
    return listed


def assemble(listed: Sequence[Rule], machine: str) -> bytes:
    """struct sock_filter[]: the architecture, then a comparison and a verdict for each call."""
    column = list(ARCHITECTURES).index(machine)
    program: list[Instruction] = [
        (LOAD, 0, 0, 4),  # seccomp_data.arch
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, 0),  # seccomp_data.nr
        (JUMP_GREATER, 0, 1, LAST),
        fail(errno.ENOSYS),
    ]
    for numbers, verdict in listed:
        if (number := numbers[column]) is not None:
            program += [(JUMP_EQUAL, 0, len(verdict), number), *verdict]
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def supported() -> bool:
    return os.uname().machine in ARCHITECTURES and sys.byteorder == "little"


def install(listed: Sequence[Rule]) -> None:
    """For this process and its children, for good. Needs no_new_privs."""
    code = assemble(listed, os.uname().machine)
    program = Program(len(code) // 8, code)
    mode_filter = 2
    result = linux.LIBC.prctl(linux.PR_SET_SECCOMP, ctypes.c_ulong(mode_filter), ctypes.byref(program))
    linux.checked(result, "seccomp")
