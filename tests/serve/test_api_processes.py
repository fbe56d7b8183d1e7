"""`lmworks serve --api-processes 2`: two processes speak HTTP over one engine, and count together."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from api_server import until
from test_drain import Reading, answers, connects, served

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
