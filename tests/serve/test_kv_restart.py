"""Real servers that are killed: the prefix cache is found again, and a prompt's blocks at another server."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_processes import ServeProcess, start_server

PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(100)]
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
ANY_PORT = ("--listen", "tcp://127.0.0.1:0")
SMALL = "engine.context=128"  # of the preset
HOST = "engine.kv_host_gib=0.05"


@contextmanager
def servers(folder: Path, *options: tuple[str, ...]) -> Iterator[list[ServeProcess]]:
    """Of one model with the same random weights; started together."""
    template = folder / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    started = [
        start_server(Path("tiny"), template, folder / f"{number}.log", SMALL, *each)
        for number, each in enumerate(options)
    ]
    try:
        for each in started:
            each.wait_ready()
        yield started
    finally:
        for each in started:
            each.kill()


def answer(url: str, **more: Any) -> tuple[list[str], int]:
    """Tokens, and how many of the prompt were cached."""
    reply = httpx.post(f"{url}/completions", json={**BODY, **more}, timeout=60)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    details = found["usage"].get("prompt_tokens_details") or {}
    return found["choices"][0]["logprobs"]["tokens"], details.get("cached_tokens", 0)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_server_finds_its_prefixes_again(tp: int, tmp_path: Path) -> None:
    options = (HOST, f"engine.kv_disk={tmp_path / 'kv'}", "engine.kv_disk_gib=0.1", f"engine.tp={tp}")
    with servers(tmp_path, options) as [first]:
        want, cached = answer(first.url)
        assert cached == 0
        wait_for_blocks(tmp_path / "kv", 6)
    with servers(tmp_path, options) as [second]:  # killed with SIGKILL
        assert answer(second.url) == (want, 96)
        metrics = httpx.get(second.url.removesuffix("/v1") + "/metrics").text
        assert re.search(r'lmworks:kv_tier_hits_total\{.*tier="disk".*\} 6.0', metrics)
        assert re.search(r"lmworks:external_prefix_cache_hits_total\{.*\} 96.0", metrics)


def wait_for_blocks(folder: Path, count: int) -> None:
    for _ in range(100):
        if len(list(folder.glob("??/*.kv"))) >= count:
            return
        time.sleep(0.1)
    raise AssertionError("blocks were not written")


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_decode_server_takes_the_blocks_of_a_prompt_and_survives_the_prefill_server(tp: int, tmp_path: Path) -> None:
    blocks = f"tcp://127.0.0.1:{free_port()}"
    remote = {"kv_transfer_params": {"remote": blocks}}
    ranks = f"engine.tp={tp}"
    options = ((HOST, ranks, f"engine.kv_listen={blocks}"), (HOST, ranks, f'engine.kv_peers=["{blocks}"]'), ())
    with servers(tmp_path, *options) as [prefill, decode, alone]:
        want = answer(alone.url)[0]
        other = answer(alone.url, prompt=PROMPT[::-1])[0]
        answer(prefill.url, max_tokens=1)
        assert answer(decode.url, **remote) == (want, 96)
        wrong = httpx.post(
            f"{decode.url}/completions", json={**BODY, "kv_transfer_params": {"remote": "tcp://127.0.0.1:1"}}
        )
        assert wrong.status_code == 400 and "engine.kv_peers" in wrong.text
        prefill.kill()
        assert answer(decode.url, prompt=PROMPT[::-1], **remote) == (other, 0)


@pytest.mark.slow
def test_store_in_a_process_of_its_own_keeps_blocks_over_a_kill(tmp_path: Path) -> None:
    from lmworks.engine.kv_tiers.socket_store import SocketStore

    key, block = b"k" * 16, b"content" * 1000
    for turn in range(2):
        store = subprocess.Popen(
            [sys.executable, "-m", "lmworks", *f"kv-store {tmp_path} --size-gib 0.1 --json".split(), *ANY_PORT],
            stdout=subprocess.PIPE,
        )
        assert store.stdout is not None
        found = json.loads(b"".join(iter(store.stdout.readline, b"}\n")) + b"}")
        assert found["blocks"] == turn
        client = SocketStore(found["address"])
        into = memoryview(bytearray(len(block)))
        assert client.read([key], [into]) == turn and client.write(key, block) is not bool(turn)
        assert client.read([key], [into]) == 1 and bytes(into) == block
        store.send_signal(signal.SIGTERM if turn else signal.SIGKILL)
        assert store.wait(20) == (0 if turn else -signal.SIGKILL)
        store.stdout.close()
        client.close()
