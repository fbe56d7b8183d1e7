"""The process between us and what a model wrote: starts one program at a time, watches it, kills it with its children.

A small interpreter of its own, without torch, threads or our environment, that forks quickly and has nothing to leak:

    caller ── supervisor ── [waits] ── init ── program        with namespaces: init is process 1 of its own
    caller ── supervisor ── init ── program                   without

It ends, and removes what it has made, as soon as the caller is gone.
"""

from __future__ import annotations

import base64
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any, NoReturn

from . import folder as folders
from . import linux, namespaces, processes
from .confine import Isolation, confine, environment, own_user_id, switch_user, visible_paths
from .limits import Limits
from .python_program import run_command, run_source

SWEEP_S = 0.025  # between two looks at what a program uses
FOLDER_SWEEP_S = 0.2  # and at how much it has written
IDLE_S = 1.0  # between two looks whether the caller is there, in case that another process has its socket too
CHUNK = 1 << 16
LENGTH = struct.Struct("=I")
WAIT_STATUS = struct.Struct("=i")
FAILED = b"!"  # before the reason why a program could not be started


class Supervisor:
    def __init__(self, channel: socket.socket, caller: int, isolation: Isolation) -> None:
        self.channel = channel
        self.caller = caller
        self.isolation = isolation
        self.uid = own_user_id(os.getpid()) if isolation.own_user else os.getuid()
        self.gid = self.uid if isolation.own_user else os.getgid()

    def serve(self) -> None:
        while True:
            while not select.select([self.channel], [], [], IDLE_S)[0]:
                if os.getppid() != self.caller:
                    return
            job = receive(self.channel)
            if job is None:
                return
            limits = Limits(**job.pop("limits"))
            if self.isolation.kind == "namespaces":
                answer = self.run("", job, limits)
            else:
                folder = tempfile.mkdtemp(prefix="lmworks-sandbox-")
                try:
                    os.chown(folder, self.uid, self.gid)
                    answer = self.run(folder, job, limits)
                finally:
                    folders.remove_folder(folder)
            send(self.channel, answer)

    def run(self, folder: str, job: dict[str, Any], limits: Limits) -> dict[str, Any]:
        pipes = [os.pipe() for _ in range(3)]  # standard output, standard error, how it ended
        started = time.monotonic()
        supervisor = os.getpid()
        first = os.fork()
        if not first:
            self.start(supervisor, folder, job, limits, *(write for _, write in pipes))
        for _, write in pipes:
            os.close(write)
        watch = Watch(self, first, folder, limits, *(read for read, _ in pipes))
        try:
            limit = watch.wait_for_exit(started + limits.wall_seconds)
            wall_s = time.monotonic() - started
        finally:
            cpu_s = processes.kill_descendants()
            watch.close()
        if watch.status.startswith(FAILED):
            return {"error": watch.status[1:].decode(errors="replace")}
        code = -signal.SIGKILL  # killed by us, or by the kernel together with its init
        if not limit and watch.status:
            code = os.waitstatus_to_exitcode(WAIT_STATUS.unpack(watch.status)[0])
        if code in (-signal.SIGKILL, -signal.SIGXCPU) and not limit and cpu_s >= limits.cpu_seconds:
            limit = "cpu"  # RLIMIT_CPU came first
        out, err = watch.output.values()
        return {
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "limit": limit,
            "stdout": base64.b64encode(out[: limits.output_bytes]).decode(),
            "stderr": base64.b64encode(err[: limits.output_bytes]).decode(),
            "truncated": max(len(out), len(err)) > limits.output_bytes,
            "wall_seconds": wall_s,
            "cpu_seconds": cpu_s,
            "isolation": self.isolation.kind,
        }

    def start(
        self, supervisor: int, folder: str, job: dict[str, Any], limits: Limits, out: int, err: int, status: int
    ) -> NoReturn:
        """In a new process: becomes init of a program, and tells how that ended."""
        try:
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:  # it was killed before it could take us along
                os._exit(1)
            namespaces.write("/proc/self/oom_score_adj", "1000")  # where memory runs out, this goes first
            if self.isolation.kind == "namespaces":
                if self.isolation.user_namespace and self.isolation.own_user:
                    switch_user(self.uid)
                namespaces.enter(self.isolation.user_namespace)
                namespaces.build_root(visible_paths(), self.uid, self.gid, limits.disk_bytes, limits.disk_files)
                folder = namespaces.WORK
            folders.write_files(folder, job["files"], self.uid, self.gid)
            stdin = sealed_file(base64.b64decode(job["stdin"]))
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # what a child of the program leaves behind comes here
            program = os.fork()
            if not program:
                for target, source in enumerate((stdin, out, err)):
                    os.dup2(source, target)
                self.run_confined(folder, job["code"], limits)
            while True:
                pid, code = os.wait()
                if pid == program:
                    os.write(status, WAIT_STATUS.pack(code))
                    os._exit(0)
        except BaseException as error:
            os.write(status, FAILED + f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)

    def run_confined(self, folder: str, code: str | list[str], limits: Limits) -> NoReturn:
        os.setsid()
        os.umask(0o077)
        os.chdir(folder)
        confine(self.isolation, self.uid, limits, folder)
        os.environ.clear()
        os.environ.update(environment(folder))
        tempfile.tempdir = None  # found anew, for the program
        linux.close_from(3)  # from here on the program cannot be told from us: nobody hears of our errors
        if isinstance(code, str):
            run_source(code, folder)
        run_command(code, dict(os.environ))


