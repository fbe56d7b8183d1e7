"""A real fleet for drills: `lmworks fleet up` with a small model that is trained on the spot.

What is shorter than in production is in `GATEWAY` and `LIMITS` here, and is written into every report.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..fleet.up import process_of, read_state, ready, status
from ..spec import LMWorksError, SpecError, dump_toml
from .leftovers import environment
from .surroundings import (
    mount_disk,
    preloaded,
    start_redis,
    stop_redis,
    unmount_disk,
    write_authority,
    write_certificate,
)  # fmt: skip

MODEL = "tiny"
CONTEXT = 512
TRAINED = (
    "tiny", "data.path=stdlib:bytes", "model.layers=2", "model.hidden=64", "model.heads=4", "model.vocab=258",
    f"model.context={CONTEXT}", "data.seq=64", "data.micro_batch=8", "optim.lr=5e-3", "log.eval_every=0",
    "log.eval_batches=1",
)  # fmt: skip
ENGINE = (
    "engine.device=cpu", "engine.dtype=fp32", "engine.block=16", "engine.blocks=512", f"engine.context={CONTEXT}",
    "engine.max_seqs=16", "engine.max_batch_tokens=256",
)  # fmt: skip
# Shorter than the defaults, so that a drill takes seconds and not minutes.
GATEWAY: dict[str, Any] = {
    "health": {"interval": 0.5, "timeout": 1.0, "fall": 2, "rise": 1, "failures": 3, "eject_seconds": 1.0},
    "timeouts": {"connect": 1.0, "first_token": 5.0, "idle": 3.0, "per_try": 15.0, "total": 45.0},
    "listen": {"drain_seconds": 10.0},
}
LIMITS: dict[str, Any] = {"stuck_seconds": 2.0, "kill_seconds": 6.0, "queue": 64}
START_S = 180.0
POLL_S = 0.2
OPERATOR = "operator"  # tenant of the key that may see the gateway's servers


def train_model(folder: Path, steps: int = 12, seed: int = 0) -> Path:
    """A model of two layers over bytes, with a tokenizer: trained once, then kept."""
    if not folder.exists():
        work = folder.with_name(f".{folder.name}")
        shutil.rmtree(work, ignore_errors=True)  # of one that was killed
        words = [sys.executable, "-m", "lmworks", "train", *TRAINED, f"optim.steps={steps}", f"seed={seed}"]
        ended = subprocess.run(
            [*words, "--run-dir", str(work)], capture_output=True, text=True, env=environment(), check=False
        )
        if ended.returncode:
            raise LMWorksError(f"the model of the drills could not be trained: {ended.stderr.strip()[-400:]}")
        work.rename(folder)
    return folder


@dataclass(frozen=True)
class Shape:
    """What a drill needs of its fleet; drills of one shape share it."""

    servers: int = 2
    options: tuple[str, ...] = ()  # more words of `lmworks serve`; {fleet}: its folder, {name}: the server's
    limits: Mapping[str, Any] = field(default_factory=dict)  # more of [limits] of the servers
    gateway: Mapping[str, Any] = field(default_factory=dict)  # more sections of the gateway's file
    proxied: bool = False  # a TCP proxy between the gateway and each server
    tenants: tuple[str, ...] = ()  # names with keys of their own, in the gateway's store
    redis: bool = False  # counts the rates of tenants
    small_disk: bool = False  # the usage journal is on one
    tls: bool = False  # between the gateway and the servers, each with a certificate of its own
    clock: bool = False  # of each process can be changed
    memory: bool = False  # of each process can be limited


class LocalFleet:
    """Processes of one fleet, started and ended; what a fault needs to know of them."""

    def __init__(self, folder: Path, model: Path, shape: Shape) -> None:
        self.folder, self.model, self.shape = folder.resolve(), model, shape  # servers are told where it is
        self.port = free_ports(shape.servers + 1)
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.keys: dict[str, str] = {}  # of tenants
        self.admin: dict[str, str] = {}  # headers of an operator, where the gateway has keys

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def names(self) -> list[str]:
        return [f"{MODEL}-{number}" for number in range(self.shape.servers)]

    def server_url(self, name: str) -> str:
        scheme = "https" if self.shape.tls else "http"
        return f"{scheme}://127.0.0.1:{self.port + 1 + self.names.index(name)}"

    @property
    def gateway_file(self) -> Path:
        return self.folder / "gateway.toml"

    @property
    def store(self) -> Path:
        """Of keys and usage."""
        return self.folder / "gateway.db"

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    def start(self, pools: Sequence[str] | None = None) -> None:
        """`pools`: addresses that the gateway uses instead of the servers' own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        limits = self.folder / "serve.toml"
        limits.write_text(dump_toml({"limits": {**LIMITS, **self.shape.limits}}), encoding="utf-8")
        gateway = merged(merged(GATEWAY, self.shape.gateway), self.prepare())
        if pools is not None:
            gateway["pools"] = [{"name": MODEL, "urls": list(pools)}]
        tls = ("--tls-cert", f"{self.folder}/{{name}}.pem", "--tls-key", f"{self.folder}/{{name}}.key")
        own = (one.replace("{fleet}", str(self.folder)) for one in self.shape.options)
        model = {
            "name": MODEL, "source": str(self.model), "servers": self.shape.servers,
            "options": ["--config", str(limits), *(tls if self.shape.tls else ()), *ENGINE, *own],
        }  # fmt: skip
        config = self.folder / "fleet.toml"
        content = {"name": "drill", "port": self.port, "restart_seconds": 1.0, "models": [model], "gateway": gateway}
        config.write_text(dump_toml(content), encoding="utf-8")
        words = [sys.executable, "-m", "lmworks", "fleet", "up", str(config), "--folder", str(self.folder)]
        with (self.folder / "supervisor.log").open("ab") as log:
            self.supervisor = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=environment(self.preloads()),
            )  # fmt: skip
        self.wait_ready()
        self.keys = {name: self.create_key(name) for name in self.shape.tenants}
        if self.shape.tenants:
            self.admin = {"authorization": f"Bearer {self.create_key(OPERATOR, '--role', 'admin')}"}

    def prepare(self) -> dict[str, Any]:
        """What the fleet stands on is set up; returns what the gateway's file says of it."""
        found: dict[str, Any] = {}
        if self.shape.tls:
            authority = write_authority(self.folder)
            for name in self.names:
                write_certificate(self.folder, name, days=30)
            urls = [f"{self.server_url(name)}/v1" for name in self.names]
            found["pools"] = [{"name": MODEL, "urls": urls, "tls_ca": str(authority)}]
        if self.shape.tenants:
            found["tenants"] = {"store": f"sqlite:///{self.store}"}
        if self.shape.redis:
            start_redis(self.folder, self.port + 100)
            found["tenants"]["limits"] = f"redis://127.0.0.1:{self.port + 100}"
        if self.shape.small_disk:
            mount_disk(self.disk)
            found["tenants"]["journal"] = str(self.disk / "journal")
        return found

    def preloads(self) -> dict[str, str]:
        if self.shape.clock:
            return {"LD_PRELOAD": str(preloaded(self.folder, "clock_skew")), "CLOCK_OFFSETS": str(self.folder)}
        if self.shape.memory:
            library = preloaded(self.folder, "allocation_limit")
            return {"LD_PRELOAD": str(library), "ALLOCATION_LIMITS": str(self.folder)}
        return {}

    def create_key(self, tenant: str, *more: str) -> str:
        words = [sys.executable, "-m", "lmworks", "gateway"]
        config = ["--config", str(self.gateway_file)]

        def run(*what: str) -> bytes:
            return subprocess.run([*words, *what, *config], capture_output=True, env=environment(), check=True).stdout

        run("tenants", "create", tenant)
        return str(json.loads(run("keys", "create", tenant, *more, "--json"))["secret"])

    def wait_ready(self, seconds: float = START_S) -> None:
        assert self.supervisor is not None
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.supervisor.poll() is not None:
                said = (self.folder / "supervisor.log").read_text(encoding="utf-8", errors="replace")
                raise LMWorksError(f"the fleet of the drill ended: {said.strip()[-400:]}")
            if self.healthy():
                return
            time.sleep(POLL_S)
        raise LMWorksError(f"the fleet of the drill is not ready after {seconds:.0f} s; its logs: {self.folder}/logs")

    def healthy(self) -> bool:
        with suppress(SpecError):
            return all(one["ready"] for one in status(self.folder)) and len(read_state(self.folder)["processes"]) > 1
        return False

    def ready(self, name: str) -> bool:
        with suppress(SpecError):
            return ready(process_of(self.folder, name)["url"])
        return False

    def pid(self, name: str) -> int:
        """Of a process that runs."""
        end = time.monotonic() + 30.0
        while time.monotonic() < end:
            found = process_of(self.folder, name)["pid"]
            if found is not None:
                return int(found)
            time.sleep(POLL_S)
        raise LMWorksError(f"{name} is not running")

    def restarts(self, name: str) -> int:
        return int(process_of(self.folder, name)["restarts"])

    def group(self, name: str) -> list[int]:
        """A server's process and all that it started."""
        return [self.pid(name), *descendants(self.pid(name))]

    def engine(self, name: str) -> int:
        """The process of a server's engine."""
        for pid in descendants(self.pid(name)):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"engine" in words:
                return pid
        raise LMWorksError(f"{name} has no engine")

    def signal(self, name: str, number: int) -> None:
        for pid in self.group(name):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, name: str) -> None:
        """kill -9 of the process and all that it started, at once."""
        self.signal(name, signal.SIGKILL)

    def stop(self) -> None:
        if self.supervisor is None:
            return
        for one in [*self.names, "gateway"]:
            with suppress(LMWorksError, OSError):
                self.signal(one, signal.SIGCONT)
        self.supervisor.terminate()
        try:
            self.supervisor.wait(60)
        except subprocess.TimeoutExpired:
            for one in [*self.names, "gateway"]:
                with suppress(LMWorksError, OSError):
                    self.kill(one)
            self.supervisor.kill()
            self.supervisor.wait()
        self.supervisor = None
        if self.shape.redis:
            stop_redis(self.folder)
        if self.shape.small_disk:
            unmount_disk(self.disk)


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of both; where both have a section, its keys are joined."""
    found = dict(base)
    for name, value in more.items():
        mine = found.get(name)
        found[name] = {**mine, **value} if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return found


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has, below those that the kernel gives away."""
    for first in range(21_000 + os.getpid() % 900 * 10, 32_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise LMWorksError(f"no {count} ports in a row are free between 21000 and 32000")
