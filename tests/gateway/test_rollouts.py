"""Canaries that go on and that are rolled back, switches by hand, shadow traffic, hedged requests."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway_case import Answering, Asked, FakeServer, Running, fake_server, running, say


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "hello")


async def other(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "something else")


async def fails(asked: Asked, answering: Answering) -> None:
    await answering.whole({"error": {"message": "broken"}}, 500)


async def slow(asked: Asked, answering: Answering) -> None:
    await asyncio.sleep(0.15)
    await hello(asked, answering)


def rollout_file(folder: Path, blue: FakeServer, green: FakeServer, rollout: str, more: str = "") -> Path:
    pools = "".join(
        f'[[pools]]\nname = "{name}"\nkind = "openai"\nurls = ["{one.url}"]\n'
        for name, one in (("blue", blue), ("green", green))
    )
    rule = f'[[rollouts]]\nmodel = "m"\nstable = "blue"\ncandidate = "green"\n{rollout}\n'
    file = folder / "g.toml"
    file.write_text(f"[health]\ninterval = 0.05\nretry_share = 1.0\n{more}\n{pools}{rule}")
    return file


async def state(case: Running) -> dict[str, Any]:
    [found] = (await case.http.get("/gateway/rollouts")).json()["rollouts"]
    return dict(found)


async def switch(case: Running, action: str) -> None:
    answer = await case.http.post("/gateway/rollouts", json={"model": "m", "action": action})
    assert answer.status_code == 200, answer.text


async def ask_until(case: Running, wanted: str, most: int = 400) -> dict[str, Any]:
    for _ in range(most):
        assert (await case.ask()).status_code == 200
        if (found := await state(case))["state"] == wanted:
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(f"it did not become {wanted}: {found}")


@pytest.mark.parametrize(("behave", "reason"), [(fails, "tries failed"), (slow, "times as long")])
def test_a_bad_canary_is_rolled_back_and_stays_out_after_a_restart(tmp_path: Path, behave: Any, reason: str) -> None:
    """No client sees a failure of it: failed tries go to the stable pool."""

    async def main() -> None:
        async with fake_server(hello) as blue, fake_server(behave) as green:
            rollout = "start = true\nsteps = [0.5]\nmin_requests = 10\nstep_seconds = 60"
            file = rollout_file(tmp_path, blue, green, rollout)
            async with running(file) as case:
                found = await ask_until(case, "rolled_back")
                assert reason in found["reason"] and found["share"] == 0
            seen = len(green.asked)
            async with running(file) as case:
                for _ in range(20):
                    assert (await case.ask()).status_code == 200
                assert (await state(case))["state"] == "rolled_back" and len(green.asked) == seen

    asyncio.run(main())


def test_a_good_canary_grows_step_by_step_and_its_gate_is_asked(tmp_path: Path) -> None:
    """The gate is a command; it writes down which server it was told to judge."""
    noted = tmp_path / "gates"
    script = f"import os; open({str(noted)!r}, 'a').write(os.environ['LMWORKS_GATE_URL'] + '\\n')"
    gate = json.dumps([sys.executable, "-c", script])

    async def main() -> None:
        async with fake_server(hello) as blue, fake_server(hello) as green:
            rollout = f"start = true\nsteps = [0.2, 0.6]\nmin_requests = 5\nstep_seconds = 0.3\ngate = {gate}"
            rollout += "\nlatency_ratio = 0.0"
            async with running(rollout_file(tmp_path, blue, green, rollout)) as case:
                await ask_until(case, "promoted", 2000)
                assert noted.read_text().splitlines() == [green.url] * 2
                before = len(blue.asked)
                for _ in range(10):
                    await case.ask()
                assert len(blue.asked) == before

    asyncio.run(main())


def test_a_gate_that_fails_rolls_back(tmp_path: Path) -> None:
    gate = json.dumps([sys.executable, "-c", "import sys; sys.exit('pass@1 fell by 4 points')"])

    async def main() -> None:
        async with fake_server(hello) as blue, fake_server(hello) as green:
            rollout = (
                f"start = true\nsteps = [0.5]\nmin_requests = 5\nstep_seconds = 0.1\nlatency_ratio = 0.0\ngate = {gate}"
            )
            async with running(rollout_file(tmp_path, blue, green, rollout)) as case:
                found = await ask_until(case, "rolled_back", 1000)
                assert "pass@1 fell by 4 points" in found["reason"]

    asyncio.run(main())


def test_blue_and_green_are_switched_by_hand(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as blue, fake_server(other) as green:
            file = rollout_file(tmp_path, blue, green, "")
            async with running(file) as case:

                async def says() -> str:
                    found: str = (await case.ask()).json()["choices"][0]["message"]["content"]
                    return found

                assert [await says() for _ in range(5)] == ["hello"] * 5
                await switch(case, "promote")
                assert [await says() for _ in range(5)] == ["something else"] * 5
                await switch(case, "roll_back")
                assert [await says() for _ in range(5)] == ["hello"] * 5
                await switch(case, "promote")
                unknown = await case.http.post("/gateway/rollouts", json={"model": "m", "action": "burn"})
                assert unknown.status_code == 400 and "roll_back" in unknown.text
                elsewhere = {"x-forwarded-for": "10.1.2.3"}
                assert (await case.http.get("/gateway/rollouts", headers=elsewhere)).status_code == 403
            async with running(file) as case:
                assert (await case.ask()).json()["choices"][0]["message"]["content"] == "something else"

    asyncio.run(main())


def test_a_session_stays_on_its_side(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as blue, fake_server(hello) as green:
            rollout = "start = true\nsteps = [0.5]\nmin_requests = 1000"
            async with running(rollout_file(tmp_path, blue, green, rollout)) as case:
                for user in range(30):
                    for _ in range(2):
                        await case.ask(user=f"user {user}")
                users = [{one.json["user"] for one in server.asked} for server in (blue, green)]
                assert not users[0] & users[1] and 5 <= len(users[1]) <= 25

    asyncio.run(main())


def test_shadows_get_copies_and_answer_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            fake_server(hello) as blue,
            fake_server(other) as green,
            running(rollout_file(tmp_path, blue, green, "shadow = 1.0")) as case,
        ):
            for stream in (False, True):
                for _ in range(3):
                    answer = await case.ask(temperature=0, stream=stream)
                    assert "hello" in answer.text and "something" not in answer.text
            await case.ask(temperature=1)
            await case.until(lambda: len(green.asked) == 7 and not case.gateway.proxy.shadows.tasks)
            assert (await state(case))["shadowed"] == {"different": 6, "answered": 1}
            green.behave = hello
            await case.ask(temperature=0, stream=True)
            await case.until(lambda: not case.gateway.proxy.shadows.tasks and len(green.asked) == 8)
            assert (await state(case))["shadowed"]["same"] == 1
            metrics = (await case.http.get("/metrics")).text
            [generated] = [one for one in metrics.splitlines() if one.startswith("lmworks:gateway_generation_tokens_t")]
            assert float(generated.split()[-1]) == 8  # of the answers to clients alone

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_late_answer_is_hedged_within_a_budget(tmp_path: Path, stream: bool) -> None:
    """The first request to begin answers; the other server sees its client leave."""

    async def main() -> None:
        hang = asyncio.Event()

        async def hangs(asked: Asked, answering: Answering) -> None:
            if len(hung.asked) == 1 or hang.is_set():
                await asyncio.sleep(20)
            await say(asked, answering, "hello")

        async with fake_server(hangs) as hung, fake_server(hello) as quick:
            rule = '[[models]]\nname = "m"\nhedge_seconds = 0.1\npolicy = ["round_robin"]\n'
            file = tmp_path / "g.toml"
            urls = f'["{hung.url}", "{quick.url}"]'
            file.write_text(
                f"[health]\ninterval = 0.05\nhedge_share = 0.05\n{rule}"
                f'[[pools]]\nname = "p"\nkind = "openai"\nurls = {urls}\n'
            )
            async with running(file) as case:
                for _ in range(4):
                    answer = await case.ask(stream=stream)
                    assert answer.status_code == 200 and answer.text.count("hello") == 1
                await case.until(lambda: hung.left == 1)
                assert len(hung.asked) + len(quick.asked) == 5
                hang.set()
                case.gateway.proxy.hedging.budget.left = 0.0
                late = asyncio.gather(*(case.ask(stream=stream) for _ in range(2)))
                await asyncio.sleep(0.5)
                assert not late.done()  # without a budget it is waited for
                late.cancel()

    asyncio.run(main())


def test_the_loser_of_a_hedge_may_be_tried_again(tmp_path: Path) -> None:
    """Both answers come at once, from servers that had failed and are on trial: none stays on trial for ever."""

    async def main() -> None:
        both = asyncio.Event()

        async def together(asked: Asked, answering: Answering) -> None:
            if len(a.asked) + len(b.asked) == 2:
                both.set()
            await both.wait()
            await say(asked, answering, "hello")

        async with fake_server(together) as a, fake_server(together) as b:
            rule = '[[models]]\nname = "m"\nhedge_seconds = 0.05\n'
            file = tmp_path / "g.toml"
            pool = f'[[pools]]\nname = "p"\nkind = "openai"\nurls = ["{a.url}", "{b.url}"]\n'
            file.write_text(f"[health]\ninterval = 0.05\nhedge_share = 1.0\n{rule}{pool}")
            async with running(file) as case:
                for _ in range(10):
                    a.asked.clear(), b.asked.clear(), both.clear()
                    for server in case.gateway.servers:
                        server.breaker.opened, server.breaker.until = 1, 0.0
                    assert (await case.ask()).status_code == 200
                    assert (len(a.asked), len(b.asked)) == (1, 1)
                    await case.until(lambda: not any(server.breaker.trying for server in case.gateway.servers))

    asyncio.run(main())
