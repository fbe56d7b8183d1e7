"""What the gateway counts: names of the list, who asked, what it took, and whether that met the objectives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway_case import Answering, Asked, Running, chunk, fake_server, pool_file, running, say
from lmworks.gateway.attainment import WINDOWS, Window
from lmworks.gateway.metrics import MAX_TENANTS, OTHER_TENANTS, Metrics
from lmworks.gateway.servers import Servers
from lmworks.observability.catalog import GATEWAY

WHO = {"model_name": "m", "tenant": "anyone", "tier": "default"}
SLOS = """
[[slos]]
name = "chat"
objective = 0.9
ttft = 0.5
tpot = 0.5
[[slos]]
name = "gold"
tier = "gold"
e2e = 1.0
"""


async def scrape(case: Running) -> dict[str, Metric]:
    text = (await case.http.get("/metrics")).text
    return {family.name.removeprefix("lmworks:gateway_"): family for family in text_string_to_metric_families(text)}


def value(found: dict[str, Metric], name: str, **labels: str) -> float | None:
    """Of the series with these labels (and maybe others), summed; None: there is none."""
    values = [
        sample.value
        for family in found.values()
        for sample in family.samples
        if sample.name == f"lmworks:gateway_{name}" and labels.items() <= sample.labels.items()
    ]
    return sum(values) if values else None


async def five(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, *"abcde", gap=0.02)


async def slow(asked: Asked, answering: Answering) -> None:
    await asyncio.sleep(0.6)
    await say(asked, answering, "a", "b")


async def broken(asked: Asked, answering: Answering) -> None:
    answering.begin_stream()
    await answering.event(chunk("a"))
    answering.die()


def test_names_types_and_labels(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(five) as server, running(pool_file(tmp_path / "g.toml", server, extra=SLOS)) as case:
            await case.events()
            found = await scrape(case)
            for spec in GATEWAY:
                short = spec.name.removeprefix("gateway_")
                family = found.pop(short)
                assert (family.type, family.documentation) == (spec.kind, spec.help), spec.name
                for sample in family.samples:
                    assert set(sample.labels) - {"le"} == {*spec.labels}, sample
            assert not [name for name in found if not name.startswith("process_")], "not in the list"

    asyncio.run(main())


def test_times_and_tokens_of_a_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(five) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            await case.events()
            await case.ask()
            found = await scrape(case)
            assert value(found, "requests_total", status="200", path="/v1/chat/completions", **WHO) == 2
            assert value(found, "generation_tokens_total", **WHO) == 10
            assert value(found, "time_to_first_token_seconds_count", **WHO) == 2
            assert value(found, "time_per_output_token_seconds_count", **WHO) == 1, "of streams alone"
            per_token = value(found, "time_per_output_token_seconds_sum", **WHO)
            assert per_token is not None and 0.02 <= per_token < 0.5  # five sleeps between first event and end, over 4
            assert value(found, "server_time_to_first_token_seconds_count", server=server.url, pool="fake") == 2
            assert value(found, "migrations_total", model_name="m") == 0, "there from the first request on"
            assert value(found, "request_failures_total", code="upstream_lost", **WHO) == 0

    asyncio.run(main())


def slo_case(
    behave: Callable[[Asked, Answering], object], requests: int, tmp_path: Path, **body: object
) -> dict[str, Metric]:
    async def main() -> dict[str, Metric]:
        file = pool_file(tmp_path / "g.toml", extra=SLOS)
        async with fake_server(behave) as server, running(pool_file(file, server, extra=SLOS)) as case:  # type: ignore[arg-type]
            for _ in range(requests):
                await case.ask(stream=True, **body)
            return await scrape(case)

    return asyncio.run(main())


def test_requests_that_meet_an_objective(tmp_path: Path) -> None:
    found = slo_case(five, 3, tmp_path)
    assert value(found, "slo_requests_total", slo="chat", tenant="anyone", tier="default") == 3
    assert value(found, "slo_missed_total", slo="chat") == 0
    assert value(found, "slo_attainment", slo="chat", window="5m") == 1
    assert value(found, "slo_objective", slo="chat") == 0.9
    assert value(found, "slo_requests_total", slo="gold") is None, "another tier's"


def test_slow_first_tokens_miss_it(tmp_path: Path) -> None:
    found = slo_case(slow, 2, tmp_path)
    assert value(found, "slo_missed_total", slo="chat", reason="ttft") == 2
    assert value(found, "slo_missed_total", slo="chat", reason="error") == 0
    assert abs((value(found, "slo_burn_rate", slo="chat", window="5m") or 0) - 10) < 1e-9  # all, where a tenth may


def test_streams_that_break_miss_it(tmp_path: Path) -> None:
    found = slo_case(broken, 1, tmp_path)
    assert value(found, "slo_missed_total", slo="chat", reason="error") == 1
    assert value(found, "request_failures_total", code="upstream_lost", **WHO) == 1
    assert value(found, "requests_total", status="200", **WHO) == 1, "its status was sent before"


def test_errors_of_clients_do_not_count(tmp_path: Path) -> None:
    async def refuse(asked: Asked, answering: Answering) -> None:
        await answering.whole({"error": {"message": "top_p"}}, 400)

    found = slo_case(refuse, 2, tmp_path)
    assert value(found, "requests_total", status="400", **WHO) == 2
    assert value(found, "slo_requests_total", slo="chat") is None


def test_windows_forget() -> None:
    now = 0.0
    window = Window(lambda: now)
    window.add(True)
    now = 200.0
    window.add(False)
    assert window.share_missed(300) == 0.5
    now = 400.0
    assert window.share_missed(300) == 0.0 and window.share_missed(WINDOWS["1h"]) == 0.5
    now = 30_000.0
    assert window.share_missed(300) is None
    window.add(False)
    assert len(window.slots) == 1, "what no window needs is dropped"


def test_tenants_beyond_the_limit_share_their_series() -> None:
    from types import SimpleNamespace

    metrics = Metrics(Servers(), list)
    names = {
        metrics.tenant_of(SimpleNamespace(tenant=SimpleNamespace(name=f"t{number}")))  # type: ignore[arg-type]
        for number in range(MAX_TENANTS + 50)
    }
    assert len(names) == MAX_TENANTS + 1 and OTHER_TENANTS in names


def test_an_invalid_file_shows(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "g.toml"
        async with fake_server(five) as server, running(pool_file(file, server)) as case:
            assert value(await scrape(case), "config_reload_success") == 1
            good = file.read_text()
            file.write_text("nonsense")
            await case.until(lambda: case.gateway.settings.error is not None)
            await asyncio.sleep(1.1)
            assert value(await scrape(case), "config_reload_success") == 0
            file.write_text(good + "\n")
            await case.until(lambda: case.gateway.settings.error is None)

    asyncio.run(main())


CHECKS = """
[[quality_checks]]
model = "m"
prompt = "1, 2, 3,"
expect = "^ 4, 5"
every = 0.1
[[quality_checks]]
model = "m"
prompt = "the capital of France is"
expect = "Paris"
every = 0.1
"""


def test_quality_checks(tmp_path: Path) -> None:
    """Each server is asked; one that answers nonsense shows, one that does not answer is no wrong answer."""

    def answers(*texts: str) -> Callable[[Asked, Answering], object]:
        async def behave(asked: Asked, answering: Answering) -> None:
            assert (asked.path, asked.json["temperature"]) == ("/v1/completions", 0)
            text = texts["France" in asked.json["prompt"]]
            await answering.whole({"choices": [{"index": 0, "text": text}]}, 200 if text else 503)

        return behave

    async def main() -> None:
        file = tmp_path / "g.toml"
        async with (
            fake_server(answers(" 4, 5, 6", " Paris, which")) as good,  # type: ignore[arg-type]
            fake_server(answers(" 4, 5, 6", " pink pink")) as bad,  # type: ignore[arg-type]
            fake_server(answers("", "")) as busy,  # type: ignore[arg-type]
            running(pool_file(file, good, bad, busy, extra=CHECKS)) as case,
        ):
            checking = asyncio.create_task(case.gateway.quality.run())
            await case.until(lambda: len(good.asked) >= 2 and len(bad.asked) >= 2 and len(busy.asked) >= 2)
            await case.until(lambda: len(case.gateway.quality.results) == 4)
            found = await scrape(case)
            assert value(found, "quality_score", model_name="m", server=good.url) == 1
            assert value(found, "quality_score", model_name="m", server=bad.url) == 0.5
            assert value(found, "quality_score", model_name="m", server=busy.url) is None
            checking.cancel()

    asyncio.run(main())


def test_exemplars_name_the_trace(tmp_path: Path) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"

    async def main() -> None:
        async with fake_server(five) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
            await case.http.post("/v1/chat/completions", json={"model": "m", "messages": []}, headers=headers)
            accept = {"accept": "application/openmetrics-text; version=1.0.0"}
            text = (await case.http.get("/metrics", headers=accept)).text
            shown = {line.partition("{")[0] for line in text.splitlines() if trace in line}
            assert shown == {
                f"lmworks:gateway_{name}_seconds_bucket"
                for name in ("time_to_first_token", "e2e_request_latency", "server_time_to_first_token")
            }

    asyncio.run(main())
