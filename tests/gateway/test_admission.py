"""Requests that would miss their objective are refused at once, and where the others go."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from gateway_case import Answering, Asked, FakeServer, fake_server, pool_file, running, say
from lmworks.gateway.forecast import Line, ServiceRates
from lmworks.gateway.slo import ServiceLevel, find_level


class OneAtATime:
    """A server that takes `seconds` for each answer's first token, one request after the other."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.busy = seconds, asyncio.Lock()
        self.late = 0.0  # longest time until a first token

    async def answer(self, asked: Asked, answering: Answering) -> None:
        began = time.monotonic()
        async with self.busy:
            await asyncio.sleep(self.seconds)
        self.late = max(self.late, time.monotonic() - began)
        await say(asked, answering, "one ", "two ", "three")


async def ask(case: Any, **body: Any) -> Any:
    return await case.ask(stream=True, **body)


def test_a_request_that_would_be_late_is_refused_early(tmp_path: Path) -> None:
    """30 at once, 0.1 s each, objective 0.5 s: some five are served in time, the others told to come back later."""

    async def main() -> None:
        slow = OneAtATime(0.1)
        async with fake_server(slow.answer) as server:
            file = pool_file(tmp_path / "g.toml", server, extra='[[slos]]\nmodel = "m"\nttft = 0.5')
            async with running(file) as case:
                for count in (1, 2, 3, 1, 2, 3):  # it is learned what one costs, and several
                    await asyncio.gather(*(ask(case) for _ in range(count)))
                slow.late, began, answers = 0.0, time.monotonic(), []
                refused: list[float] = []

                async def one() -> None:
                    answer = await ask(case)
                    answers.append(answer)
                    if answer.status_code == 429:
                        refused.append(time.monotonic() - began)

                await asyncio.gather(*(one() for _ in range(30)))
                served = sum(answer.status_code == 200 for answer in answers)
                assert 2 <= served <= 10 and served + len(refused) == 30
                assert slow.late < 1.5 and max(refused) < 1.5  # the last of 30 in a queue would wait 3 s
                early = next(answer for answer in answers if answer.status_code == 429)
                assert early.json()["error"]["code"] == "slo_unattainable" and int(early.headers["retry-after"]) >= 1
                await asyncio.sleep(0.3)
                assert (await ask(case)).status_code == 200  # it has nothing to do again

    asyncio.run(main())


def test_the_cheapest_that_meets_the_objective(tmp_path: Path) -> None:
    """The cheap server is slow: it gets requests without an objective, and the dear one those with one."""

    async def main() -> None:
        slow, fast = OneAtATime(0.3), OneAtATime(0.01)
        async with fake_server(slow.answer) as cheap, fake_server(fast.answer) as dear:
            extra = (
                '[routing]\npolicy = ["cost"]\n[[slos]]\nmodel = "urgent"\nttft = 0.1\n[[models]]\nname = "urgent"\n'
                'serves = "m"\n'
            )
            file = pool_file(tmp_path / "g.toml", dear, extra=extra, pool="price_out = 2.0")
            second = f'[[pools]]\nname = "cheap"\nkind = "openai"\nurls = ["{cheap.url}"]\nprice_out = 0.5\n'
            file.write_text(file.read_text() + second)
            async with running(file) as case:
                for _ in range(5):  # nothing is known: the cheap one
                    assert (await ask(case, model="urgent")).status_code == 200
                assert (len(cheap.asked), len(dear.asked)) == (5, 0)
                await ask(case, model="urgent")
                await ask(case)
                assert (len(cheap.asked), len(dear.asked)) == (6, 1)

    asyncio.run(main())


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "hello")


def chosen(tmp_path: Path, policy: str, pools: tuple[str, str], bodies: list[dict[str, Any]]) -> list[int]:
    """Which of two pools each request went to."""

    async def main() -> list[int]:
        async with fake_server(hello) as a, fake_server(hello) as b:
            file = pool_file(tmp_path / "g.toml", a, extra=f'[routing]\npolicy = ["{policy}"]', pool=pools[0])
            more = f'[[pools]]\nname = "b"\nkind = "openai"\nurls = ["{b.url}"]\n{pools[1]}\n'
            file.write_text(file.read_text() + more)
            async with running(file) as case:
                found = []
                for body in bodies:
                    before: list[FakeServer] = [one for one in (a, b) for _ in one.asked]
                    assert (await case.ask(**body)).status_code == 200
                    found.append(
                        int(len(before) - len(a.asked) - len(b.asked) == -1 and before.count(b) < len(b.asked))
                    )
                return found

    return asyncio.run(main())


def test_the_smallest_model_that_a_request_fits(tmp_path: Path) -> None:
    pools = ("size = 8.0", "size = 0.6\nup_to_tokens = 400")
    long = {"messages": [{"role": "user", "content": "x" * 4000}]}
    assert chosen(tmp_path, "model_size", pools, [{}, {"max_tokens": 500}, long, {"max_tokens": 50}]) == [1, 0, 0, 1]


def test_a_tier_has_its_own_pools(tmp_path: Path) -> None:
    """Without tenants everybody has the tier "default"."""
    assert chosen(tmp_path, "tier", ('tiers = ["gold"]', ""), [{}, {}]) == [1, 1]
    assert chosen(tmp_path, "tier", ('tiers = ["default"]', ""), [{}, {}]) == [0, 0]


def test_requests_that_can_wait_leave_idle_servers_alone(tmp_path: Path) -> None:
    async def main() -> None:
        busy = "vllm:num_requests_running 4\nvllm:num_requests_waiting 0\n"
        idle = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
        async with fake_server(hello, metrics=busy) as a, fake_server(hello, metrics=idle) as b:
            extra = '[routing]\npolicy = ["priority"]\n[[slos]]\nmodel = "batch"\npriority = 5\n'
            extra += '[[models]]\nname = "batch"\nserves = "m"\n[[slos]]\nmodel = "m"\npriority = -2'
            async with running(pool_file(tmp_path / "g.toml", a, b, extra=extra, kind="vllm")) as case:
                for model, server, priority in (("batch", a, 5), ("m", b, -2)):
                    assert (await case.ask(model=model)).status_code == 200
                    assert server.asked[-1].json["priority"] == priority
                assert (len(a.asked), len(b.asked)) == (1, 1)

    asyncio.run(main())


def test_lines_are_fitted() -> None:
    line = Line()
    for x in range(20):
        line.add(x, 3 + 2 * x)
    assert line.at(50) == pytest.approx(103)
    for _ in range(400):
        line.add(10, 7)  # it has become another one
    assert line.at(10) == pytest.approx(7, abs=0.1)


def test_waiting_is_by_the_rate_at_which_requests_end() -> None:
    rates = ServiceRates()
    rates.ends.extend(range(0, 30, 3))
    assert rates.wait(4) == 12 and rates.wait(0) == 0


def test_the_most_particular_objective_counts() -> None:
    every, gold, chat = ServiceLevel(ttft=9), ServiceLevel(tier="gold", ttft=2), ServiceLevel(model="chat", ttft=3)
    assert find_level([every, gold, chat], "chat", "gold") is chat
    assert find_level([every, gold, chat], "other", "gold") is gold
    assert find_level([every, gold, chat], "other", "silver") is every
    assert find_level([gold, chat], "other", "silver") is None
