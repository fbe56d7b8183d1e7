"""`lmworks gateway --workers`: processes on one port that are one gateway to clients, Prometheus and operators."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway_case import Answering, Asked, chunk, fake_server, pool_file, say
from lmworks.gateway.config import read_config
from lmworks.gateway.workers import Place, check_workers
from lmworks.observability.families import combined
from lmworks.spec import SpecError
from redis_process import RedisProcess
from tenant_case import administered, bearer, make_tenant, tenant_file


@pytest.fixture
def redis() -> Iterator[RedisProcess]:
    found = RedisProcess()
    yield found
    found.kill()


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hel", "lo")


def test_tenants_need_redis_and_limits_are_divided(tmp_path: Path) -> None:
    file = tenant_file(tmp_path / "g.toml", pool="max_open = 5\nregister = true\nregister_env = 'HOME'")
    config = read_config(file)
    check_workers(config, 1)
    with pytest.raises(SpecError, match=r"--workers 2: .* set tenants\.limits = \"redis://"):
        check_workers(config, 2)
    shared = Place(1, 2).share(config)
    assert shared.pools[0].max_open == 3 and shared.listen.connections == config.listen.connections // 2
    assert shared.tenants.journal == f"{config.tenants.journal}/worker-1"
    assert Place().share(config) is config


def test_counters_are_added_and_gauges_as_the_list_says() -> None:
    text = """# TYPE lmworks:gateway_retries_total counter
