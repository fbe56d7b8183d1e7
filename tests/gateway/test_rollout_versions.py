"""Rollouts between real servers of two versions: `lmworks serve` of runs with different weights, `lmworks gateway`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_processes import ServeProcess, start_server
from tiny import make_spec, train

pytestmark = pytest.mark.slow
BODY = {"model": "tiny", "prompt": "def f(x):", "temperature": 0, "max_tokens": 60}
GATE = """
import json, os, sys, urllib.request
body = json.dumps({**%r, "model": os.environ["LMWORKS_GATE_MODEL"]}).encode()
url = os.environ["LMWORKS_GATE_URL"] + "/completions"
with urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})) as answer:
    text = json.load(answer)["choices"][0]["text"]
sys.exit(text != %r and "the gate got another text")
"""


@dataclass
class Fleet:
    """One server of the old version, two of the new one, and what each version says."""

    folder: Path
    servers: dict[str, list[ServeProcess]]
    says: dict[str, str]

    def config(self, rollout: str) -> Path:
        pools = "".join(
            f'[[pools]]\nname = "{name}"\nurls = {json.dumps([one.url for one in found])}\n'
            for name, found in self.servers.items()
        )
        file = self.folder / "gateway.toml"
        rule = f'[[rollouts]]\nmodel = "tiny"\nstable = "blue"\ncandidate = "green"\n{rollout}\n'
        file.write_text(f"[health]\ninterval = 0.2\nretry_share = 1.0\n{pools}{rule}")
        return file


@pytest.fixture(scope="module")
def runs(model: Path, dataset: Path) -> dict[str, Path]:
    spec = make_spec(dataset, "model.context=512", "optim.steps=4", "seed=99")
    train(spec, model / "next")
    return {"blue": model / "tiny", "green": model / "next"}


@pytest.fixture
def fleet(model: Path, runs: dict[str, Path], tmp_path: Path) -> Iterator[Fleet]:
    def start(version: str, number: int) -> ServeProcess:
        return start_server(runs[version], model / "template.jinja", tmp_path / f"{version}{number}.log")

    servers = {"blue": [start("blue", 0)], "green": [start("green", 0), start("green", 1)]}
    try:
        for one in [*servers["blue"], *servers["green"]]:
            one.wait_ready()
        says = {
            version: httpx.post(f"{found[0].url}/completions", json=BODY, timeout=60, trust_env=False).json()[
                "choices"
            ][0]["text"]
            for version, found in servers.items()
        }
        assert says["blue"] != says["green"]
        yield Fleet(tmp_path, servers, says)
    finally:
        for one in [*servers["blue"], *servers["green"]]:
            one.kill()


@contextmanager
def gateway(file: Path) -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lmworks", "gateway", str(file), "--port", str(port)]
    with (file.parent / "gateway.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            until(lambda: ready(http))
            yield http
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def ready(http: httpx.Client) -> bool:
    try:
        return all(one["up"] for one in http.get("/gateway/servers").json()["servers"])
    except httpx.TransportError:
        return False


def until(condition: Callable[[], Any], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.05)


def ask(http: httpx.Client, **more: Any) -> str:
    answer = http.post("/v1/completions", json={**BODY, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def state(http: httpx.Client) -> dict[str, Any]:
    [found] = http.get("/gateway/rollouts").json()["rollouts"]
    return dict(found)


def ask_until(http: httpx.Client, wanted: str, seen: list[str]) -> dict[str, Any]:
    end = time.monotonic() + 120
    while (found := state(http))["state"] != wanted:
        assert time.monotonic() < end, found
        seen.append(ask(http))
    return found


def series(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"lmworks:gateway_{name}"))


CANARY = "start = true\nsteps = [0.3, 0.6]\nstep_seconds = 0.5\nmin_requests = 8\nlatency_ratio = 20.0\ngate = {gate}\n"


def test_a_canary_is_promoted_by_its_gate_and_one_that_dies_is_rolled_back(fleet: Fleet) -> None:
    old, new = fleet.says["blue"], fleet.says["green"]
    gates = {}
    for version, text in fleet.says.items():
        gates[version] = fleet.folder / f"gate_{version}.py"
        gates[version].write_text(GATE % (BODY, text))
    # A gate that expects what the new version does not say.
    with gateway(fleet.config(CANARY.format(gate=json.dumps([sys.executable, str(gates["blue"])])))) as http:
        seen: list[str] = []
        found = ask_until(http, "rolled_back", seen)
        assert "the gate got another text" in found["reason"] and set(seen) == {old, new}
        assert ask(http) == old and series(http, "rollout_rollbacks_total") == 1
    # One that it passes: all go to the new version, whose servers no request of the old one disturbs.
    (fleet.folder / "gateway.rollouts.json").unlink()
    good = fleet.config(CANARY.format(gate=json.dumps([sys.executable, str(gates["green"])])))
    with gateway(good) as http:
        seen = []
        ask_until(http, "promoted", seen)
        assert set(seen) == {old, new} and {ask(http) for _ in range(6)} == {new}
        assert series(http, "rollout_share{") == 1.0
    # Both of its servers are killed: requests that fail there are answered by the old version.
    (fleet.folder / "gateway.rollouts.json").unlink()
    with gateway(fleet.config(CANARY.format(gate="[]").replace("8", "200"))) as http:
        seen = [ask(http) for _ in range(20)]
        assert set(seen) == {old, new}
        for one in fleet.servers["green"]:
            one.kill()
        found = ask_until(http, "rolled_back", seen)
        assert "tries failed" in found["reason"] and set(seen) == {old, new} and ask(http) == old


def read_stream(http: httpx.Client, lines: list[str], **more: Any) -> None:
    with http.stream("POST", "/v1/completions", json={**BODY, "stream": True, **more}) as answer:
        lines += [line.removeprefix("data: ") for line in answer.iter_lines() if line]


def text_of(lines: list[str]) -> str:
    return "".join(json.loads(one)["choices"][0]["text"] for one in lines[:-1] if json.loads(one).get("choices"))


def test_blue_and_green_are_switched_and_no_stream_mixes_them(fleet: Fleet) -> None:
    """A stream stays with its version: over a switch, over the death of its server, and where none is left."""
    old, new = fleet.says["blue"], fleet.says["green"]
    file, long = fleet.config(""), {"max_tokens": 400, "ignore_eos": True}

    def switch(http: httpx.Client, action: str) -> None:
        answer = http.post("/gateway/rollouts", json={"model": "tiny", "action": action})
        assert answer.status_code == 200, answer.text

    def streamed(http: httpx.Client, then: Callable[[], None]) -> list[str]:
        lines: list[str] = []
        reading = threading.Thread(target=read_stream, args=(http, lines), kwargs=long)
        before = series(http, "requests_open")
        reading.start()
        until(lambda: series(http, "requests_open") > before)
        time.sleep(0.3)
        then()
        reading.join(120)
        return lines

    with gateway(file) as http:
        expected = {
            version: ask(httpx.Client(base_url=found[0].url.removesuffix("/v1"), timeout=120, trust_env=False), **long)
            for version, found in fleet.servers.items()
        }
        assert {ask(http) for _ in range(4)} == {old}
        lines = streamed(http, lambda: switch(http, "promote"))
        assert lines[-1] == "[DONE]" and text_of(lines) == expected["blue"]
        assert {ask(http) for _ in range(4)} == {new}
    with gateway(file) as http:  # what was switched outlives a restart
        assert state(http)["state"] == "promoted" and ask(http) == new

        def kill_busy() -> None:
            busy = [one["url"] for one in http.get("/gateway/servers").json()["servers"] if one["open"]]
            [found] = [one for one in fleet.servers["green"] if one.url in busy]
            fleet.servers["green"].remove(found)
            os.killpg(found.process.pid, signal.SIGKILL)

        lines = streamed(http, kill_busy)
        assert lines[-1] == "[DONE]" and text_of(lines) == expected["green"]
        assert series(http, "migrations_total") == 1
        lines = streamed(http, kill_busy)  # the last one of its version
        assert json.loads(lines[-1])["error"]["code"] == "upstream_lost"
        assert expected["green"].startswith(text_of(lines)) and text_of(lines) != expected["green"]
        assert ask(http) == old, "requests after it go to the stable pool"
        switch(http, "roll_back")
        assert {ask(http) for _ in range(3)} == {old}