class Watch:
    """Reads what a program writes, and looks at what it uses."""

    def __init__(
        self, supervisor: Supervisor, first: int, folder: str, limits: Limits, out: int, err: int, status: int
    ) -> None:
        self.supervisor, self.first, self.folder, self.limits = supervisor, first, folder, limits
        self.output = {out: bytearray(), err: bytearray()}
        self.status_fd, self.status = status, b""
        self.open = {out, err, status}
        self.next_sweep = self.next_folder_sweep = time.monotonic() + SWEEP_S

    def wait_for_exit(self, deadline: float) -> str | None:
        """The limit that it has reached, or None: it has ended by itself."""
        channel = self.supervisor.channel.fileno()
        while True:
            now = time.monotonic()
            wait_s = max(0.0, min(deadline, self.next_sweep) - now)
            ready = select.select([*self.open, channel], [], [], wait_s)[0]
            if channel in ready or os.getppid() != self.supervisor.caller:
                raise SystemExit  # callers wait for the answer: this one is gone
            for fd in ready:
                self.read(fd)
            if self.status or self.status_fd not in self.open:
                return None
            if any(len(one) > self.limits.output_bytes for one in self.output.values()):
                return "output"
            now = time.monotonic()
            if now >= deadline:
                return "wall"
            if now >= self.next_sweep and (limit := self.sweep()):
                return limit

    def read(self, fd: int) -> None:
        data = os.read(fd, CHUNK)
        if not data:
            self.open.discard(fd)
        elif fd == self.status_fd:
            self.status += data
        elif len(self.output[fd]) <= self.limits.output_bytes:
            self.output[fd] += data

    def sweep(self) -> str | None:
        ours = [self.first]
        if self.supervisor.isolation.kind == "namespaces":
            ours += processes.children(self.first)[:1]
        below = processes.descendants(os.getpid())
        used = processes.usage([pid for pid in below if pid not in ours])
        waited_for = processes.usage(ours).cpu_s  # of children of the program that have ended, too
        now = time.monotonic()
        self.next_sweep = now + SWEEP_S
        if used.cpu_s + waited_for > self.limits.cpu_seconds:
            return "cpu"
        if used.memory > self.limits.memory_bytes:
            return "memory"
        if used.tasks > self.limits.processes:
            return "processes"
        if self.folder and now >= self.next_folder_sweep:
            self.next_folder_sweep = now + FOLDER_SWEEP_S
            if folders.exceeds(self.folder, self.limits):
                return "disk"
        return None

    def close(self) -> None:
        """After the last writer is gone: what is still in the pipes."""
        for fd in (*self.output, self.status_fd):
            while fd in self.open:
                self.read(fd)
            os.close(fd)


def sealed_file(content: bytes) -> int:
    """In memory, to be read only."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """None: the other side is gone."""
    header = receive_bytes(channel, LENGTH.size)
    data = receive_bytes(channel, LENGTH.unpack(header)[0]) if header else None
    return json.loads(data) if data else None


def receive_bytes(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = channel.recv(min(count - len(parts), 1 << 20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def main() -> None:
    """argv: the descriptor of the socket to the caller, the caller's process, the isolation as JSON."""
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()  # else each forked process copies the pages of all that was imported when it looks for garbage
    channel, caller, isolation = sys.argv[1:]
    Supervisor(socket.socket(fileno=int(channel)), int(caller), Isolation(**json.loads(isolation))).serve()