lmworks:gateway_retries_total{model_name="m"} %d
# TYPE lmworks:gateway_server_up gauge
lmworks:gateway_server_up{pool="p",server="s"} %d
# TYPE lmworks:gateway_requests_open gauge
lmworks:gateway_requests_open %d
# TYPE lmworks:gateway_store_up gauge
lmworks:gateway_store_up{store="redis"} %d
"""
    both = [one for values in ((2, 1, 3, 1), (5, 1, 4, 0)) for one in text_string_to_metric_families(text % values)]
    assert [one.samples[0].value for one in combined(both)] == [7, 1, 7, 0]


@dataclass
class Workers:
    process: subprocess.Popen[bytes]
    url: str
    stopped: bool = False

    def stop(self) -> None:
        """Once: a second SIGTERM ends it at once."""
        if not self.stopped:
            self.stopped = True
            self.process.send_signal(signal.SIGTERM)

    async def each(self, method: str, path: str, count: int = 24, **more: Any) -> list[httpx.Response]:
        """A connection of its own for each request: they reach all workers."""

        async def one() -> httpx.Response:
            async with httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False) as http:
                return await http.request(method, path, **more)

        return await asyncio.gather(*(one() for _ in range(count)))

    async def metric(self, name: str, labels: str = "") -> float:
        [answer] = await self.each("GET", "/metrics", 1)
        found = [line for line in answer.text.splitlines() if line.startswith(f"lmworks:{name}") and labels in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def pids(self) -> set[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        others = [each for task in Path(f"/proc/{self.process.pid}/task").iterdir() for each in children_of(task)]
        return {int(one) for one in [*children, *others]}


def children_of(task: Path) -> list[str]:
    return (task / "children").read_text().split()


async def until(condition: Callable[[], Awaitable[Any]], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.1)


@asynccontextmanager
async def workers(file: Path, count: int = 2) -> AsyncGenerator[Workers, None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lmworks", "gateway", str(file), "--port", str(port), "--workers", str(count)]
    with (file.parent / "gateway.log").open("wb") as log:
        found = Workers(subprocess.Popen(command, stdout=log, stderr=log), f"http://127.0.0.1:{port}")

    async def all_ready() -> bool:
        try:
            answers = await found.each("GET", "/ready")
        except httpx.TransportError:
            return False
        return len(found.pids()) == count and all(one.status_code == 200 for one in answers)

    try:
        await until(all_ready)
        await asyncio.sleep(1)  # each has listened for long enough to take its share
        yield found
    finally:
        found.stop()
        assert await asyncio.to_thread(found.process.wait, 60) == 0


@pytest.mark.slow
def test_limits_usage_and_metrics_are_those_of_one_gateway(tmp_path: Path, redis: RedisProcess) -> None:
    """Also after a worker was killed and started again."""

    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, tenants=f'limits = "{redis.url}"')
            key = make_tenant(file, requests_per_minute=10)
            body = {"model": "m", "messages": []}
            asked: dict[str, Any] = {"json": body, "headers": bearer(key)}
            async with workers(file) as found:
                statuses = [one.status_code for one in await found.each("POST", "/v1/chat/completions", 40, **asked)]
                assert statuses.count(429) == 40 - statuses.count(200) and 10 <= statuses.count(200) <= 12, statuses
                answered = statuses.count(200)

                async def shown() -> tuple[float, float]:
                    name = "gateway_requests_total{"
                    return await found.metric(name, 'status="200"'), await found.metric(name, 'status="429"')

                assert await shown() == (answered, 40 - answered)
                before = found.pids()
                os.kill(min(before), signal.SIGKILL)
                await until(lambda: restarted(found, before))
                assert await shown() == (answered, 40 - answered), "what the killed one had counted is kept"
                refused = await found.each("POST", "/v1/chat/completions", 10, **asked)
                assert {one.status_code for one in refused} <= {200, 429}
                answered += sum(one.status_code == 200 for one in refused)
                assert sum(await shown()) == 50
            with administered(file) as admin:
                [row] = admin.usage(["tenant"])
                assert (row["requests"], row["prompt_tokens"]) == (answered, 3 * answered)

    asyncio.run(main())


async def restarted(found: Workers, before: set[int]) -> bool:
    now = found.pids()
    return (
        len(now) == len(before)
        and now != before
        and all(one.status_code == 200 for one in await found.each("GET", "/ready"))
    )


@pytest.mark.slow
def test_what_one_worker_is_told_all_know_and_all_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    go_on = asyncio.Event()

    async def slow(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        await answering.event(chunk("one "))
        await go_on.wait()
        await answering.event(chunk("two"))
        await answering.end()

    async def main() -> None:
        async with fake_server(slow) as server, fake_server(hello, models=("late",)) as late:
            pools = '[[pools]]\nname = "r"\nkind = "openai"\nregister = true\nregister_env = "SECRET"\n'
            rule = '[[rollouts]]\nmodel = "m"\nstable = "fake"\ncandidate = "r"\n'
            async with workers(pool_file(tmp_path / "g.toml", server, pool=pools + rule)) as found:
                lease = {"url": late.url, "pool": "r", "seconds": 60}
                registered = await found.each(
                    "POST", "/gateway/servers", 1, json=lease, headers={"authorization": "Bearer s3cret"}
                )
                assert registered[0].status_code == 200, registered[0].text

                async def known() -> bool:
                    models = [one.json()["data"] for one in await found.each("GET", "/v1/models")]
                    return all({each["id"] for each in one} == {"m", "late"} for one in models)

                await until(known)
                await found.each("POST", "/gateway/rollouts", 1, json={"model": "m", "action": "roll_back"})

                async def switched() -> bool:
                    states = await found.each("GET", "/gateway/rollouts")
                    return {one.json()["rollouts"][0]["state"] for one in states} == {"rolled_back"}

                await until(switched)
                before = found.pids()
                os.kill(max(before), signal.SIGKILL)
                await until(lambda: restarted(found, before))
                await until(known)  # the new one, too
                await until(switched)
                body = {"model": "m", "messages": [], "stream": True}
                streams = asyncio.gather(*(found.each("POST", "/v1/chat/completions", 1, json=body) for _ in range(12)))

                async def all_open() -> bool:
                    return len(server.asked) == 12

                await until(all_open)
                assert await found.metric("gateway_requests_open ") == 12
                found.stop()
                await asyncio.sleep(4.5)  # beyond the notice: nobody can connect, streams are waited for
                with pytest.raises(httpx.ConnectError):
                    await found.each("GET", "/health", 1)
                assert found.process.poll() is None
                go_on.set()
                for [answer] in await streams:
                    texts = [line[6:] for line in answer.text.split("\n\n") if line]
                    assert texts[-1] == "[DONE]" and json.loads(texts[1])["choices"][0]["delta"]["content"] == "two"

    asyncio.run(main())


@pytest.mark.slow
def test_a_worker_that_cannot_start_ends_them_all(tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_text(
        '[listen]\ntls_cert = "none.pem"\ntls_key = "none.key"\n[[pools]]\nname = "p"\nurls = ["http://a/v1"]\n'
    )
    command = [sys.executable, "-m", "lmworks", "gateway", str(file), "--port", "0", "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "before it was ready" in done.stderr
