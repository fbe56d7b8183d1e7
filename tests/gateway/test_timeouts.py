"""How long anything may take, what is tried then, and how a gateway ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from gateway_case import Answering, Asked, chunk, fake_server, pool_file, running, say, text_of
from lmworks.gateway import gateway as gateway_module
from lmworks.gateway.config import ModelRule, Pool
from lmworks.gateway.exchange import Exchange
from lmworks.gateway.gateway import Gateway, GatewaySettings
from lmworks.gateway.http_client import ConnectionPool, UpstreamError
from lmworks.gateway.policies.power_of_two import PowerOfTwo
from lmworks.gateway.servers import Load, Servers

FOREVER = 60.0


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hel", "lo")


async def silent(asked: Asked, answering: Answering) -> None:
    await asyncio.sleep(FOREVER)


async def stands_still(asked: Asked, answering: Answering) -> None:
    answering.begin_stream()
    await answering.event(chunk("half "))
    await asyncio.sleep(FOREVER)


@pytest.mark.parametrize(("limit", "stream"), [("first_token", True), ("per_try", False)])
def test_a_server_that_says_nothing_is_replaced(tmp_path: Path, limit: str, stream: bool) -> None:
    async def main() -> None:
        limits = f'[timeouts]\n{limit} = 0.2\n[routing]\npolicy = ["round_robin"]'
        async with (
            fake_server(silent) as a,
            fake_server(hello) as b,
            running(pool_file(tmp_path / "g.toml", a, b, extra=limits)) as case,
        ):
            for _ in range(2):
                answer = await case.ask(stream=stream)
                assert answer.status_code == 200 and answer.text.count("Hel") == 1
            assert (len(a.asked), len(b.asked)) == (1, 2)
            await case.until(lambda: a.left == 1)  # its connection was closed
            assert 'reason="timeout"' in (await case.http.get("/metrics")).text

    asyncio.run(main())


def test_a_stream_that_stands_still_ends_with_an_error_and_is_not_tried_again(tmp_path: Path) -> None:
    """Its text was sent, and this server's tokens are not known."""

    async def main() -> None:
        limits = "[timeouts]\nidle = 0.2"
        async with (
            fake_server(stands_still) as a,
            fake_server(stands_still) as b,
            running(pool_file(tmp_path / "g.toml", a, b, extra=limits)) as case,
        ):
            *begun, last = await case.events()
            error = json.loads(last)["error"]
            assert text_of(begun) == "half " and error["code"] == "upstream_lost"
            assert "stood still for 0.2 s" in error["message"]
            assert len(a.asked) + len(b.asked) == 1

    asyncio.run(main())


