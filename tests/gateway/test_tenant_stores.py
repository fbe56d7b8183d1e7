"""Several gateways: rates in a real Redis, keys and usage in a real PostgreSQL, and what happens while one is away."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_case import Answering, Asked, FakeServer, Running, chunk, fake_server, running, say
from lmworks.gateway.tenants.database import StoreDown, open_database
from lmworks.gateway.tenants.identity import prefix_of
from lmworks.gateway.tenants.rates import CONCURRENT, Line, LocalRates, amounts_of
from lmworks.gateway.tenants.redis_rates import RedisRates
from lmworks.gateway.tenants.store import Store
from postgres import postgres_server
from redis_process import RedisProcess
from tenant_case import administered, bearer, make_tenant, tenant_file


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture
def database(postgres: str) -> Iterator[str]:
    """An empty one."""
    import psycopg

    name = f"case{random.randrange(10**9)}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield postgres.rpartition("/")[0] + f"/{name}"


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisProcess]:
    found = RedisProcess()
    yield found
    found.kill()


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hel", "lo")


async def ask(case: Running, key: str, **body: Any) -> httpx.Response:
    return await case.http.post(
        "/v1/chat/completions", json={"model": "m", "messages": [], **body}, headers=bearer(key)
    )


async def two_gateways(stack: AsyncExitStack, folder: Path, server: FakeServer, **more: Any) -> list[Running]:
    files = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        files.append(tenant_file(folder / name / "g.toml", server, **more))
    return [await stack.enter_async_context(running(file)) for file in files]


def test_two_gateways_have_one_set_of_limits_keys_and_bills(
    tmp_path: Path, database: str, redis_server: RedisProcess
) -> None:
    async def main() -> None:
        async with fake_server(hello) as server, AsyncExitStack() as stack:
            more: dict[str, Any] = {"store": database, "tenants": f'limits = "{redis_server.url}"'}
            file = tenant_file(tmp_path / "admin.toml", server, **more)
            key = make_tenant(file, "acme", requests_per_minute=5, tokens_total=1000)
            cases = await two_gateways(stack, tmp_path, server, **more)
            found = [(await ask(cases[number % 2], key, max_tokens=10)) for number in range(7)]
            assert [one.status_code for one in found] == [200] * 5 + [429] * 2
            assert [one.headers["x-ratelimit-remaining-requests"] for one in found[:5]] == list("43210")
            with administered(file) as admin:
                admin.update_tenant("acme", None, {"requests_per_minute": 0, "tokens_total": 40}, None, None)
            # 25 tokens are spent, 15 or so by the first gateway; the second one knows of all of them.
            async with asyncio.timeout(10):
                for case in cases:
                    while (await ask(case, key, max_tokens=10)).json().get("error", {}).get("code") != (
                        "insufficient_quota"
                    ):
                        await asyncio.sleep(0.02)
            with administered(file) as admin:
                admin.revoke_key(prefix_of(key))
            async with asyncio.timeout(5):
                for case in cases:
                    while (await ask(case, key)).status_code != 401:
                        await asyncio.sleep(0.02)
        with administered(file) as admin:
            (row,) = admin.usage(["tenant"])
            assert row["requests"] == len(server.asked) and row["completion_tokens"] == 2 * len(server.asked)
            assert admin.store.spent(["total"])["tenant:acme", "total"].tokens == 5 * len(server.asked)

    asyncio.run(main())


def test_places_are_shared_and_those_of_a_killed_gateway_are_freed(
    tmp_path: Path, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmworks.gateway.tenants.redis_rates.LEASE_S", 2.0)
    lines = [Line(CONCURRENT, "tenant:places", 2, 1, "places")]

    async def main() -> None:
        one, two = (RedisRates(redis_server.url, lambda: "closed") for _ in range(2))
        assert (await one.take("a", lines)).refused is None
        assert (await two.take("b", lines)).refused is None
        refused = await two.take("c", lines)
        assert refused.refused == lines[0] and refused.wait == 1
        await asyncio.sleep(2.5)  # both renew their leases
        assert (await two.take("c", lines)).refused is not None
        one.settle("a", lines, {})
        await asyncio.gather(*one.settling)
        assert (await two.take("c", lines)).refused is None
        await two.close()  # as if it had been killed: its leases are not renewed
        assert (await one.take("d", lines)).refused is not None
        await asyncio.sleep(2.5)
        assert (await one.take("d", lines)).refused is None
        await one.close()

    asyncio.run(main())


def test_the_script_counts_as_the_buckets_in_memory_do(redis_server: RedisProcess) -> None:
    """The same requests to both; the clocks differ by what the calls take."""
    dice = random.Random(3)
    limits = {"requests_per_minute": 40, "tokens_per_minute": 6000, "input_tokens_per_minute": 900}

    async def main() -> None:
        local, shared = LocalRates(time.monotonic), RedisRates(redis_server.url, lambda: "closed")
        refused = 0
        for number in range(150):
            took = amounts_of(1, dice.randrange(60), dice.randrange(300))
            lines = [Line(name, "tenant:same", limit, took[name], "same") for name, limit in limits.items()]
            here, there = await local.take("", lines), await shared.take(str(number), lines)
            assert (here.refused and here.refused.name) == (there.refused and there.refused.name), number
            assert there.wait == pytest.approx(here.wait, abs=0.5)
            for own, other in zip(here.states, there.states, strict=True):
                assert other.used == pytest.approx(own.used, abs=own.line.limit / 60 * 0.5)
            refused += here.refused is not None
            if here.refused is None:
                used = amounts_of(1, dice.randrange(90), dice.randrange(200))
                local.settle("", lines, used)
                shared.settle(str(number), lines, used)
                await asyncio.gather(*shared.settling)
        assert 20 < refused < 130
        await shared.close()

    asyncio.run(main())


@pytest.mark.parametrize("policy", ["open", "closed"])
def test_redis_that_is_killed_and_comes_back(tmp_path: Path, policy: str) -> None:
    async def main() -> None:
        redis = RedisProcess()
        try:
            async with fake_server(hello) as server:
                tenants = f'limits = "{redis.url}"\nlimits_down = "{policy}"'
                file = tenant_file(tmp_path / "g.toml", server, tenants=tenants)
                key = make_tenant(file, requests_per_minute=3)
                async with running(file) as case:
                    assert (await ask(case, key)).status_code == 200
                    redis.kill()
                    found = [await ask(case, key) for _ in range(5)]
                    if policy == "open":  # counted by this gateway alone
                        assert [one.status_code for one in found] == [200, 200, 200, 429, 429]
                    else:
                        assert {one.status_code for one in found} == {503}
                        assert found[0].json()["error"]["code"] == "limits_unavailable"
                    redis.start()
                    async with asyncio.timeout(10):
                        while (await ask(case, key)).status_code != 200:
                            await asyncio.sleep(0.1)
                    assert (await ask(case, key)).headers["x-ratelimit-limit-requests"] == "3"
        finally:
            redis.kill()

    asyncio.run(main())


def test_a_redis_that_no_request_needs_is_seen_to_be_away(tmp_path: Path) -> None:
    async def main() -> None:
        redis = RedisProcess()
        try:
            async with fake_server(hello) as server:
                file = tenant_file(tmp_path / "g.toml", server, tenants=f'limits = "{redis.url}"')
                async with running(file) as case:
                    for up, change in (("1.0", redis.kill), ("0.0", redis.start), ("1.0", redis.kill)):
                        async with asyncio.timeout(10):
                            line = f'lmworks:gateway_store_up{{store="rates"}} {up}'
                            while line not in (await case.http.get("/metrics")).text:
                                await asyncio.sleep(0.1)
                        change()
        finally:
            redis.kill()

    asyncio.run(main())


def postmaster(url: str) -> int:
    import psycopg

    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT setting FROM pg_settings WHERE name = 'data_directory'").fetchone()
    assert row is not None
    return int(Path(row[0], "postmaster.pid").read_text().splitlines()[0])


def stop_or_go(processes: list[int], number: signal.Signals) -> None:
    """The server's own workers come and go."""
    for one in processes:
        with suppress(ProcessLookupError):
            os.kill(one, number)


