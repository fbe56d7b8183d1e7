"""Wishes that are allowed one by one and too much together: refused before the engine hears of them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from api_server import MODEL, Api, House, until

from lmworks.serve import connection

KEY = "only-one-answer"
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "echoes with log-probabilities": (
        {"prompt": [[5] * 100] * 16, "n": 16, "echo": True, "logprobs": 20, "max_tokens": 1},
        "would report 542976",
    ),
    "answers": ({"prompt": ["a"] * 256, "n": 16, "max_tokens": 1}, "256 prompts with 16 answers each: at most 320"),
    "best_of": ({"prompt": ["a"] * 256, "best_of": 2, "max_tokens": 1}, "256 prompts with 2 answers each: at most 320"),
    "echoes": ({"prompt": ["a" * 400] * 20, "n": 16, "echo": True, "max_tokens": 1}, "may come to 130560 bytes"),
}


@pytest.fixture(scope="module")
def narrow(house: House, tmp_path_factory: pytest.TempPathFactory) -> Api:
    path = tmp_path_factory.mktemp("config") / "narrow.toml"
    path.write_text(f'[limits]\nanswer_bytes = 100000\n[[keys]]\nname = "one"\nsecret = "{KEY}"\nconcurrent = 1\n')
    return house.open(path)


@pytest.mark.parametrize("name", BODIES)
def test_combined_request_limits(api: Api, house: House, tmp_path: Path, name: str) -> None:
    body, said = BODIES[name]
    if name == "echoes":
        (tmp_path / "small.toml").write_text("[limits]\nanswer_bytes = 100000\n")
        api = house.open(tmp_path / "small.toml")
    before = house.backend.state.metrics["prompt_tokens"]
    found = api.post("/v1/completions", {"model": MODEL, "ignore_eos": True} | body)
    assert found.status_code == 400 and said in found.json()["error"]["message"], found.text[:300]
    assert found.json()["error"]["code"] == "limit_exceeded"
    assert house.backend.state.metrics["prompt_tokens"] == before


def test_key_with_one_concurrent_answer(narrow: Api) -> None:
    header = {"authorization": f"Bearer {KEY}"}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    assert narrow.post("/v1/completions", body, headers=header).status_code == 200
    for more in ({"n": 2}, {"prompt": ["a", "b"]}, {"best_of": 2}):
        found = narrow.post("/v1/completions", body | more, headers=header)
        assert (found.status_code, found.json()["error"]["code"]) == (400, "limit_exceeded")


def test_unread_answer_counts_until_dropped(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MB of log-probabilities for a client that takes 4 KiB: it has its place and its bytes, for a while."""
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "one"\nsecret = "{KEY}"\nconcurrent = 16\n')
    api = house.open(path)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 480, "n": 16, "logprobs": 20, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(content)}"
    rate_limiter = api.serving.rate_limiter
    with socket.socket() as staring:
        staring.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        staring.connect(("127.0.0.1", api.port))
        staring.sendall(f"{head}\r\n\r\n".encode() + content)
        until(
            lambda: rate_limiter.kept and not rate_limiter.open[MODEL] and rate_limiter.usage_by_key["one"].open == 1,
            60,
        )
        assert rate_limiter.kept == 16 * 480 * 21 * 96, "the engine is done, and the answer is kept"
        monkeypatch.setattr(connection, "WRITE_SECONDS", 0.1)
        (one,) = api.server.server_state.connections
        house.loop.call_soon_threadsafe(one.check_writes)  # type: ignore[union-attr]
        until(lambda: rate_limiter.kept == rate_limiter.usage_by_key["one"].open == 0)
        until(lambda: not api.server.server_state.connections)
