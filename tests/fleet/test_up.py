"""A fleet of real processes: requests through the gateway, a killed server that comes back, an end in order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lmworks.fleet.up import Process, status
from lmworks.spec import SpecError

FLEET = """
name = "small"
port = {port}
[[models]]
name = "tiny"
source = "tiny"
servers = 2
options = ["engine.max_seqs=4", "engine.blocks=64"]
"""


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has."""
    for first in range(21_000 + os.getpid() % 5000, 40_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no ports")


def until(true: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


def ready_names(folder: Path) -> set[str]:
    try:
        return {one["name"] for one in status(folder) if one["ready"]}
    except SpecError:
        return set()


def ask(port: int) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


@pytest.mark.slow
def test_a_fleet_serves_heals_and_ends(tmp_path: Path) -> None:
    port = free_ports(3)
    (path := tmp_path / "fleet.toml").write_text(FLEET.format(port=port))
    folder = tmp_path / "fleet"
    words = [sys.executable, "-m", "lmworks", "fleet"]
    with (tmp_path / "log").open("wb") as log:
        supervisor = subprocess.Popen([*words, "up", str(path), "--folder", str(folder)], stderr=log)
    try:
        until(lambda: ready_names(folder) == {"tiny-0", "tiny-1", "gateway"}, 180)
        assert ask(port)["usage"]["completion_tokens"] == 4
        again = subprocess.run([*words, "up", str(path), "--folder", str(folder)], capture_output=True, text=True)
        assert again.returncode == 2 and "is up there already" in again.stderr

        before = {one["name"]: one for one in status(folder)}
        os.kill(before["tiny-0"]["pid"], signal.SIGKILL)
        assert ask(port)["usage"]["completion_tokens"] == 4  # the other server answers
        until(lambda: ready_names(folder) == {"tiny-0", "tiny-1", "gateway"} and restarts(folder)["tiny-0"] == 1, 180)
        assert restarts(folder) == {"tiny-0": 1, "tiny-1": 0, "gateway": 0}

        pids = [one["pid"] for one in status(folder)]
        assert subprocess.run([*words, "down", "--folder", str(folder)]).returncode == 0
        assert supervisor.wait(30) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        supervisor.terminate()
        supervisor.wait(60)


def restarts(folder: Path) -> dict[str, int]:
    return {one["name"]: one["restarts"] for one in status(folder)}


def test_delays_double_and_begin_anew_after_a_while(tmp_path: Path) -> None:
    one = Process("x", "", [sys.executable, "-S", "-c", ""], tmp_path / "log", longest_delay=3.0)
    waits = []
    for _ in range(4):
        assert one.watch(os.environ, now=one.due)
        assert one.popen is not None
        one.popen.wait()
        one.started = 100.0
        assert one.watch(os.environ, now=110.0)
        waits.append(one.due - 110.0)
        assert not one.watch(os.environ, now=110.0)
    assert waits == [0.5, 1.0, 2.0, 3.0]
    assert one.watch(os.environ, now=one.due)
    assert one.popen is not None
    one.popen.wait()
    one.started = 100.0
    assert one.watch(os.environ, now=200.0)
    assert (one.due - 200.0, one.restarts) == (0.5, 5)


def test_no_fleet_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no fleet is up"):
        status(tmp_path)
    (tmp_path / "state.json").write_text('{"pid": 999999999, "processes": []}')
    with pytest.raises(SpecError, match="no fleet is up"):
        status(tmp_path)
