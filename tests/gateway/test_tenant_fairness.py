"""Under overload tenants share servers by weight, and their prefix caches are apart."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway_case import Answering, Asked, Running, fake_server, pool_file, running, say
from lmworks.gateway.tenants.fair_queue import FairQueue, Ticket
from lmworks.serve.limits import APIError
from tenant_case import administered, bearer, make_tenant, tenant_file

TIERS = '[[tiers]]\nname = "gold"\nweight = 3\n[[tiers]]\nname = "free"\nweight = 1\n'


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hel", "lo")


async def served(queue: FairQueue, tenants: dict[str, tuple[float, int, int]], rounds: int) -> Counter[str]:
    """Tokens by tenant, where each always has 20 requests waiting. Tenant → weight, requests' prompt, their output."""
    dice, tokens, tasks = random.Random(1), Counter[str](), dict[asyncio.Task[Ticket], str]()
    under_way: list[tuple[Ticket, str]] = []

    def wait(name: str) -> None:
        weight, prompt, _ = tenants[name]
        tasks[asyncio.ensure_future(queue.enter(name, weight, prompt, ["p"], 100, 0))] = name

    for name in tenants:
        for _ in range(20):
            wait(name)
    for _ in range(rounds):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in [one for one in tasks if one.done()]:
            name = tasks.pop(task)
            under_way.append((task.result(), name))
            wait(name)
        ticket, name = under_way.pop(dice.randrange(len(under_way)))
        _, prompt, output = tenants[name]
        tokens[name] += prompt + output
        queue.leave(ticket, prompt, output)
    for task in tasks:
        task.cancel()
    return tokens


@pytest.mark.parametrize(
    "tenants",
    [
        pytest.param({"a": (1.0, 10, 10), "b": (1.0, 10, 10)}, marks=pytest.mark.slow),
        pytest.param({"a": (3.0, 10, 10), "b": (1.0, 10, 10)}, marks=pytest.mark.slow),
        {"a": (1.0, 10, 10), "b": (1.0, 500, 900)},  # large requests count for what they are
        {"a": (1.0, 10, 2000), "b": (2.0, 3000, 1), "c": (1.0, 5, 5)},
    ],
)
def test_tokens_are_shared_by_weight(tenants: dict[str, tuple[float, int, int]]) -> None:
    found = asyncio.run(served(FairQueue(lambda pool: 4), tenants, 8000))
    weights = sum(weight for weight, _, _ in tenants.values())
    for name, (weight, _, _) in tenants.items():
        assert found[name] / found.total() == pytest.approx(weight / weights, rel=0.08), (name, found)


def test_who_was_away_saves_up_no_share_and_places_that_nobody_takes_are_not_lost() -> None:
    queue = FairQueue(lambda pool: 2)

    async def main() -> None:
        for _ in range(500):  # a alone
            queue.leave(await queue.enter("a", 1.0, 10, ["p"], 100, 0), 10, 100)
        found = await served(queue, {"a": (1.0, 10, 100), "b": (1.0, 10, 100)}, 400)
        assert found["b"] / found["a"] == pytest.approx(1, rel=0.1)

    asyncio.run(main())


