"""Requests go where their prefix is cached, and not where it was: by what servers tell of their caches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_case import Answering, Asked, Running, fake_server, pool_file, running, say
from lmworks.gateway.prompt_index import PromptBlocks, PromptIndex
from serve_processes import ServeProcess, start_server

POLICY = '[routing]\npolicy = ["prefix_cache"]'
BLOCKS = 48  # of 16 tokens, which are bytes: less than two prompts


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[list[ServeProcess]]:
    options = (f"engine.blocks={BLOCKS}", "engine.max_seqs=1")
    found = [
        start_server(model / "tiny", model / "template.jinja", model / f"cache-{name}.log", *options) for name in "ab"
    ]
    try:
        for server in found:
            server.wait_ready()
        yield found
    finally:
        for server in found:
            server.kill()


def prompt(topic: str) -> str:
    return "".join(f"{topic} number {number}, and so on. " for number in range(14))


def cached_by(case: Running) -> list[int]:
    return [-1 if one.cached is None else sum(map(len, one.cached.values())) for one in case.gateway.servers]


async def ask(http: httpx.AsyncClient, url: str, topic: str) -> int:
    """How many tokens of the prompt its server had cached."""
    body = {"model": "tiny", "prompt": prompt(topic), "max_tokens": 2, "temperature": 0}
    answer = await http.post(url + "/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_evicted_blocks_are_not_routed_to(servers: list[ServeProcess], tmp_path: Path) -> None:
    """A server loses a prompt to others that the gateway never saw; the gateway's history cannot know."""

    async def main() -> None:
        file = pool_file(tmp_path / "g.toml", *servers, extra=POLICY, kind="lmworks")  # type: ignore[arg-type]
        async with running(file) as case, httpx.AsyncClient(trust_env=False) as direct:
            through = str(case.http.base_url).rstrip("/") + "/v1"
            await case.until(lambda: min(cached_by(case)) >= 0)
            size = len(prompt("weather")) // 16 * 16
            assert await ask(case.http, through, "weather") == 0
            for holder, other in ((0, 1), (1, 0), (0, 1)):
                await ask(direct, servers[holder].url, "weather")
                for topic in ("the sea", "gardens"):
                    await ask(direct, servers[other].url, topic)
                await case.until(lambda: max(cached_by(case)) <= BLOCKS)
                await asyncio.sleep(1.2)  # what was just sent counts no longer
                for _ in range(3):
                    assert await ask(case.http, through, "weather") >= size - 16
            assert (await case.http.get("/gateway/servers")).json()["servers"][0]["cached_blocks"] > 0

    asyncio.run(main())


def test_a_server_whose_cache_was_reset_is_not_preferred(servers: list[ServeProcess], tmp_path: Path) -> None:
    async def main() -> None:
        file = pool_file(tmp_path / "g.toml", servers[0], extra=POLICY, kind="lmworks")  # type: ignore[arg-type]
        async with running(file) as case, httpx.AsyncClient(trust_env=False) as direct:
            await ask(direct, servers[0].url, "resets")
            await case.until(lambda: cached_by(case)[0] > 0)
            assert (await direct.post(servers[0].url.removesuffix("/v1") + "/reset_prefix_cache")).status_code == 200
            await case.until(lambda: cached_by(case)[0] == 0)

    asyncio.run(main())


def test_the_cache_is_told_again_after_a_lost_connection(tmp_path: Path) -> None:
    """The second connection's snapshot replaces what the first one told; between them nothing is believed."""
    connections = 0
    go_on = asyncio.Event()

    async def tell(answering: Answering) -> None:
        nonlocal connections
        connections += 1
        answering.begin_stream()
        if connections == 1:
            await answering.event(event(snapshot=True, stored=["aa", "bb"]))
            await answering.event(event(stored=["cc"], removed=["aa"]))
            await go_on.wait()
            answering.die()
        await answering.event(event(snapshot=True, stored=["dd"]))
        await asyncio.sleep(30)

    async def hello(asked: Asked, answering: Answering) -> None:
        await say(asked, answering, "hello")

    async def main() -> None:
        async with fake_server(hello, tell_cache=tell) as server:
            file = pool_file(tmp_path / "g.toml", server, extra=POLICY, kind="lmworks")
            async with running(file) as case:
                [one] = case.gateway.servers
                await case.until(lambda: one.cached == {"m": {b"\xbb", b"\xcc"}})
                go_on.set()
                await case.until(lambda: one.cached is None)
                await case.until(lambda: one.cached == {"m": {b"\xdd"}})
                assert connections == 2

    asyncio.run(main())


def event(snapshot: bool = False, stored: Any = (), removed: Any = ()) -> dict[str, Any]:
    return json.loads(json.dumps({"model": "m", "snapshot": snapshot, "stored": stored, "removed": removed}))


def test_how_much_of_a_prompt_is_held() -> None:
    """100 tokens, a key every 16: the beginning counts up to the first block that is gone."""
    keys = tuple(bytes([number]) for number in range(6))
    blocks = PromptBlocks("m", 100, 16, keys)
    assert blocks.held({"m": set(keys)}, 1.0) == 0.96
    assert blocks.held({"m": set(keys)}, 0.5) == 0.48
    assert blocks.held({"m": set(keys) - {keys[2]}}, 1.0) == 0.32
    assert blocks.held({"m": set(keys[1:])}, 1.0) == 0 and blocks.held({"other": set(keys)}, 1.0) == 0
    index = PromptIndex()
    index.learn([b"1", b"12", b"123"], 1000, blocks)
    assert index.parts_held([b"1", b"12", b"x"], {"m": set(keys)}) == pytest.approx(2 * 0.48 / 0.512)
    assert index.parts_held([b"y"], {"m": set(keys)}) == 0


def test_a_server_registers_itself_and_leaves(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lmworks serve --register`: with the secret, to a gateway that is there, until it is told to end."""
    monkeypatch.setenv("REGISTER_SECRET", "a secret of the pool")
    monkeypatch.setenv("LMWORKS_REGISTER_SECRET", "a secret of the pool")

    async def main() -> None:
        own = "register = true\nregister_env = 'REGISTER_SECRET'"
        file = pool_file(tmp_path / "g.toml", kind="lmworks", pool=own)
        async with running(file) as case:
            gateway = str(case.http.base_url).rstrip("/")
            options = ("--register", gateway, "--register-pool", "fake", "--drain-seconds", "1")
            server = start_server(model / "tiny", model / "template.jinja", tmp_path / "log", *options)
            try:
                await case.until(lambda: [one.url for one in case.gateway.servers if one.up] == [server.url], 120)
                assert (await ask(case.http, gateway + "/v1", "registered")) == 0
                server.process.terminate()
                await case.until(lambda: not list(case.gateway.servers), 20)
            finally:
                server.kill()

    asyncio.run(main())
