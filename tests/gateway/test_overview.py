"""The gateway's own page: its data are what happened, and it asks nobody else for anything."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from gateway_case import Answering, Asked, fake_server, pool_file, running, say
from lmworks.gateway.overview import quantile

EXTRA = '[[slos]]\nname = "chat"\nttft = 30.0\n[monitoring]\nprometheus = "{}"\n'
ALERT = {
    "labels": {"alertname": "ServerDown", "severity": "warning"},
    "annotations": {"summary": "a is down", "runbook_url": "https://x/server-down.md"},
    "state": "firing",
    "activeAt": "2026-01-01T00:00:00Z",
}


async def answers(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "a", "b", "c")


def test_overview(tmp_path: Path) -> None:
    async def prometheus(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("GET /prom/api/v1/alerts ")
        await Answering(writer).whole({"status": "success", "data": {"alerts": [ALERT]}})

    async def main() -> None:
        listening = await asyncio.start_server(prometheus, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/prom"
        async with fake_server(answers) as server:
            file = pool_file(tmp_path / "g.toml", server, extra=EXTRA.format(url))
            async with running(file) as case:
                for _ in range(4):
                    await case.events()
                found = (await case.http.get("/gateway/overview")).json()
                assert [(one["url"], one["up"]) for one in found["servers"]] == [(server.url, True)]
                (slo,) = found["slos"]
                assert (slo["slo"], slo["attainment"]["5m"], slo["burn_rate"]["5m"]) == ("chat", 1.0, 0.0)
                (model,), (tenant,) = found["models"], found["tenants"]
                assert (model["model_name"], tenant["tenant"]) == ("m", "anyone")
                for row in (model, tenant):
                    assert (row["requests"], row["generated_tokens"], row["prompt_tokens"]) == (4, 12, 12)
                    assert 0 < row["ttft"]["p50"] <= row["ttft"]["p99"] < 10
                assert found["alerts"]["error"] is None
                (alert,) = found["alerts"]["alerts"]
                assert (alert["alert"], alert["state"], alert["summary"]) == ("ServerDown", "firing", "a is down")
        listening.close()

    asyncio.run(main())


def test_overview_without_prometheus_and_for_admins_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(answers) as server:
            file = pool_file(tmp_path / "g.toml", server, extra=EXTRA.format("http://127.0.0.1:9"))
            async with running(file) as case:
                found = (await case.http.get("/gateway/overview")).json()
                assert found["alerts"]["error"].startswith("Prometheus: no connection") and not found["models"]
                for path in ("/gateway/overview", "/gateway/servers", "/gateway/rollouts"):
                    assert (await case.http.get(path)).status_code == 200
                    other = await case.http.get(path, headers={"x-forwarded-for": "10.0.0.1"})
                    assert other.status_code == 403 and other.json()["error"]["code"] == "admin_only"

    asyncio.run(main())


def test_page(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(answers) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            answer = await case.http.get("/dashboard")
            assert answer.headers["content-type"].startswith("text/html")
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert policy.count("sha256-") == len(re.findall("<script>|<style>", answer.text)) == 2
            assert not re.findall(r"""(?:src|href)=["'](?!data:)""", answer.text), "self-contained"
            assert server.url not in answer.text, "nothing of the fleet without the right to see it"

    asyncio.run(main())


def test_quantile() -> None:
    buckets = {0.1: 0.0, 0.5: 50.0, 1.0: 100.0, float("inf"): 100.0}
    assert quantile(0.5, buckets) == 0.5 and quantile(0.75, buckets) == 0.75
    assert quantile(0.99, {1.0: 0.0, float("inf"): 4.0}) == 1.0 and quantile(0.5, {1.0: 0.0, float("inf"): 0.0}) is None
