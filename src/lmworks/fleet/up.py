"""A fleet as processes of one machine: servers and the gateway, started, watched, restarted and ended.

The supervisor stays in the foreground and writes `state.json` into its folder; `status` and `down` of another terminal
read that. A process that ends is started again after a delay that doubles, up to half a minute, until it has lasted a
minute. At the end the gateway goes first, so that nothing new comes, then the servers, which finish their requests.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec import LMWorksError, SpecError, dump_toml
from ..spec.errors import did_you_mean
from .config import Fleet

FIRST_DELAY_S = 0.5  # before a process is started again
STEADY_S = 60.0  # one that lasted so long starts at the first delay again
POLL_S = 0.2
GRACE_S = 40.0  # that processes get to finish their requests: more than `serve --drain-seconds`
STATE = "state.json"
GATEWAY = "gateway"


@dataclass
class Process:
    name: str
    url: str
    command: list[str]
    log: Path
    popen: subprocess.Popen[bytes] | None = None
    started: float = 0.0  # monotonic seconds
    due: float = 0.0  # when it is started (again)
    delay: float = FIRST_DELAY_S
    longest_delay: float = 30.0
    restarts: int = 0

    def start(self, environment: Mapping[str, str]) -> None:
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the supervisor, which ends them in order
            )  # fmt: skip
        self.started = time.monotonic()

    def watch(self, environment: Mapping[str, str], now: float) -> bool:
        """Starts it if it is due, or plans that if it has ended; whether something changed."""
        if self.popen is None:
            if now < self.due:
                return False
            self.start(environment)
            return True
        if self.popen.poll() is None:
            return False
        if now - self.started > STEADY_S:
            self.delay = FIRST_DELAY_S
        self.due, self.delay = now + self.delay, min(self.longest_delay, 2 * self.delay)
        self.restarts += 1
        self.popen = None
        return True

    def end(self, grace: float) -> None:
        if self.popen is None:
            return
        self.popen.terminate()
        try:
            self.popen.wait(grace)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Supervisor:
    def __init__(self, fleet: Fleet, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.stopping = False
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.servers = local_servers(fleet, folder)
        self.gateway = local_gateway(fleet, folder, self.servers)
        for one in self.processes:
            one.longest_delay = fleet.restart_seconds

    @property
    def processes(self) -> list[Process]:
        return [*self.servers, self.gateway]

    def run(self, on_change: Callable[[str], None]) -> None:
        """Until SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        try:
            while not self.stopping:
                self.watch_all(on_change)
                time.sleep(POLL_S)
        finally:
            on_change("ending: the gateway, then the servers")
            self.gateway.end(GRACE_S)
            for one in self.servers:
                if one.popen is not None:
                    one.popen.terminate()  # all at once: they finish their requests side by side
            for one in self.servers:
                one.end(GRACE_S)
            (self.folder / STATE).unlink(missing_ok=True)

    def stop(self, *_: Any) -> None:
        self.stopping = True

    def watch_all(self, on_change: Callable[[str], None]) -> None:
        changed = False
        for one in self.processes:
            code = one.popen.poll() if one.popen else None
            if one.watch(self.environment, time.monotonic()):
                changed = True
                on_change(f"{one.name} started at {one.url}" if one.popen else f"{one.name} ended with {code}")
        if changed:
            self.write_state()

    def write_state(self) -> None:
        rows = [
            {"name": one.name, "url": one.url, "pid": one.popen.pid if one.popen else None, "restarts": one.restarts,
             "log": str(one.log)}
            for one in self.processes
        ]  # fmt: skip
        temporary = self.folder / f"{STATE}.tmp"
        temporary.write_text(json.dumps({"pid": os.getpid(), "processes": rows}, indent=1), encoding="utf-8")
        temporary.replace(self.folder / STATE)


def local_servers(fleet: Fleet, folder: Path) -> list[Process]:
    """Ports follow the gateway's."""
    found: list[Process] = []
    for model in fleet.models:
        for number in range(model.servers):
            port = fleet.port + 1 + len(found)
            name = f"{model.name}-{number}"
            command = [sys.executable, "-m", "lmworks", "serve", f"{model.name}={model.source}", "--port", str(port)]
            options = [one.replace("{name}", name) for one in model.options]
            scheme = "https" if "--tls-cert" in options else "http"
            found.append(
                Process(name, f"{scheme}://127.0.0.1:{port}", [*command, *options], folder / "logs" / f"{name}.log")
            )
    return found


def local_gateway(fleet: Fleet, folder: Path, servers: list[Process]) -> Process:
    pools = [
        {"name": model.name, "urls": [f"{one.url}/v1" for one in servers if one.name.rpartition("-")[0] == model.name]}
        for model in fleet.models
    ]
    own = dict(fleet.gateway)  # what the fleet's file says of it; its port and pools follow from the rest
    sections = {"pools": pools, **own, "listen": {**own.get("listen", {}), "port": fleet.port}}
    config = folder / "gateway.toml"
    config.write_text(dump_toml(sections), encoding="utf-8")
    command = [sys.executable, "-m", "lmworks", "gateway", str(config)]
    return Process(GATEWAY, f"http://127.0.0.1:{fleet.port}", command, folder / "logs" / "gateway.log")


# --- from another terminal -------------------------------------------------------------------------------


def read_state(folder: Path) -> dict[str, Any]:
    """Of a fleet that is up."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        os.kill(state["pid"], 0)
    except (OSError, ValueError, KeyError):
        raise SpecError(f"{folder}: no fleet is up there; start one with: lmworks fleet up FLEET.toml") from None
    return state


def status(folder: Path) -> list[dict[str, Any]]:
    """Each process, and whether it takes requests."""
    return [{**one, "ready": ready(one["url"])} for one in read_state(folder)["processes"]]


def ready(url: str) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # a process of ours, on this machine
    with (
        suppress(urllib.error.URLError, OSError),
        urllib.request.urlopen(f"{url}/ready", timeout=2.0, context=context) as answer,
    ):
        return bool(answer.status == 200)
    return False


def restart(folder: Path, name: str, now: bool, patience: float = 180.0) -> None:
    """Ends one process, which the supervisor starts again; returns when it is ready. `now`: requests are not finished,
    which is all that helps against one that hangs."""
    before = process_of(folder, name)
    if before["pid"] is not None:
        if now:
            os.kill(before["pid"], signal.SIGKILL)  # its engine ends with it
        else:
            os.kill(before["pid"], signal.SIGTERM)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        found = process_of(folder, name)
        if found["pid"] not in (None, before["pid"]) and ready(found["url"]):
            return
        time.sleep(POLL_S)
    raise LMWorksError(f"{name} is not ready after {patience:.0f} s; see {before['log']}")


def process_of(folder: Path, name: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = read_state(folder)["processes"]
    found = next((one for one in rows if one["name"] == name), None)
    if found is None:
        raise SpecError(f"no process is called {name!r}{did_you_mean(name, [one['name'] for one in rows])}")
    return found


def down(folder: Path, patience: float = 2 * GRACE_S + 10.0) -> None:
    """Ends a fleet, and returns when it has ended."""
    pid = read_state(folder)["pid"]
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if not (folder / STATE).exists():
            return
        time.sleep(POLL_S)
    raise LMWorksError(f"{folder}: the fleet (process {pid}) has not ended after {patience:.0f} s")