def test_a_stream_stands_still_from_its_last_event_on(tmp_path: Path) -> None:
    """Not from the end of the time-out in which that event came."""
    stood = []

    async def late(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        await answering.event(chunk("one "))
        await asyncio.sleep(0.1)
        await answering.event(chunk("two "))
        began = asyncio.get_running_loop().time()
        try:
            await asyncio.sleep(FOREVER)
        finally:
            stood.append(asyncio.get_running_loop().time() - began)

    async def main() -> None:
        async with (
            fake_server(late) as server,
            running(pool_file(tmp_path / "g.toml", server, extra="[timeouts]\nidle = 1.0")) as case,
        ):
            *begun, last = await case.events()
            assert text_of(begun) == "one two " and json.loads(last)["error"]["code"] == "upstream_lost"
            await case.until(lambda: bool(stood))

    asyncio.run(main())
    assert 0.9 < stood[0] < 1.6


def test_a_request_has_a_time_for_all_of_its_tries(tmp_path: Path) -> None:
    async def main() -> None:
        limits = "[timeouts]\nper_try = 0.3\nfirst_token = 0.3\ntotal = 0.45"
        async with (
            fake_server(silent) as a,
            fake_server(silent) as b,
            fake_server(silent) as c,
            running(pool_file(tmp_path / "g.toml", a, b, c, extra=limits)) as case,
        ):
            answer = await case.ask()
            assert answer.status_code == 504 and answer.json()["error"]["code"] == "request_timeout"
            assert len(a.asked) + len(b.asked) + len(c.asked) == 2

    asyncio.run(main())


def test_a_server_that_does_not_take_the_connection(tmp_path: Path) -> None:
    """Its backlog is full: the kernel drops what asks for a connection."""

    async def main() -> None:
        with socket.socket() as full, socket.socket() as one, socket.socket() as two:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for filling in (one, two):
                filling.setblocking(False)
                filling.connect_ex(full.getsockname())
            pool = ConnectionPool(f"http://127.0.0.1:{full.getsockname()[1]}/v1", connect_seconds=0.2)
            with pytest.raises(UpstreamError, match=r"no connection within 0\.2 s") as found:
                await pool.acquire()
            assert found.value.kind == "connect"

    asyncio.run(main())


def test_models_to_fall_back_to_are_tried_in_their_order(tmp_path: Path) -> None:
    """The last of them answers, under the name that its server knows."""

    async def busy(asked: Asked, answering: Answering) -> None:
        await answering.whole({"error": {"message": "full", "code": "busy"}}, 429, "retry-after: 7")

    async def main() -> None:
        async with (
            fake_server(busy, models=("large",)) as large,
            fake_server(busy, models=("small",)) as small,
            fake_server(hello, models=("tiny",)) as tiny,
        ):
            rules = '[[models]]\nname = "chat"\nserves = "large"\nfallback = ["small", "last"]\n'
            rules += '[[models]]\nname = "last"\nserves = "tiny"'
            async with running(pool_file(tmp_path / "g.toml", large, small, tiny, pool=rules)) as case:
                assert text_of(await case.events(model="chat")) == "Hello"
                asked = [one.json["model"] for server in (large, small, tiny) for one in server.asked]
                assert asked == ["large", "small", "tiny"]
                alone = await case.ask(model="large")  # a model without fallback says what its server said
                assert alone.status_code == 429 and alone.headers["retry-after"] == "7"
                assert alone.json()["error"]["code"] == "busy"

    asyncio.run(main())


def test_of_two_servers_the_one_with_less_to_do() -> None:
    """The busiest of four is never taken, the least busy in half of all draws; equals are left for their turn."""

    async def main() -> None:
        urls = [f"http://{name}:1/v1" for name in "abcd"]
        servers = Servers().update(Pool(name="p", urls=urls), "file", urls, 1)
        for queue, server in enumerate(servers):
            server.load = Load(waiting=float(queue))
        policy, exchange = PowerOfTwo(seed=0), Exchange(None, None, None, ModelRule(name="m"), "")  # type: ignore[arg-type]
        taken = [policy.narrow(servers, exchange) for _ in range(600)]
        assert all(len(found) == 1 for found in taken)
        counts = [sum(found[0] is server for found in taken) for server in servers]
        assert counts[3] == 0 and all(
            abs(count - share) < 50 for count, share in zip(counts, (300, 200, 100, 0), strict=True)
        )
        servers[1].load = servers[0].load
        assert policy.narrow(servers[:2], exchange) == servers[:2]

    asyncio.run(main())


def test_a_stream_is_finished_after_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/ready says no and new requests are refused; then nobody can connect, and the gateway ends by itself."""
    monkeypatch.setattr(gateway_module, "NOTICE_S", 0.3)
    go_on = asyncio.Event()

    async def slow(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        await answering.event(chunk("one "))
        await go_on.wait()
        await answering.event(chunk("two"))
        await answering.end()

    async def main() -> None:
        async with fake_server(slow) as server:
            gateway = Gateway(GatewaySettings(pool_file(tmp_path / "g.toml", server)))
            with socket.socket() as listening:
                listening.bind(("127.0.0.1", 0))
                url = f"http://127.0.0.1:{listening.getsockname()[1]}"
                serving = asyncio.create_task(gateway.run([listening]))
                async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http:
                    while not any(one.up for one in gateway.servers):
                        await asyncio.sleep(0.01)
                    body = {"model": "m", "messages": [], "stream": True}
                    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                        lines = answer.aiter_lines()
                        found = [await anext(lines)]
                        os.kill(os.getpid(), signal.SIGTERM)
                        while not gateway.draining:
                            await asyncio.sleep(0.01)
                        assert (await http.get("/ready")).json() == {"status": "draining"}
                        refused = await http.post("/v1/chat/completions", json=body)
                        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
                        await asyncio.sleep(0.5)
                        with pytest.raises(OSError):
                            await asyncio.open_connection("127.0.0.1", listening.getsockname()[1])
                        assert not serving.done()
                        go_on.set()
                        found += [line async for line in lines]
                    texts = [line.removeprefix("data: ") for line in found if line]
                    assert text_of(texts) == "one two" and texts[-1] == "[DONE]"
                    async with asyncio.timeout(5):
                        await serving

    asyncio.run(main())
