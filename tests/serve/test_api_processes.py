"""`lmworks serve --api-processes 2`: two processes speak HTTP over one engine, and count together."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from api_server import until
from test_drain import Reading, answers, connects, served

from lmworks.serve.reload import POLL_S

KEY, LIMITED = "key-without-limits", "key-with-limits"
CONFIG = f"""
[[keys]]
name = "free"
secret = "{KEY}"
[[keys]]
name = "limited"
secret = "{LIMITED}"
requests_per_minute = 5
"""
BODY = {"model": "small", "prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, "logprobs": 0}


def api_processes(pid: int) -> list[int]:
    """API processes among the children of a process."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():  # each has those that it started
        for child in (thread / "children").read_text().split():
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and b"lmworks.serve.api_process" in command.read_bytes():
                found.append(int(child))
    return found


def post(url: str, key: str = KEY) -> httpx.Response:
    """On a connection of its own: any of the processes may take it."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json=BODY, headers=headers, trust_env=False, verify=False, timeout=60)


def counted(url: str) -> int:
    text = httpx.get(f"{url}/metrics", trust_env=False, verify=False).text
    name = re.escape('lmworks:http_requests_total{method="POST",path="/v1/completions",status="200"}')
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


@pytest.mark.slow
def test_api_processes_share_limits_and_metrics(tmp_path: Path) -> None:
    config = tmp_path / "keys.toml"
    config.write_text(CONFIG)
    with served("--api-processes", "2", "--config", str(config)) as (process, url), ThreadPoolExecutor(8) as many:
        until(lambda: len(api_processes(process.pid)) == 2)
        found = list(many.map(lambda _: post(url), range(24)))
        assert {one.status_code for one in found} == {200}
        tokens = {tuple(one.json()["choices"][0]["logprobs"]["tokens"]) for one in found}
        assert len(tokens) == 1 and len(next(iter(tokens))) == 3
        until(lambda: counted(url) == 24)
        statuses = sorted(one.status_code for one in many.map(lambda _: post(url, LIMITED), range(15)))
        assert statuses == [200] * 5 + [429] * 10, "a key's limit is one for all processes"

        lost, kept = api_processes(process.pid)
        os.kill(lost, signal.SIGKILL)
        until(lambda: lost not in api_processes(process.pid))
        assert post(url).status_code == 200
        until(lambda: len(api_processes(process.pid)) == 2 and kept in api_processes(process.pid), 60)

        reading = Reading(url, KEY)
        until(lambda: reading.lines, 60)
        process.send_signal(signal.SIGTERM)
        until(lambda: not answers(url))
        until(lambda: not connects(url))
        reading.join(60)
        assert process.wait(60) == 0
        *_, usage, done = reading.lines
        assert done == "data: [DONE]" and '"completion_tokens":1600' in usage, "finished, not cut"
        assert not Path(f"/proc/{kept}").exists()


@pytest.mark.slow
def test_keys_are_rotated_in_all_api_processes(tmp_path: Path) -> None:
    """SIGHUP to the first process, or to its whole group: nobody ends, and all believe the new keys."""
    config = tmp_path / "keys.toml"
    config.write_text(CONFIG)
    with served("--api-processes", "2", "--config", str(config)) as (process, url), ThreadPoolExecutor(8) as many:

        def statuses(key: str) -> set[int]:
            return {one.status_code for one in many.map(lambda _: post(url, key), range(24))}

        until(lambda: len(api_processes(process.pid)) == 2)
        processes = api_processes(process.pid)
        assert statuses(KEY) == {200}
        reading = Reading(url, KEY)
        until(lambda: reading.lines, 60)
        for number in (1, 2):
            config.write_text(CONFIG.replace(KEY, f"rotated-{number}"))
            process.send_signal(signal.SIGHUP)
            for one in processes if number == 2 else ():
                os.kill(one, signal.SIGHUP)
            time.sleep(2 * POLL_S)  # requests come after the rotation, and it has to be true for the first of them
            assert statuses(f"rotated-{number}") == {200} and statuses(KEY) == {401}
        assert api_processes(process.pid) == processes and process.poll() is None
        reading.join(120)
        assert reading.lines[-1] == "data: [DONE]", "a stream of a key that is gone is finished"
        config.write_text("[[keys]]\nname = 3\n")
        process.send_signal(signal.SIGHUP)
        time.sleep(2 * POLL_S)
        assert statuses("rotated-2") == {200}, "a wrong file is not taken over"