def test_clients_that_leave_while_they_wait_take_no_place_and_waits_are_bounded() -> None:
    queue = FairQueue(lambda pool: 1)

    async def main() -> None:
        first = await queue.enter("a", 1.0, 1, ["p"], 2, 0)
        waiting = [asyncio.ensure_future(queue.enter("a", 1.0, 1, ["p"], 2, 0)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(APIError, match="2 requests of 'a' wait already") as full:
            await queue.enter("a", 1.0, 1, ["p"], 2, 0)
        assert (full.value.status, full.value.code) == (429, "queue_full")
        with pytest.raises(APIError, match="no server had a place") as late:
            await queue.enter("b", 1.0, 1, ["p"], 2, 0.01)
        assert (late.value.status, late.value.code) == (429, "queue_timeout")
        waiting[0].cancel()
        await asyncio.sleep(0)
        queue.leave(first, 1, 1)
        queue.leave(await waiting[1], 1, 1)
        assert not queue.open["p"]
        # One that is given a place at the moment when its client leaves gives it back.
        last = await queue.enter("a", 1.0, 1, ["p"], 2, 0)
        leaving = asyncio.ensure_future(queue.enter("a", 1.0, 1, ["p"], 2, 0))
        await asyncio.sleep(0)
        queue.leave(last, 1, 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert not queue.open["p"]

    asyncio.run(main())


@asynccontextmanager
async def load(case: Running, key: str, clients: int) -> AsyncIterator[Counter[int]]:
    """Each client asks again and again; the answers by status."""
    found = Counter[int]()

    async def client() -> None:
        while True:
            answer = await case.http.post(
                "/v1/chat/completions", json={"model": "m", "messages": [], "max_tokens": 8}, headers=bearer(key)
            )
            found[answer.status_code] += 1

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_one_tenants_flood_leaves_the_others_their_share(tmp_path: Path) -> None:
    """Thirty clients of one tenant beside four of another: without turns the second would get 4/34 of the answers."""
    under_way = most = 0

    async def slow(asked: Asked, answering: Answering) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        await hello(asked, answering)

    async def main() -> None:
        async with fake_server(slow) as server:
            file = tenant_file(tmp_path / "g.toml", server, extra=TIERS, pool="max_open = 2")
            flood, small = make_tenant(file, "flood", "free"), make_tenant(file, "small", "free")
            gold = make_tenant(file, "golden", "gold")
            async with running(file) as case:
                async with load(case, flood, 30) as of_flood, load(case, small, 4) as of_small:
                    await case.until(lambda: of_small[200] + of_flood[200] > 120, 30)
                    assert of_small[200] / (of_small[200] + of_flood[200]) > 0.35
                    assert set(of_flood) | set(of_small) == {200}
                    assert most == 2
                async with load(case, flood, 20) as of_flood, load(case, gold, 10) as of_gold:
                    await case.until(lambda: of_gold[200] + of_flood[200] > 120, 30)
                    assert 0.6 < of_gold[200] / (of_gold[200] + of_flood[200]) < 0.85

    asyncio.run(main())


def test_a_flood_beyond_the_queue_is_told_so_at_once(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def wait(asked: Asked, answering: Answering) -> None:
        await go_on.wait()
        await hello(asked, answering)

    async def main() -> None:
        async with fake_server(wait) as server:
            routing = "[routing]\nqueue = 2\nqueue_seconds = 0.2"
            file = pool_file(tmp_path / "g.toml", server, extra=routing, pool="max_open = 1")  # without tenants
            async with running(file) as case:
                asking = [asyncio.ensure_future(case.ask()) for _ in range(5)]
                await case.until(lambda: sum(one.done() for one in asking) == 4)
                go_on.set()
                answers = await asyncio.gather(*asking)
                codes = Counter((one.json().get("error") or {}).get("code") for one in answers)
                assert codes == {None: 1, "queue_full": 2, "queue_timeout": 2}
                assert all("retry-after" in one.headers for one in answers if one.status_code == 429)
                assert (await case.ask()).status_code == 200

    asyncio.run(main())


# --- prefix caches ----------------------------------------------------------------------------------------


def salts(asked: list[Asked]) -> Iterator[Any]:
    for one in asked:
        yield one.json.get("cache_salt")


def test_each_tenant_has_a_salt_that_no_client_can_choose(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, kind="vllm")
            one, two = make_tenant(file, "one"), make_tenant(file, "two")
            with administered(file) as admin:
                admin.create_tenant("three", "default", admin.tenant("one").limits, "shared")
                admin.create_tenant("four", "default", admin.tenant("one").limits, "shared")
                three, four = admin.create_key("three")[1], admin.create_key("four")[1]

            async def salt(case: Running, key: str, path: str = "/v1/completions", **body: Any) -> Any:
                answer = await case.http.post(path, json={"model": "m", **body}, headers=bearer(key))
                assert answer.status_code == 200
                return server.asked[-1].json.get("cache_salt")

            async with running(file) as case:
                first = await salt(case, one)
                assert first and await salt(case, one, "/v1/chat/completions", messages=[]) == first
                second = await salt(case, two)
                assert second != first
                assert await salt(case, two, cache_salt=first) not in (first, second, None)  # a part of two's own
                assert await salt(case, two, cache_salt=first) == await salt(case, two, cache_salt=first)
                assert await salt(case, one, cache_salt="x") != await salt(case, two, cache_salt="x")
                assert await salt(case, three) == await salt(case, four) != first
                assert await salt(case, one, "/v1/embeddings", input="x") is None  # vLLM knows it in other bodies
            async with running(file) as case:
                assert await salt(case, one) == first  # also after a restart

    asyncio.run(main())


def test_servers_that_do_not_know_salts_are_sent_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, kind="openai")
            key = make_tenant(file)
            async with running(file) as case:
                await case.http.post("/v1/completions", json={"model": "m"}, headers=bearer(key))
                assert list(salts(server.asked)) == [None]

    asyncio.run(main())
