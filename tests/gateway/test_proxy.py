"""Requests and answers pass through: bodies, streams, statuses, headers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from gateway_case import Answering, Asked, chunk, fake_server, pool_file, running, say, text_of


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hel", "lo")


def test_a_whole_answer_is_the_servers_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            answer = await case.ask(temperature=0.5, unknown={"a": [1, 2.50]})
            assert answer.json()["choices"][0]["message"]["content"] == "Hello"
            sent = server.asked[0]
            assert sent.path == "/v1/chat/completions"
            assert sent.json == {"model": "m", "messages": [], "temperature": 0.5, "unknown": {"a": [1, 2.5]}}
            assert sent.headers["x-request-id"] == answer.headers["x-request-id"]

    asyncio.run(main())


def test_a_stream_is_passed_on_as_it_comes(tmp_path: Path) -> None:
    """The second word is sent only when the client has read the first one."""
    read_first = asyncio.Event()

    async def slow(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        await answering.event(chunk("one "))
        await read_first.wait()
        await answering.event(chunk("two"))
        await answering.end()

    async def main() -> None:
        async with fake_server(slow) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            found = []
            async for line in case.lines():
                found.append(line)
                read_first.set()
            assert text_of(found) == "one two" and found[-1] == "[DONE]"

    asyncio.run(main())


def test_usage_is_asked_for_and_hidden_from_who_did_not_ask(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            plain = await case.events()
            asked = await case.events(stream_options={"include_usage": True})
            assert [json.loads(one)["usage"]["total_tokens"] for one in asked[:-1] if "usage" in one] == [5]
            assert not any("usage" in one for one in plain)
            assert text_of(plain) == text_of(asked) == "Hello"
            assert all(one.json["stream_options"]["include_usage"] for one in server.asked)
            metrics = (await case.http.get("/metrics")).text
            assert (
                'lmworks:gateway_generation_tokens_total{model_name="m",tenant="anyone",tier="default"} 4.0' in metrics
            )

    asyncio.run(main())


def test_events_that_come_in_pieces_and_with_other_line_ends(tmp_path: Path) -> None:
    one, two = (f"data: {json.dumps(chunk(word))}\r\n\r\n".encode() for word in ("a\u2028", "b"))

    async def pieces(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        for at in range(0, len(one + two), 7):
            await answering.send((one + two)[at : at + 7])
            await asyncio.sleep(0)
        await answering.end()

    async def main() -> None:
        async with fake_server(pieces) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            assert text_of(await case.events()) == "a\u2028b"

    asyncio.run(main())


def test_names_aliases_and_names_that_nobody_has(tmp_path: Path) -> None:
    rules = '[[models]]\nname = "chat"\naliases = ["gpt-4o"]\nserves = "m"'

    async def main() -> None:
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server, pool=rules)) as case:
            for name in ("m", "chat", "gpt-4o"):
                assert (await case.ask(model=name)).status_code == 200
            assert [one.json["model"] for one in server.asked] == ["m"] * 3
            listed = (await case.http.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == ["chat", "gpt-4o", "m"]
            for name in ("chat", "gpt-4o", "m"):
                assert (await case.http.get(f"/v1/models/{name}")).json()["id"] == name
            absent = await case.http.get("/v1/models/mm")
            assert absent.status_code == 404 and "did you mean 'm'" in absent.json()["error"]["message"]
            unknown = await case.ask(model="chatt")
            assert unknown.status_code == 404
            assert unknown.json()["error"]["code"] == "model_not_found"
            assert "did you mean 'chat'" in unknown.json()["error"]["message"]

    asyncio.run(main())


def test_a_model_is_not_unknown_before_every_server_has_said_what_it_has(tmp_path: Path) -> None:
    """A gateway that starts again while a server is away: clients do not ask again after a 404."""

    async def main() -> None:
        async with fake_server(hello) as a, fake_server(hello, models=("n",)) as b:
            b.healthy = False
            async with running(pool_file(tmp_path / "g.toml", a, b), wait=False) as case:
                for early in (True, False):
                    if not early:
                        await case.until(lambda: any(one.up for one in case.gateway.servers))
                        assert (await case.ask(model="m")).status_code == 200
                    away = await case.ask(model="n")
                    assert (away.status_code, away.json()["error"]["code"]) == (503, "no_server")
                    assert "retry-after" in away.headers
                b.healthy = True
                await case.until(lambda: all(one.up for one in case.gateway.servers))
                assert (await case.ask(model="n")).status_code == 200
                assert (await case.ask(model="o")).status_code == 404

    asyncio.run(main())


def test_a_clients_error_is_passed_back_and_tried_once(tmp_path: Path) -> None:
    async def refuse(asked: Asked, answering: Answering) -> None:
        await answering.whole({"error": {"message": "no", "code": "bad", "type": "t", "param": "n"}}, 400)

    async def main() -> None:
        async with fake_server(refuse) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            answer = await case.ask()
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "bad"
            assert len(server.asked) == 1

    asyncio.run(main())


def test_the_servers_key_is_sent_and_the_clients_is_not(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("POOL_KEY", "of-the-pool")

    async def main() -> None:
        async with fake_server(hello) as server:
            file = pool_file(tmp_path / "g.toml", server, pool='key_env = "POOL_KEY"')
            async with running(file) as case:
                await case.http.post(
                    "/v1/completions", json={"model": "m", "prompt": "x"}, headers={"authorization": "Bearer mine"}
                )
            assert server.asked[0].headers["authorization"] == "Bearer of-the-pool"
            assert server.asked[0].path == "/v1/completions"

    asyncio.run(main())


def test_a_client_that_leaves_ends_its_request_at_the_server(tmp_path: Path) -> None:
    async def endless(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        while True:
            await answering.event(chunk("more "))
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with fake_server(endless) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            lines = case.lines()
            await anext(lines)
            await lines.aclose()
            await case.until(lambda: server.left == 1)
            await case.until(lambda: not next(iter(case.gateway.servers)).open)

    asyncio.run(main())


def test_bodies_and_headers_beyond_their_limits(tmp_path: Path) -> None:
    async def main() -> None:
        limits = "[listen]\nbody_bytes = 2048\nheader_bytes = 4096"
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server, extra=limits)) as case:
            assert (await case.ask(messages=["x" * 3000])).status_code == 413
            large = await case.http.get("/health", headers={"x": "y" * 5000})
            assert large.status_code == 431
            assert (await case.http.post("/v1/completions", content=b"{")).json()["error"]["code"] == "invalid_json"
            assert (await case.http.post("/v1/completions", content=b"[]")).status_code == 400
            assert (await case.http.post("/v1/completions", content=b"[" * 2000)).status_code == 400
            assert (await case.http.get("/v1/completions")).status_code == 405
            assert (await case.http.get("/v1/nothing")).status_code == 404
            assert not server.asked

    asyncio.run(main())


def test_errors_of_messages_have_anthropics_form(tmp_path: Path) -> None:
    """The gateway's own, before a stream and in it."""

    async def dies(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        await answering.send(b'event: message_start\ndata: {"type": "message_start", "message": {}}\n\n')
        answering.die()

    async def main() -> None:
        async with fake_server(dies) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            unknown = await case.http.post("/v1/messages", json={"model": "other", "messages": []})
            assert unknown.status_code == 404
            assert unknown.json()["type"] == "error" and unknown.json()["error"]["type"] == "not_found_error"
            stream = await case.http.post("/v1/messages", json={"model": "m", "messages": [], "stream": True})
            *_, last = [one for one in stream.text.split("\n\n") if one]
            name, data = last.split("\n")
            error = json.loads(data.removeprefix("data: "))
            assert name == "event: error" and error["type"] == "error" and error["error"]["type"] == "api_error"
            assert "error" in (await case.http.post("/v1/chat/completions", json={"model": "other"})).json()

    asyncio.run(main())
