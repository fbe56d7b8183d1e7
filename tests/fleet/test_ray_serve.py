"""Servers as replicas of a real local Ray Serve (make test-ray): answers, streams, a replica replaced, the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.ray
OPTIONS = "--seed 3 engine.device=cpu engine.dtype=fp32 engine.blocks=64 engine.context=128"
BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    import ray
    from ray import serve

    from lmworks.fleet.ray_serve import Arguments, app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(Arguments(source="tiny", options=OPTIONS, replicas=2, cpus=1)))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
    end = time.monotonic() + 60
    while left := servers():
        assert time.monotonic() < end, f"outlived Ray Serve: {left}"
        time.sleep(0.2)


def servers() -> list[int]:
    """Processes of `lmworks serve` that replicas have started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"lmworks" in words and b"serve" in words and b"--seed" in words:
            found.append(int(folder.name))
    return found


def ask(url: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=BODY | more, timeout=60, trust_env=False)


def test_replicas_answer_stream_refuse_and_are_replaced(url: str) -> None:
    first = ask(url)
    assert first.status_code == 200 and len(tokens := first.json()["choices"][0]["token_ids"]) == 8
    assert all(ask(url).json()["choices"][0]["token_ids"] == tokens for _ in range(6)), "both replicas"
    assert len(servers()) == 2
    lines = [line for line in ask(url, stream=True).text.split("\n\n") if line]
    parts = [json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] for line in lines[:-1]]
    assert [token for part in parts for token in part] == tokens and len(parts) > 1 and lines[-1] == "data: [DONE]"
    wrong = ask(url, model="another")
    assert wrong.status_code == 404 and wrong.json()["error"]["code"] == "model_not_found"
    assert httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"] == "tiny"
    before = servers()
    os.killpg(before[0], signal.SIGKILL)
    end = time.monotonic() + 120
    while len(now := servers()) < 2 or before[0] in now or any(ask(url).status_code != 200 for _ in range(4)):
        assert time.monotonic() < end, now
        time.sleep(0.5)
    assert ask(url).json()["choices"][0]["token_ids"] == tokens