def test_a_postgres_that_stands_still_holds_up_no_request_and_loses_no_usage(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process of the server is stopped: connections stay open and nothing answers."""
    monkeypatch.setattr("lmworks.gateway.tenants.database.CONNECT_S", 2)
    monkeypatch.setattr("lmworks.gateway.tenants.store_thread.ANSWER_S", 0.7)

    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, store=database)
            key = make_tenant(file)
            async with running(file) as case:
                tenancy = case.gateway.proxy.tenancy
                assert tenancy is not None and (await ask(case, key)).status_code == 200
                number = postmaster(database)
                family = [number, *map(int, Path(f"/proc/{number}/task/{number}/children").read_text().split())]
                stop_or_go(family, signal.SIGSTOP)
                try:
                    began = time.monotonic()
                    for _ in range(20):
                        assert (await ask(case, key)).status_code == 200
                    assert time.monotonic() - began < 5
                    await case.until(lambda: tenancy.ledger.store_error, 30)
                    assert (await ask(case, key)).status_code == 200
                finally:
                    stop_or_go(family, signal.SIGCONT)
                await case.until(lambda: tenancy.ledger.store_error is None, 30)
                assert (await ask(case, key)).status_code == 200
        with administered(file) as admin:
            (row,) = admin.usage(["outcome"])
            assert (row["requests"], row["completion_tokens"]) == (23, 46)

    asyncio.run(main())


def test_without_its_store_a_gateway_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(StoreDown, match="PostgreSQL"):
        Store(open_database("postgresql://nobody@127.0.0.1:1/none")).prepare()
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreDown, match="folder"):
        open_database(f"sqlite:///{tmp_path}/folder")


def test_clients_that_leave_while_redis_answers_leave_nothing_reserved(
    tmp_path: Path, redis_server: RedisProcess
) -> None:
    async def endless(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        while True:
            await answering.event(chunk("x"))
            await asyncio.sleep(0.005)

    async def main() -> None:
        async with fake_server(endless) as server:
            file = tenant_file(tmp_path / "g.toml", server, tenants=f'limits = "{redis_server.url}"')
            key = make_tenant(file, "leaving", requests_per_minute=10_000, tokens_total=10**9)
            async with running(file) as case:
                tenancy = case.gateway.proxy.tenancy
                assert tenancy is not None
                dice = random.Random(1)
                asking = [asyncio.create_task(ask(case, key, stream=True)) for _ in range(30)]
                for one in asking:
                    await asyncio.sleep(dice.random() * 0.004)
                    one.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
                await case.until(lambda: not tenancy.ledger.journal.open, 15)
                await case.until(lambda: not tenancy.ledger.budgets.pending, 15)

    asyncio.run(main())
