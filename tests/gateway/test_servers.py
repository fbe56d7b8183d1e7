"""Which servers there are, which of them get requests, and who is next."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway_case import Answering, Asked, fake_server, pool_file, running, say
from lmworks.gateway.config import GatewayConfig, Pool, read_config
from lmworks.gateway.health import load_of
from lmworks.gateway.servers import Load, Servers
from lmworks.spec import SpecError


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "hello")


def test_each_server_in_its_turn(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as a, fake_server(hello) as b, fake_server(hello) as c:
            routing = '[routing]\npolicy = ["round_robin"]'
            async with running(pool_file(tmp_path / "g.toml", a, b, c, extra=routing)) as case:
                for _ in range(9):
                    await case.ask()
                assert [len(one.asked) for one in (a, b, c)] == [3, 3, 3]

    asyncio.run(main())


def test_the_least_loaded_by_reports_and_by_our_own_requests(tmp_path: Path) -> None:
    """One server reports a queue of 3 from others: it gets none of the first three requests, which are held open."""
    hold = asyncio.Event()

    async def held(asked: Asked, answering: Answering) -> None:
        await hold.wait()
        await say(asked, answering, "hello")

    def report(waiting: int, kv: float = 0.1) -> str:
        return (
            f'vllm:num_requests_waiting{{model_name="m"}} {waiting}\nvllm:kv_cache_usage_perc{{model_name="m"}} {kv}\n'
        )

    async def main() -> None:
        busy, free, full = report(3), report(0), report(0, 0.99)
        async with (
            fake_server(held, metrics=busy) as a,
            fake_server(held, metrics=free) as b,
            fake_server(held, metrics=full) as c,
            running(pool_file(tmp_path / "g.toml", a, b, c, kind="vllm")) as case,
        ):
            asking = [asyncio.create_task(case.ask()) for _ in range(3)]
            await case.until(lambda: len(b.asked) == 3)
            assert not a.asked and not c.asked
            hold.set()
            assert {one.status_code for one in await asyncio.gather(*asking)} == {200}

    asyncio.run(main())


def test_a_server_that_fails_its_probes_gets_no_requests_until_it_is_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            fake_server(hello) as a,
            fake_server(hello) as b,
            running(pool_file(tmp_path / "g.toml", a, b)) as case,
        ):
            first = next(one for one in case.gateway.servers if one.url == a.url)
            a.healthy = False
            await case.until(lambda: not first.up)
            for _ in range(4):
                assert (await case.ask()).status_code == 200
            assert (len(a.asked), len(b.asked)) == (0, 4)
            b.healthy = False
            await case.until(lambda: not any(one.up for one in case.gateway.servers))
            gone = await case.ask()
            assert gone.status_code == 503 and gone.json()["error"]["code"] == "no_server"
            assert (await case.http.get("/ready")).status_code == 503
            a.healthy = True
            await case.until(lambda: first.up)
            assert (await case.ask()).status_code == 200 and len(a.asked) == 1

    asyncio.run(main())


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            fake_server(hello) as a,
            fake_server(hello, models=("m", "n")) as b,
            running(pool_file(tmp_path / "g.toml", a)) as case,
        ):
            pool_file(tmp_path / "g.toml", b)
            # A request is the first to see the new file; the servers must follow it all the same.
            await case.until(lambda: case.gateway.settings.current().pools[0].urls == [b.url])
            await case.until(lambda: {one.url for one in case.gateway.servers if one.up} == {b.url})
            assert (await case.ask(model="n")).status_code == 200
            (tmp_path / "g.toml").write_text("[[pools]]\nnam = 1\n")
            await asyncio.sleep(1.2)
            assert (await case.ask()).status_code == 200
            assert not a.asked and len(b.asked) == 2

    asyncio.run(main())


def test_servers_register_with_a_lease(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET", "let me in")

    async def main() -> None:
        async with fake_server(hello) as a, fake_server(hello) as b:
            own = 'register = true\nregister_env = "SECRET"'
            async with running(pool_file(tmp_path / "g.toml", a, pool=own)) as case:
                lease = {"url": b.url, "pool": "fake", "seconds": 0.5}
                refused = await case.http.post("/gateway/servers", json=lease)
                assert refused.status_code == 401
                secret = {"authorization": "Bearer let me in"}
                wrong = await case.http.post("/gateway/servers", json=lease | {"pool": "other"}, headers=secret)
                assert wrong.status_code == 404
                assert (await case.http.post("/gateway/servers", json=lease, headers=secret)).status_code == 200
                await case.until(lambda: sum(one.up for one in case.gateway.servers) == 2)
                await case.until(lambda: [one.url for one in case.gateway.servers] == [a.url])

    asyncio.run(main())


def test_one_server_found_twice_is_one() -> None:
    async def main() -> None:
        pool, servers = Pool(name="p", urls=["http://a:1/v1"]), Servers()
        new = servers.update(pool, "file", ["http://a:1/v1"], 1)
        assert servers.update(pool, "dns", ["http://a:1/v1/", "http://b:1/v1"], 1)[0].url == "http://b:1/v1"
        assert [one.url for one in servers] == ["http://a:1/v1", "http://b:1/v1"]
        servers.update(pool, "dns", [], 1)
        assert [one.url for one in servers] == ["http://a:1/v1"] and not new[0].draining

    asyncio.run(main())


def test_load_of_a_servers_metrics() -> None:
    async def main() -> None:
        server = Servers().update(Pool(name="p", urls=["http://a:1/v1"], kind="sglang"), "file", ["http://a:1/v1"], 1)[
            0
        ]
        server.open = 2
        text = b'# HELP x\nsglang:num_running_reqs{model="a"} 3.0\nsglang:num_running_reqs{model="b"} 1\n'
        text += (
            b'sglang:num_queue_reqs 2\nsglang:token_usage{model="a b"} 0.5 1700000\nsglang:token_usage 0.25\nother 9\n'
        )
        server.load = load_of(server, text)
        assert server.load == Load(4.0, 2.0, 0.5, 2)
        server.open = 5  # three more since then
        assert server.queue == 9.0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"pools": [{"name": "a", "url": ["http://x/v1"]}]}, "unknown key 'pools.url'; did you mean 'urls'?"),
        ({"pools": [{"name": "a", "urls": ["x:8000"]}]}, "'x:8000' is not an address"),
        ({"pools": [{"name": "a", "urls": ["http://x:99999/v1"]}]}, "'http://x:99999/v1' is not an address"),
        ({"pools": [{"name": "a", "urls": ["http://x:http/v1"]}]}, "is not an address"),
        ({"pools": [{"name": "a", "urls": ["http://[::1/v1"]}]}, "is not an address"),
        ({"pools": [{"name": "a", "urls": ["http://a b/v1"]}]}, "is not an address"),
        ({"pools": [{"name": "a", "urls": ["http://x/v1\r\nhost: y"]}]}, "is not an address"),
        ({"pools": [{"name": "a", "dns": "x:1"}], "tiers": [{"name": "gold"}]}, "without tenants.store"),
        ({"pools": [{"name": "a", "urls": ["http://x/v1"], "key_env": "NOWHERE"}]}, "no such environment variable"),
        ({"pools": [{"name": "a"}]}, "'a' has no servers"),
        ({"pools": [{"name": "a", "register": True}]}, "set register_env"),
        ({}, "a gateway needs servers"),
        ({"pools": [{"name": "a", "dns": "x"}]}, "write HOST:PORT"),
        (
            {"pools": [{"name": "a", "dns": "x:1"}], "routing": {"policy": ["round_robbin"]}},
            "did you mean 'round_robin'",
        ),
        ({"pools": [{"name": "a", "dns": "x:1"}], "models": [{"name": "m", "pools": ["b"]}]}, "no pool is called 'b'"),
    ],
)
def test_errors_of_the_file_say_what_would_work(table: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as found:
        GatewayConfig.from_dict(table)
    assert message in str(found.value)


def test_a_section_of_tenants_without_a_store_is_refused(tmp_path: Path) -> None:
    """It would be a gateway that asks nobody for a key, though its file says that it has tenants."""
    (tmp_path / "g.toml").write_text('[[pools]]\nname = "a"\nurls = ["http://x/v1"]\n[tenants]\n')
    with pytest.raises(SpecError, match="without store nobody is asked for a key"):
        read_config(tmp_path / "g.toml")
