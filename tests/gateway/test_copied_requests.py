"""Requests that two servers get: a hedged one is billed once, a shadow to nobody; both have their tenant's salt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from gateway_case import Answering, Asked, Behaviour, FakeServer, Running, fake_server, running, say
from lmworks.gateway.tries import Try
from tenant_case import QUICK, administered, bearer, make_tenant

PRICES = {"blue": (1.0, 10.0), "green": (2.0, 30.0)}  # dollars for a million


def says(*words: str, after: asyncio.Event | None = None, told: asyncio.Event | None = None) -> Behaviour:
    """Answers `after` something; what it was asked is `told`."""

    async def answer(asked: Asked, answering: Answering) -> None:
        if told is not None:
            told.set()
        if after is not None:
            await after.wait()
        await say(asked, answering, *words)

    return answer


@asynccontextmanager
async def two_pools(
    folder: Path, blue: Behaviour, green: Behaviour, rules: str
) -> AsyncGenerator[tuple[Running, str, FakeServer, FakeServer], None]:
    async with fake_server(blue) as first, fake_server(green) as second:
        pools = "".join(
            f'[[pools]]\nname = "{name}"\nkind = "lmworks"\nurls = ["{server.url}"]\n'
            f"price_in = {PRICES[name][0]}\nprice_out = {PRICES[name][1]}\n"
            for name, server in (("blue", first), ("green", second))
        )
        file = folder / "g.toml"
        file.write_text(f'[tenants]\nstore = "sqlite:///{folder}/gateway.db"\n{QUICK}\n{rules}\n{pools}')
        key = make_tenant(file, tokens_per_minute=1000)
        async with running(file) as case:
            yield case, key, first, second


async def ask(case: Running, key: str, **body: Any) -> None:
    sent = {"model": "m", "messages": [], "max_tokens": 8, **body}
    answer = await case.http.post("/v1/chat/completions", json=sent, headers=bearer(key))
    assert answer.status_code == 200, answer.text


def billed(case: Running) -> dict[str, tuple[int, int, int, int, int, float]]:
    with administered(case.file) as admin:
        return {row.pop("pool"): tuple(row.values()) for row in admin.usage(["pool"])}


HEDGED = '[health]\ninterval = 0.05\nhedge_share = 1.0\n[[models]]\nname = "m"\nhedge_seconds = 0.1\npolicy = ["cost"]'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("winner", ["blue", "green"])
def test_a_hedged_request_is_billed_once(tmp_path: Path, winner: str, stream: bool) -> None:
    """For the tokens and at the price of the server that answered; the cheaper one is asked first."""

    async def main() -> None:
        words, rival_asked, never = {"blue": ("a", "b", "c"), "green": ("d", "e")}, asyncio.Event(), asyncio.Event()
        blue = says(*words["blue"], after=rival_asked if winner == "blue" else never)
        green = says(*words["green"], after=never if winner == "blue" else None, told=rival_asked)
        async with two_pools(tmp_path, blue, green, HEDGED) as (case, key, first, second):
            await ask(case, key, stream=stream)
            assert (len(first.asked), len(second.asked)) == (1, 1)
            await case.until(lambda: billed(case))
            made, (price_in, price_out) = len(words[winner]), PRICES[winner]
            cost = pytest.approx((3 * price_in + made * price_out) / 1e6, rel=1e-12)
            assert billed(case) == {winner: (1, 3, made, 0, 0, cost)}
            lines = (await case.http.get("/metrics")).text.splitlines()
            hedges = {line.split("{")[1] for line in lines if line.startswith("lmworks:gateway_hedges_total{")}
            which = "second" if winner == "green" else "first"
            assert f'model_name="m",winner="{which}"}} 1.0' in hedges and len(hedges) == 3

    asyncio.run(main())


def test_a_client_that_leaves_while_the_loser_is_cancelled_leaves_no_request_behind(tmp_path: Path) -> None:
    """A request that is counted for ever keeps others from its server."""

    async def main() -> None:
        rival_asked, never, left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        green = says("d", "e", told=rival_asked)
        async with two_pools(tmp_path, says("a", after=never), green, HEDGED) as (case, key, _, _):
            hedging = case.gateway.proxy.hedging
            run, begin = hedging.run, hedging.tries.begin
            handling: list[asyncio.Task[Any]] = []

            async def noted_run(*given: Any) -> None:
                handling.append(cast("asyncio.Task[Any]", asyncio.current_task()))
                await run(*given)

            async def noted_begin(*given: Any) -> Try:
                try:
                    return await begin(*given)
                except asyncio.CancelledError:  # of the loser: its client leaves at this moment
                    handling[0].cancel()
                    left.set()
                    raise

            hedging.run, hedging.tries.begin = noted_run, noted_begin  # type: ignore[method-assign]
            asking = asyncio.create_task(ask(case, key, stream=True))
            await left.wait()
            await case.until(lambda: handling[0].done() and not any(s.open for s in case.gateway.proxy.servers))
            asking.cancel()

    asyncio.run(main())


SHADOWED = '[[rollouts]]\nmodel = "m"\nstable = "blue"\ncandidate = "green"\nshadow = 1.0'


def test_a_shadow_is_billed_to_nobody_and_has_its_tenants_salt(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_pools(tmp_path, says("a", "b"), says("c", "d", "e"), SHADOWED) as (case, key, blue, green):
            for stream in (False, True):
                await ask(case, key, stream=stream, cache_salt="mine", temperature=0)
            await case.until(lambda: len(green.asked) == 2 and not case.gateway.proxy.shadows.tasks)
            for sent, copied in zip(blue.asked, green.asked, strict=True):
                salt = sent.json["cache_salt"]
                assert copied.json["cache_salt"] == salt != "mine" and len(salt) == 32
                assert {**copied.json, "continuation": None} == {**sent.json, "continuation": None}
            await case.until(lambda: billed(case).get("blue", (0,))[0] == 2)
            assert billed(case) == {"blue": (2, 6, 4, 0, 0, pytest.approx((6 * 1.0 + 4 * 10.0) / 1e6, rel=1e-12))}
            text = (await case.http.get("/metrics")).text
            assert 'gateway_rollout_shadow_requests_total{model_name="m",outcome="different"} 2.0' in text
            assert 'gateway_rollout_share{candidate="green",model_name="m"} 0.0' in text
            assert 'gateway_rollout_state{model_name="m",state="stable"} 1.0' in text

    asyncio.run(main())
