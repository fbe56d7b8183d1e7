"""Which server a policy prefers."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from gateway_case import Answering, Asked, chunk, fake_server, pool_file, running, say
from lmworks.gateway.outcomes import CircuitBreaker, RetryBudget


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "hello")


async def fails(asked: Asked, answering: Answering) -> None:
    await answering.whole({"error": {"message": "broken"}}, 500)


def servers_of(tmp_path: Path, policy: str, bodies: list[dict[str, Any]], gone: int | None = None) -> list[int]:
    """Which of four servers each request went to; from half of them on, one is gone."""

    async def main() -> list[int]:
        found = []
        async with fake_server(hello) as a, fake_server(hello) as b, fake_server(hello) as c, fake_server(hello) as d:
            file = pool_file(tmp_path / "g.toml", a, b, c, d, extra=f"[routing]\npolicy = [{policy}]")
            async with running(file) as case:
                for number, body in enumerate(bodies):
                    if gone is not None and number == len(bodies) // 2:
                        (a, b, c, d)[gone].healthy = False
                        await case.until(lambda: sum(one.up for one in case.gateway.servers) == 3)
                    before = [len(one.asked) for one in (a, b, c, d)]
                    assert (await case.ask(**body)).status_code == 200
                    after = [len(one.asked) for one in (a, b, c, d)]
                    found.append(next(i for i in range(4) if after[i] > before[i]))
        return found

    return asyncio.run(main())


def test_a_session_stays_with_its_server_and_only_those_of_one_that_is_gone_move(tmp_path: Path) -> None:
    """Ports are drawn anew for each test, so which server a session has is not known here, only that it keeps it."""
    sessions = [{"user": f"user {number}"} for number in range(40)]
    found = servers_of(tmp_path, '"session_affinity"', sessions + sessions, gone=1)
    before, after = found[:40], found[40:]
    assert len(set(before)) == 4 and max(Counter(before).values()) < 25
    assert [one for one in after if one == 1] == []
    assert all(now == then for then, now in zip(before, after, strict=True) if then != 1)


def test_prompts_with_a_common_beginning_go_to_one_server(tmp_path: Path) -> None:
    def turn(topic: int, turns: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": f"{topic} {number} " + "x" * 300} for number in range(turns)]}

    bodies = [turn(topic, turns) for turns in (1, 2, 3) for topic in range(8)]
    found = servers_of(tmp_path, '"prefix_cache"', bodies)
    assert Counter(found[:8]) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert found[8:16] == found[16:] == found[:8]


def test_the_cheapest_pool_that_is_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as cheap, fake_server(hello) as dear:
            file = pool_file(tmp_path / "g.toml", dear, extra='[routing]\npolicy = ["cost"]', pool="price_out = 2.0")
            second = f'[[pools]]\nname = "cheap"\nkind = "openai"\nurls = ["{cheap.url}"]\nprice_out = 0.5\n'
            file.write_text(file.read_text() + second)
            async with running(file) as case:
                for _ in range(3):
                    await case.ask()
                assert (len(cheap.asked), len(dear.asked)) == (3, 0)
                cheap.healthy = False
                await case.until(lambda: sum(one.up for one in case.gateway.servers) == 1)
                await case.ask()
                assert (len(cheap.asked), len(dear.asked)) == (3, 1)

    asyncio.run(main())


def test_a_server_that_fails_its_requests_is_left_alone(tmp_path: Path) -> None:
    """Its probes are good all the time."""

    async def main() -> None:
        limits = '[routing]\npolicy = ["round_robin"]'
        async with fake_server(fails) as bad, fake_server(hello) as good:
            file = pool_file(tmp_path / "g.toml", bad, good, extra=limits)
            file.write_text(file.read_text().replace("interval", "failures = 2\neject_seconds = 60\ninterval"))
            async with running(file) as case:
                for _ in range(12):
                    assert (await case.ask()).status_code == 200
                assert len(bad.asked) == 2 and len(good.asked) == 12

    asyncio.run(main())


def test_retries_have_a_budget(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            fake_server(fails) as a,
            fake_server(fails) as b,
            running(pool_file(tmp_path / "g.toml", a, b)) as case,
        ):
            for _ in range(40):
                assert (await case.ask()).status_code == 502
            assert 40 + 10 <= len(a.asked) + len(b.asked) <= 40 + 10 + 40 * 0.2

    asyncio.run(main())


def test_a_breaker_opens_tries_once_and_waits_twice_as_long() -> None:
    breaker = CircuitBreaker()
    for _ in range(2):
        breaker.failed(0.0, 3, 2.0, 60.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0, 3, 2.0, 60.0)
    assert not breaker.allows(1.9) and breaker.allows(2.0)
    breaker.begin()
    assert not breaker.allows(2.0)  # one request at a time
    breaker.failed(2.0, 3, 2.0, 60.0)
    assert not breaker.allows(5.9) and breaker.allows(6.0)
    breaker.begin()
    breaker.answered()
    assert breaker.allows(6.0)
    breaker.failed(6.0, 3, 2.0, 60.0)  # a stream that begins and is cut off brings nobody back
    assert not breaker.allows(13.9) and breaker.allows(14.0)
    breaker.begin()
    breaker.succeeded()
    assert breaker.allows(14.0)
    breaker.begin()
    assert breaker.allows(14.0)


def test_a_server_that_is_tried_gets_the_next_request_once_its_stream_has_begun(tmp_path: Path) -> None:
    """Streams take minutes: its end is not waited for."""

    async def main() -> None:
        over = asyncio.Event()

        async def holds(asked: Asked, answering: Answering) -> None:
            answering.begin_stream()
            await answering.event(chunk("begun"))
            await over.wait()
            await answering.end()

        async with (
            fake_server(holds) as a,
            fake_server(holds) as b,
            running(pool_file(tmp_path / "g.toml", a, b)) as case,
        ):
            tried, _ = case.gateway.servers
            tried.breaker.failures, tried.breaker.opened = 5, 1
            reading = []
            for number in range(4):
                reading.append(asyncio.create_task(case.events()))
                await case.until(lambda n=number: len(a.asked) + len(b.asked) > n and not tried.breaker.trying)
            assert (len(a.asked), len(b.asked)) == (2, 2)
            over.set()
            await asyncio.gather(*reading)
            assert not tried.breaker.opened and not tried.breaker.failures

    asyncio.run(main())


def test_a_budget_is_saved_up_to_its_reserve() -> None:
    budget = RetryBudget(lambda: 0.5)
    assert [budget.spend() for _ in range(11)] == [True] * 10 + [False]
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend() and not budget.spend()
