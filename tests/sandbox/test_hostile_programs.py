"""Hostile programs under every kind of isolation: the host is unharmed, limits hold, and nothing is left."""

from __future__ import annotations

import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile import Hostile
from hostile_files import FILES
from hostile_reach import REACH
from hostile_usage import USAGE
from kernel import KINDS, skip_refused

from lmworks.sandbox import Program, Sandbox, SandboxResult, describe_isolation
from lmworks.sandbox.processes import descendants

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = [*USAGE, *FILES, *REACH]
MARGIN_S = 2.0  # on a machine with other work


class Host:
    """What a hostile program could harm: canaries, each of which is checked after every program."""

    def __init__(self, kind: str) -> None:
        self.token = secrets.token_hex(8)
        self.secret = secrets.token_hex(16)
        self.place = Path(tempfile.mkdtemp(dir="/tmp"))
        self.place.chmod(0o755)  # other users can reach it: rights alone protect nothing below
        self.outside, self.temp = self.place / "outside", self.place / "temp"
        for folder in (self.outside, self.temp):
            folder.mkdir()
            folder.chmod(0o777)
        self.secret_file = self.outside / "secret.txt"
        self.secret_file.write_text(self.secret)
        self.secret_file.chmod(0o666)
        self.foreign_file = self.outside / "foreign.txt"
        self.foreign_file.write_text(self.secret)
        if os.geteuid() == 0:
            os.chown(self.foreign_file, 12345, 12345)
        self.foreign_file.chmod(0o600)
        self.files = self.listing()
        tempfile.tempdir = str(self.temp)  # for folders of the sandbox
        self.canary = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(1000)"], env={"CANARY": self.secret}
        )
        self.state = self.canary_state()
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0{self.token}")
        self.abstract.listen()
        self.sockets = (self.tcp, self.udp, self.abstract)
        for one in self.sockets:
            one.setblocking(False)
        os.environ[self.token] = self.secret
        self.sandbox = Sandbox(workers=1, isolation=kind)
        self.run("pass")  # starts the supervisor

    def run(self, source: str, program: Hostile | None = None) -> SandboxResult:
        if program is None:
            return self.sandbox.run(Program(source))
        return self.sandbox.run(Program(source, stdin="line\n" * 1000), program.within())

    @property
    def supervisor(self) -> int:
        (worker,) = self.sandbox.idle.queue
        assert worker is not None
        return worker.process.pid

    def fill(self, source: str) -> str:
        values = {
            "outside": self.outside, "secret_file": self.secret_file, "foreign_file": self.foreign_file,
            "home": Path.home(), "repo": ROOT, "prefix": sys.base_prefix, "token": self.token,
            "canary": self.canary.pid,
            "pytest": os.getpid(), "supervisor": self.supervisor, "tcp": self.tcp.getsockname()[1],
            "udp": self.udp.getsockname()[1],
        }  # fmt: skip
        return re.sub(r"<(\w+)>", lambda found: str(values[found[1]]), source)

    def listing(self) -> list[tuple[str, int, int, float]]:
        entries = [self.outside, *sorted(self.outside.iterdir())]
        return [(str(path), path.stat().st_mode, path.stat().st_uid, path.stat().st_mtime) for path in entries]

    def canary_state(self) -> tuple[object, ...]:
        pid = self.canary.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        return (os.getpriority(os.PRIO_PROCESS, pid), limits, os.sched_getaffinity(pid), os.sched_getscheduler(pid))

    def check_unharmed(self, result: SandboxResult) -> None:
        assert self.canary.poll() is None and self.canary_state() == self.state
        assert self.listing() == self.files and self.secret_file.read_text() == self.secret
        for one in self.sockets:
            with pytest.raises(BlockingIOError):  # nobody has connected, nothing has come
                one.recv(1) if one is self.udp else one.accept()
        for folder in (
            "/",
            "/tmp",
            "/var/tmp",
            "/etc",
            "/usr",
            "/dev/shm",
            sys.base_prefix,
            Path.home(),
            ROOT,
            self.temp,
        ):
            assert self.token not in os.listdir(folder), folder
        assert os.listdir(self.temp) == []
        assert self.secret.encode() not in result.stdout + result.stderr
        assert b"HARMED" not in result.stdout, result.text
        assert descendants(self.supervisor) == []
        assert not [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self.is_left(pid)]

    def is_left(self, pid: int) -> bool:
        try:
            return self.token in Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            return False

    def close(self) -> None:
        self.sandbox.close()
        self.temp.rmdir()  # empty
        shutil.rmtree(self.place)
        del os.environ[self.token]
        self.canary.kill()
        self.canary.wait()
        for one in self.sockets:
            one.close()
        tempfile.tempdir = None


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    made: dict[str, Host] = {}
    yield made
    for host in made.values():
        host.close()


def cases() -> Iterator[object]:
    """Limits are watched in the same way under every isolation: quick tests try them under one."""
    for hostile in PROGRAMS:
        for kind in KINDS:
            marks = [pytest.mark.slow] if hostile in USAGE and kind != KINDS[0] else []
            yield pytest.param(hostile, kind, id=f"{hostile.name.replace(' ', '-')}-{kind}", marks=marks)


@pytest.mark.parametrize(("hostile", "kind"), list(cases()))
def test_it_harms_nothing(hostile: Hostile, kind: str, hosts: dict[str, Host]) -> None:
    skip_refused(kind)
    if kind not in hostile.kinds:  # nothing to find out: it is said
        gaps = " ".join(describe_isolation(kind).gaps)
        assert "can be read" in gaps and "programs that write files fail" in gaps
        return
    host = hosts.get(kind) or hosts.setdefault(kind, Host(kind))
    limits = hostile.within()
    result = host.run(host.fill(hostile.program), hostile)
    host.check_unharmed(result)
    assert result.isolation == kind
    assert result.limit in hostile.limit, result
    if result.limit is None:
        assert result.exit_code == hostile.exit_code or hostile.limit > {None}, result
        assert result.signal == hostile.signal or hostile.limit > {None}, result
        assert hostile.ends in result.text, result
    else:
        assert result.signal == 9 and result.exit_code is None
    assert result.wall_seconds < limits.wall_seconds + MARGIN_S
    assert result.cpu_seconds < limits.cpu_seconds + MARGIN_S
    assert max(len(result.stdout), len(result.stderr)) <= limits.output_bytes
