"""Clients of a drill tell a whole answer from one that was cut off, said twice, changed, or refused."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from gateway_case import Answering, Asked, fake_server
from lmworks.drill.incident import Check, Moment, Report
from lmworks.drill.load import Load, Outcome, Question, Tenant, seen
from lmworks.drill.monitoring import Monitoring
from lmworks.drill.report import summary_row, write_report
from lmworks.drill.run import choose
from lmworks.drill.tcp_proxy import TCPProxy
from lmworks.spec import SpecError

TEXT = "one two three"


def completion(text: str, **more: object) -> dict[str, object]:
    return {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": None}], **more}


async def as_asked(asked: Asked, answering: Answering) -> None:
    """Answers as the prompt says."""
    kind = asked.json["prompt"]
    if kind == "refused":
        await answering.whole({"error": {"code": "busy"}}, 429, "retry-after: 1")
        return
    if kind == "failed":
        await answering.whole({"error": {"code": "broken"}}, 502)
        return
    answering.begin_stream()
    words = {"twice": ["one ", "two ", "two ", "three"], "other": ["one ", "2 ", "three"]}
    for number, word in enumerate(words.get(kind, ["one ", "two ", "three"])):
        if kind == "lost" and number == 2:
            answering.die()
            return
        if kind == "error" and number == 2:
            await answering.event({"error": {"code": "upstream_lost"}})
            await answering.end(done=False)
            return
        await answering.event(completion(word))
    await answering.event(completion("", choices=[], usage={"completion_tokens": 3}))
    await answering.end(done=kind != "unfinished")


@pytest.mark.parametrize(
    ("kind", "end", "error"),
    [
        ("whole", "ok", ""),
        ("twice", "wrong", ""),
        ("other", "wrong", ""),
        ("lost", "lost", "RemoteProtocolError"),
        ("error", "lost", "upstream_lost"),
        ("unfinished", "lost", ""),
        ("refused", "refused", "busy"),
        ("failed", "failed", "broken"),
    ],
)
def test_what_became_of_a_request(kind: str, end: str, error: str) -> None:
    async def main() -> Outcome:
        async with fake_server(as_asked) as server:
            url = server.url.removesuffix("/v1")
            load = Load(url, "m", [Tenant("a", 1.0)], [Question(kind, 3, None)], time.monotonic, expected={0: TEXT})
            async with load.client() as http:
                return await load.ask(http, load.tenants[0], 0)

    found = asyncio.run(main())
    assert (found.end, found.error) == (end, error)
    assert found.tokens == (3 if end in ("ok", "wrong") or kind == "unfinished" else 0)


def test_a_load_comes_at_its_rate_and_learns_its_answers() -> None:
    async def answer(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        await answering.event(completion(asked.json["prompt"] * 2))
        await answering.event(completion("", choices=[], usage={"completion_tokens": 2}))
        await answering.end()

    async def main() -> list[Outcome]:
        async with fake_server(answer) as server:
            url = server.url.removesuffix("/v1")
            tenants = [Tenant("a", 60.0, key="secret-a"), Tenant("b", 8.0)]
            asked = [Question("x", 2, None), Question("y", 2, 7)]
            load = Load(url, "m", tenants, asked, time.monotonic)
            await asyncio.to_thread(load.learn)
            assert load.expected == {0: "xx", 1: "yy"}
            load.start()
            await asyncio.sleep(1.5)
            await asyncio.to_thread(load.stop)
            keys = {one.headers.get("authorization") for one in server.asked}
            assert keys == {"Bearer secret-a", None}
            return load.outcomes

    found = asyncio.run(main())
    counts = {name: sum(one.tenant == name for one in found) for name in "ab"}
    assert counts["a"] > counts["b"] > 0 and counts["a"] < 200
    assert {one.end for one in found} == {"ok"}


def test_clients_that_leave_close_their_connections() -> None:
    left = 0

    async def answer(asked: Asked, answering: Answering) -> None:
        nonlocal left
        answering.begin_stream()
        try:
            await asyncio.sleep(20)
        finally:
            left += 1

    async def main() -> Load:
        async with fake_server(answer) as server:
            load = Load(
                server.url.removesuffix("/v1"), "m", [Tenant("a", 50.0)], [Question("x", 2, None)], time.monotonic
            )
            load.start()
            while len(server.asked) < 3:
                await asyncio.sleep(0.02)
            load.leave("a")
            await asyncio.to_thread(load.stop)  # else it waits for every answer
            while left < len(server.asked):
                await asyncio.sleep(0.02)
            return load

    load = asyncio.run(asyncio.wait_for(main(), 10))
    assert load.outcomes == [] and load.rates == {"a": 0.0}


def test_the_slo_counts_right_answers_in_time() -> None:
    found = [
        Outcome("a", 0.0, 0, "ok", first=0.1),
        Outcome("a", 0.0, 0, "ok", first=3.0),
        Outcome("a", 0.0, 0, "lost", first=0.2),
    ]
    assert seen(found, 1.0).within_slo == pytest.approx(1 / 3)
    assert seen(found, 1.0).ends == {"ok": 2, "lost": 1}
    assert seen([], 1.0).within_slo == 1.0


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that says what it hears; its port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                one, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(one,), daemon=True).start()

    def answer(one: socket.socket) -> None:
        with one:
            while data := one.recv(100):
                one.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield listening.getsockname()[1]
    listening.close()


def test_a_network_is_slow_cut_and_resets(echo: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    proxy = TCPProxy(port, echo)
    proxy.start()
    try:
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.settimeout(0.3)
            one.sendall(b"a")
            assert one.recv(10) == b"a"
            proxy.cut = True
            one.sendall(b"b")
            with pytest.raises(TimeoutError):
                one.recv(10)
            proxy.cut = False
            one.settimeout(5)
            assert one.recv(10) == b"b"  # held back, not lost
            proxy.delay = 0.15
            began = time.monotonic()
            one.sendall(b"c")
            assert one.recv(10) == b"c" and time.monotonic() - began > 0.25  # there and back
            proxy.delay, proxy.reset = 0.0, 1.0
            one.sendall(b"d")
            assert one.recv(10) == b""
    finally:
        proxy.stop()


def test_unknown_drills_are_named() -> None:
    assert [one.name for one in choose("server-killed,engine-hung")] == ["server-killed", "engine-hung"]
    with pytest.raises(SpecError, match=r"no drill 'server-kiled'.*server-killed"):
        choose("server-kiled")


def test_a_report_says_what_happened(tmp_path: Path) -> None:
    checks = [
        Check("alert ServerDown", True, "within 30 s", "3.1 s after the fault"),
        Check("lost streams", False, "at most 0", "2 (200 upstream_lost)"),
        Check("the incident ends", True, "within 60 s", "after 7.0 s"),
    ]
    blue = seen([Outcome("blue", 1.0, 0, "ok", first=0.1), Outcome("blue", 1.0, 0, "lost")], 1.0).to_dict()
    none = seen([], 1.0).to_dict()
    declared = {
        "gateway": {"health": {"interval": 0.5}, "timeouts": {"idle": 3.0}}, "limits": {"kill_seconds": 6.0},
        "alert windows divided by": 60, "scrape_interval": 1.0, "slo_ttft": 2.0, "cores": 2, "load average": 1.0,
    }  # fmt: skip
    tenants = {"blue": {"before": none, "during": blue, "after": none}}
    report = Report("server-killed", "kill -9", checks, [Moment(4.0, "kill -9", "fault")], [], tenants, 20.0, declared)
    assert not report.ok
    assert summary_row(report) == [
        "server-killed", "kill -9", "ServerDown 3.1 s", "1", "0", "0", "0", "50%", "7.0 s", "NO",
    ]  # fmt: skip
    table, _ = write_report([report], tmp_path, date(2026, 11, 1))
    assert "0 of 1 drills passed" in table.read_text() and "divided by 60" in table.read_text()


def test_a_report_of_a_drill_that_could_not_run(tmp_path: Path) -> None:
    """Its fleet or Prometheus did not start, so there is nothing to show of users."""
    failed = Check("the drill ran", False, "to its end", "a process of monitoring ended with 1")
    report = Report("server-killed", "kill -9", [failed], [], [], {}, 0.0, {})
    table, _ = write_report([report], tmp_path, date(2026, 11, 1))
    assert "0 of 1 drills passed" in table.read_text() and "a process of monitoring ended with 1" in table.read_text()


def test_files_of_monitoring_are_found_from_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prometheus runs in that folder, and is told where its files are."""
    monkeypatch.chdir(tmp_path)
    assert Monitoring(Path("runs/fleet-demo"), {}, {}, time.monotonic).folder == tmp_path / "runs" / "fleet-demo"
