"""Rates: what is let through, what is refused, and what the client is told of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway_case import Answering, Asked, Running, chunk, fake_server, running, say
from lmworks.gateway.tenants.rates import Bucket, Line, LocalRates, amounts_of, reset_text
from tenant_case import administered, bearer, make_tenant, tenant_file


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hel", "lo")


async def ask(case: Running, key: str, **body: Any) -> httpx.Response:
    return await case.http.post(
        "/v1/chat/completions", json={"model": "m", "messages": [], **body}, headers=bearer(key)
    )


def test_requests_a_minute_with_openais_headers(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            key, other = make_tenant(file, requests_per_minute=3), make_tenant(file, "other")
            async with running(file) as case:
                for left in (2, 1, 0):
                    answer = await ask(case, key, stream=left == 1)
                    assert answer.status_code == 200
                    assert answer.headers["x-ratelimit-limit-requests"] == "3"
                    assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
                refused = await ask(case, key)
                assert refused.status_code == 429
                error = refused.json()["error"]
                assert (error["code"], error["type"]) == ("requests_per_minute", "rate_limit_error")
                assert 15 <= int(refused.headers["retry-after"]) <= 20
                assert refused.headers["x-ratelimit-remaining-requests"] == "0"
                assert refused.headers["x-ratelimit-reset-requests"].startswith(("1m0s", "59."))
                assert len(server.asked) == 3
                assert (await ask(case, other)).status_code == 200
                client = openai.AsyncOpenAI(api_key=key, base_url=f"{case.http.base_url}/v1", max_retries=0)
                with pytest.raises(openai.RateLimitError, match="requests_per_minute = 3"):
                    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
                await client.close()

    asyncio.run(main())


def test_tokens_are_reserved_and_what_was_not_used_is_given_back(tmp_path: Path) -> None:
    """Each answer has 2 tokens of the 400 that it may have: only reserving would let two requests through."""

    go_on = asyncio.Event()
    go_on.set()

    async def wait(asked: Asked, answering: Answering) -> None:
        await go_on.wait()
        await hello(asked, answering)

    async def main() -> None:
        async with fake_server(wait) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            key = make_tenant(file, output_tokens_per_minute=1000, input_tokens_per_minute=10_000)
            async with running(file) as case:
                for _ in range(10):
                    answer = await ask(case, key, max_tokens=400)
                    assert answer.status_code == 200
                assert 570 <= int(answer.headers["x-ratelimit-remaining-output-tokens"]) <= 600  # 400 are reserved
                assert int(answer.headers["x-ratelimit-remaining-input-tokens"]) > 9900
                go_on.clear()
                asking = [asyncio.ensure_future(ask(case, key, max_tokens=400)) for _ in range(4)]
                await case.until(lambda: sum(one.done() for one in asking) == 2)
                go_on.set()
                many = await asyncio.gather(*asking)
                assert sorted(one.status_code for one in many) == [200, 200, 429, 429]

    asyncio.run(main())


def test_the_keys_own_limits_count_beside_the_tenants(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            key = make_tenant(file, requests_per_minute=5)
            with administered(file) as admin:
                small = admin.create_key("acme", limits=type(admin.tenant("acme").limits)(requests_per_minute=2))[1]
            async with running(file) as case:
                assert [(await ask(case, small)).status_code for _ in range(3)] == [200, 200, 429]
                assert [(await ask(case, key)).status_code for _ in range(4)] == [200, 200, 200, 429]

    asyncio.run(main())


def test_streams_at_once_and_their_places_when_clients_leave(tmp_path: Path) -> None:
    async def endless(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        while True:
            await answering.event(chunk("more "))
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with fake_server(endless) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            key = make_tenant(file, concurrent_requests=2)
            async with running(file) as case:
                body = {"model": "m", "messages": [], "stream": True}
                streams = [
                    case.http.stream("POST", "/v1/chat/completions", json=body, headers=bearer(key)) for _ in range(2)
                ]
                opened = [await one.__aenter__() for one in streams]
                assert [one.status_code for one in opened] == [200, 200]
                refused = await ask(case, key, stream=True)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrent_requests")
                await streams[0].__aexit__(None, None, None)
                await case.until(lambda: server.left == 1)
                async with case.http.stream("POST", "/v1/chat/completions", json=body, headers=bearer(key)) as third:
                    assert third.status_code == 200
                await streams[1].__aexit__(None, None, None)

    asyncio.run(main())


def test_tiers_give_limits_to_tenants_without_their_own_and_change_while_it_runs(tmp_path: Path) -> None:
    tiers = '[[tiers]]\nname = "free"\nrequests_per_minute = 2'

    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, extra=tiers)
            free, own = make_tenant(file, "one", "free"), make_tenant(file, "two", "free", requests_per_minute=4)
            async with running(file) as case:
                for key, limit in ((free, 2), (own, 4)):
                    assert (await ask(case, key)).headers["x-ratelimit-limit-requests"] == str(limit)
                case.gateway.settings.checked_at = 0.0
                file.write_text(file.read_text().replace("requests_per_minute = 2", "requests_per_minute = 9"))
                assert (await ask(case, free)).headers["x-ratelimit-limit-requests"] == "9"

    asyncio.run(main())


def test_a_bucket_empties_in_a_minute_and_lets_what_is_larger_through_when_it_is_empty() -> None:
    now = 0.0
    rates = LocalRates(lambda: now)

    async def take(amount: int) -> float:
        return (await rates.take("", [Line("tokens_per_minute", "tenant:a", 60, amount)])).wait

    async def main() -> None:
        nonlocal now
        assert await take(60) == 0
        assert await take(30) == pytest.approx(30)
        now = 30.0
        assert await take(30) == 0
        now = 90.0
        assert await take(1000) == 0  # more than a minute's worth
        assert await take(1) == pytest.approx(941)
        rates.settle("", [Line("tokens_per_minute", "tenant:a", 60, 1000)], amounts_of(1, 10, 10))
        assert await take(40) == 0

    asyncio.run(main())


def test_all_limits_of_a_request_are_taken_or_none() -> None:
    rates = LocalRates(lambda: 0.0)
    lines = [Line("requests_per_minute", "tenant:a", 10, 1), Line("tokens_per_minute", "key:b", 5, 3)]

    async def main() -> None:
        waits = [(await rates.take("", lines)).wait for _ in range(4)]
        assert waits[0] == 0 and all(wait > 0 for wait in waits[1:])
        assert rates.buckets["tenant:a", "requests_per_minute"].used == 1

    asyncio.run(main())


def test_resets_are_written_as_openai_writes_them() -> None:
    assert [reset_text(one) for one in (0, 0.0121, 1.5, 59.9996, 360, 61.2)] == [
        b"0ms", b"13ms", b"1.5s", b"60s", b"6m0s", b"1m2s",
    ]  # fmt: skip
    assert Bucket().wait(0, 5, 10) == 0
