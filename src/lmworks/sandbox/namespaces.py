"""Namespaces: a program sees a root of its own (system paths, read-only), its own processes, and no network."""

from __future__ import annotations

import os
import select
import signal
import stat
import tempfile
from collections.abc import Iterable

from . import linux

ISOLATED = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
WORK = "/sandbox"  # the temporary folder, as the program sees it; /tmp and /dev/shm lead there
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
READ_ONLY = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID


def enter(user_namespace: bool) -> None:
    """Returns in process 1 of new namespaces. The process that called waits for it, and takes it along when killed."""
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(ISOLATED | (linux.CLONE_NEWUSER if user_namespace else 0))
    if user_namespace:
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root, after a change of user
        write("/proc/self/setgroups", "deny")  # without which no group may be mapped
        write("/proc/self/gid_map", f"{gid} {gid} 1")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
    alive_read, alive_write = os.pipe()
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    os.close(alive_write)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([alive_read], [], [], 0)[0]:  # the parent was killed before it could take us along
        os._exit(1)
    os.close(alive_read)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(visible: Iterable[str], uid: int, gid: int, disk_bytes: int, disk_files: int) -> None:
    """A new root in memory with `visible` paths of the host, read-only, and WORK, which is writable and limited."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    base = tempfile.gettempdir()  # hidden from now on: no folder is made, so none can be left behind
    sources = {path: os.open(path, os.O_PATH | os.O_NOFOLLOW) for path in [*visible, *DEVICES] if os.path.lexists(path)}
    linux.mount("tmpfs", base, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    for path, source in sources.items():
        show(path, source, base + path)
        os.close(source)
    os.makedirs(base + "/etc", exist_ok=True)
    write(base + "/etc/passwd", f"sandbox:x:{uid}:{gid}::{WORK}:/bin/sh\n")
    write(base + "/etc/group", f"sandbox:x:{gid}:\n")
    for name in ("/dev/shm", "/tmp"):
        if not os.path.lexists(base + name):  # the interpreter may be below it
            os.symlink(WORK, base + name)
    os.mkdir(base + WORK)
    options = f"size={disk_bytes},nr_inodes={disk_files + 1},mode=700,uid={uid},gid={gid}"
    linux.mount("tmpfs", base + WORK, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    os.mkdir(base + "/proc")
    mount_proc(base + "/proc")
    os.chdir(base)
    linux.pivot_root_here()
    linux.set_mount_attributes("/", READ_ONLY, recursive=False)


def show(path: str, source: int, target: str) -> None:
    mode = os.fstat(source).st_mode
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink("", dir_fd=source), target)
        return
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT, 0o600))
    linux.mount(f"/proc/self/fd/{source}", target, None, linux.MS_BIND | linux.MS_REC)
    linux.set_mount_attributes(target, READ_ONLY if path in DEVICES else READ_ONLY | linux.MOUNT_ATTR_NODEV)


def mount_proc(target: str) -> None:
    """Of this PID namespace, with its processes only. A container that masks parts of /proc does not let us: then
    there is none, which Python can do without."""
    try:
        linux.mount("proc", target, "proc", linux.MS_NOSUID | linux.MS_NODEV, "subset=pid,hidepid=2")
    except OSError:
        return
    linux.set_mount_attributes(target, READ_ONLY)
