"""Streams whose server is killed: the client reads what it would have read without that, once and whole."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_case import Answering, Asked, chunk, fake_server, pool_file, running, say, text_of
from serve_processes import ServeProcess, start_server

MESSAGES = [{"role": "user", "content": "say something"}]
LONG = {"type": "string", "minLength": 40, "maxLength": 60, "pattern": "^[a-z ]*$"}
SCHEMA = {"type": "object", "properties": {"a": LONG, "n": {"type": "integer"}}, "required": ["a", "n"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
USAGE = {"stream_options": {"include_usage": True}}

# Path → bodies of streams that are compared.
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 300, **USAGE}),
    ("/chat/completions", {"messages": MESSAGES, "temperature": 1.2, "seed": 5, "max_tokens": 300, **USAGE}),
    ("/chat/completions", {"messages": MESSAGES, "temperature": 1, "seed": 6, "response_format": FORMAT, **USAGE}),
    (
        "/chat/completions",
        {"messages": MESSAGES, "temperature": 1, "seed": 7, "tools": [TOOL], "tool_choice": "required", **USAGE},
    ),
    ("/completions", {"prompt": "def f(x):", "temperature": 0, "max_tokens": 300, **USAGE}),
    ("/completions", {"prompt": ["def ", "return "], "n": 2, "temperature": 1, "seed": 8, "max_tokens": 300, **USAGE}),
    ("/completions", {"prompt": "x", "temperature": 1, "seed": 9, "max_tokens": 300, "logprobs": 1, "stop": ["zqx"]}),
]


def start(model: Path, name: str) -> ServeProcess:
    return start_server(model / "tiny", model / "template.jinja", model / f"{name}.log")


@pytest.fixture
def servers(model: Path) -> Iterator[list[ServeProcess]]:
    found = [start(model, name) for name in ("one", "two")]
    try:
        for server in found:
            server.wait_ready()
        yield found
    finally:
        for server in found:
            server.kill()


async def read_stream(http: httpx.AsyncClient, url: str, body: dict[str, Any], seen: list[str]) -> None:
    async with http.stream("POST", url, json={"model": "tiny", "stream": True, **body}, timeout=60) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line:
                seen.append(line)


def content(lines: list[str]) -> dict[str, Any]:
    """What a client makes of a stream: texts, calls, log-probabilities, ends, usage."""
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines), lines[-3:]
    found: dict[str, Any] = {"ids": set(), "usage": None}
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        found["ids"].add(event["id"])
        found["usage"] = event.get("usage") or found["usage"]
        for one in event["choices"]:
            own = found.setdefault(
                one["index"], {"text": "", "arguments": "", "names": [], "ends": [], "logprobs": [], "roles": 0}
            )
            delta = one.get("delta") or {}
            own["text"] += one.get("text") or delta.get("content") or ""
            own["roles"] += "role" in delta
            for call in delta.get("tool_calls") or ():
                own["names"] += [name] if (name := call["function"].get("name")) else []
                own["arguments"] += call["function"].get("arguments") or ""
            own["ends"] += [one["finish_reason"]] * (one["finish_reason"] is not None)
            if one.get("logprobs"):
                own["logprobs"] += zip(one["logprobs"]["tokens"], one["logprobs"]["text_offset"], strict=True)
    assert len(found.pop("ids")) == 1
    found["usage"] = found["usage"] and {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return found


async def kill_trial(servers: list[ServeProcess], file: Path, chunks: int) -> int:
    """All streams at once, a kill when five of the seven have so many chunks; returns how many streams moved.

    Of five at least two are the killed server's.
    """
    async with httpx.AsyncClient(trust_env=False) as http:
        undisturbed: list[list[str]] = [[] for _ in STREAMS]
        for (path, body), seen in zip(STREAMS, undisturbed, strict=True):
            await read_stream(http, servers[1].url + path, body, seen)
        async with running(file) as case:
            found: list[list[str]] = [[] for _ in STREAMS]
            base = str(case.http.base_url).rstrip("/") + "/v1"
            reading = [
                asyncio.create_task(read_stream(http, base + path, body, seen))
                for (path, body), seen in zip(STREAMS, found, strict=True)
            ]
            await case.until(lambda: sum(len(one) >= chunks for one in found) >= 5, 60)
            servers[0].kill()
            await asyncio.gather(*reading)
            for expected, lines, (_, body) in zip(undisturbed, found, STREAMS, strict=True):
                assert content(lines) == content(expected), body
            metrics = (await case.http.get("/metrics")).text
    moved = [line for line in metrics.splitlines() if line.startswith("lmworks:gateway_migrations_total{")]
    return int(float(moved[0].split()[-1])) if moved else 0


def gateway_file(folder: Path, servers: list[ServeProcess]) -> Path:
    routing = '[routing]\npolicy = ["round_robin"]'
    return pool_file(folder / "g.toml", *servers, extra=routing, kind="lmworks")  # type: ignore[arg-type]


def test_streams_go_on_when_their_server_is_killed(servers: list[ServeProcess], tmp_path: Path) -> None:
    assert asyncio.run(kill_trial(servers, gateway_file(tmp_path, servers), chunks=12)) >= 2


@pytest.mark.slow
def test_streams_go_on_wherever_their_server_is_killed(
    servers: list[ServeProcess], model: Path, tmp_path: Path
) -> None:
    draw, moved = random.Random(0), 0
    for trial in range(10):
        moved += asyncio.run(kill_trial(servers, gateway_file(tmp_path, servers), draw.randint(1, 100)))
        servers[0] = start(model, f"again{trial}")
        servers[0].wait_ready()
    assert moved >= 10


# --- servers that cannot be continued, and that die at unusual moments ---------------------------------------


def test_other_servers_end_with_an_error_event(tmp_path: Path) -> None:
    """Text was sent, and its tokens are not known: an error event says so, and nothing is sent twice."""

    async def dies(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        await answering.event(chunk("half "))
        answering.die()

    async def main() -> None:
        async with (
            fake_server(dies) as a,
            fake_server(dies) as b,
            running(pool_file(tmp_path / "g.toml", a, b)) as case,
        ):
            *begun, last = [line async for line in case.lines()]
            assert text_of(begun) == "half "
            assert json.loads(last)["error"]["code"] == "upstream_lost"
            assert len(a.asked) + len(b.asked) == 1

    asyncio.run(main())


def test_text_goes_on_where_a_server_takes_it_as_a_prefix(tmp_path: Path) -> None:
    """One answer under one id, every text once, one usage; the second server is asked for what is left."""

    async def answers(asked: Asked, answering: Answering) -> None:
        first = asked.json["messages"][-1]["role"] == "user"
        own = {"id": "chatcmpl-first" if first else "chatcmpl-second"}
        begin = chunk("", **own)
        begin["choices"][0]["delta"]["role"] = "assistant"
        answering.begin_stream()
        await answering.event(begin)
        if first:
            await answering.event(chunk("one ", **own))
            await answering.event(chunk("two ", **own))
            answering.die()
            return
        assert asked.json["messages"][-1] == {"role": "assistant", "content": "one two "}
        assert asked.json["continue_final_message"] is True and asked.json["max_tokens"] == 7
        await answering.event(chunk("three", finish="stop", **own))
        usage = {"prompt_tokens": 13, "completion_tokens": 1, "total_tokens": 14}
        await answering.event(chunk("", choices=[], usage=usage, **own))
        await answering.end()

    async def main() -> None:
        async with (
            fake_server(answers) as a,
            fake_server(answers) as b,
            running(pool_file(tmp_path / "g.toml", a, b, kind="vllm")) as case,
        ):
            body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 10, **USAGE}
            lines = [line async for line in case.lines(**body)]
            events = [json.loads(line) for line in lines[:-1]]
            assert text_of(lines) == "one two three" and lines[-1] == "[DONE]"
            assert {event["id"] for event in events} == {"chatcmpl-first"}
            assert [event["usage"] for event in events if event.get("usage")] == [
                {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
            ]
            assert sum("role" in one["delta"] for event in events for one in event["choices"]) == 1
            tools = [line async for line in case.lines(**body, tools=[TOOL])]
            assert json.loads(tools[-1])["error"]["code"] == "upstream_lost"

    asyncio.run(main())


def test_a_stream_that_no_other_server_takes_up_is_lost_whatever_that_server_said(tmp_path: Path) -> None:
    """The alert on lost streams counts this code alone."""

    async def dies(asked: Asked, answering: Answering) -> None:
        if asked.json["messages"][-1]["role"] == "assistant":
            await answering.whole({"error": {"message": "out of order"}}, 500)
            return
        answering.begin_stream()
        await answering.event(chunk("half "))
        answering.die()

    async def main() -> None:
        async with (
            fake_server(dies) as a,
            fake_server(dies) as b,
            running(pool_file(tmp_path / "g.toml", a, b, kind="vllm")) as case,
        ):
            body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 10}
            *begun, last = [line async for line in case.lines(**body)]
            assert text_of(begun) == "half " and len(a.asked) == len(b.asked) == 1
            error = json.loads(last)["error"]
            assert error["code"] == "upstream_lost" and "status 500" in error["message"]
            metrics = (await case.http.get("/metrics")).text.splitlines()
            (counted,) = [one for one in metrics if one.startswith("lmworks:gateway_request_failures_total{")]
            assert 'code="upstream_lost"' in counted and counted.endswith(" 1.0")

    asyncio.run(main())


def test_a_stream_goes_on_where_failures_were_noted_when_no_other_server_is_left(tmp_path: Path) -> None:
    """One server is left alone for a while, another is being tried by one request. Both are up."""

    async def answers(asked: Asked, answering: Answering) -> None:
        if asked.json["messages"][-1]["role"] == "user":
            answering.begin_stream()
            await answering.event(chunk("half "))
            answering.die()
        else:
            await say(asked, answering, "whole")

    async def main() -> None:
        async with (
            fake_server(answers) as a,
            fake_server(answers) as b,
            fake_server(answers) as c,
            running(pool_file(tmp_path / "g.toml", a, b, c, kind="vllm")) as case,
        ):
            first, tried, alone = case.gateway.servers
            tried.breaker.opened, tried.breaker.trying = 1, True
            alone.breaker.opened, alone.breaker.until = 1, math.inf
            lines = [line async for line in case.lines(messages=[{"role": "user", "content": "count"}])]
            assert text_of(lines) == "half whole" and lines[-1] == "[DONE]"
            assert first.breaker.failures == 1

    asyncio.run(main())


def test_an_event_that_its_server_did_not_finish_is_not_sent(tmp_path: Path) -> None:
    async def journaled(answering: Answering, tokens: str, text: str, cut: int | None = None) -> None:
        await answering.send(f": tokens {tokens}\ndata: {json.dumps(chunk(text))}\n\n".encode()[:cut])

    async def dies(asked: Asked, answering: Answering) -> None:
        assert asked.json["continuation"] == {}
        answering.begin_stream()
        await journaled(answering, "0 5 6", "one ")
        await journaled(answering, "0 7", "two ", cut=-20)
        answering.die()

    async def goes_on(asked: Asked, answering: Answering) -> None:
        if asked.json["continuation"] == {}:
            await dies(asked, answering)
            return
        assert asked.json["continuation"] == {"id": "chatcmpl-1", "created": 1, "answers": [[5, 6]]}
        answering.begin_stream()
        await journaled(answering, "0 7", "two ")
        await journaled(answering, "0 8", "three")
        await answering.end()

    async def main() -> None:
        async with (
            fake_server(goes_on) as a,
            fake_server(goes_on) as b,
            running(pool_file(tmp_path / "g.toml", a, b, kind="lmworks")) as case,
        ):
            lines = [line async for line in case.lines()]
            assert text_of(lines) == "one two three" and lines[-1] == "[DONE]"
            assert len(a.asked) == len(b.asked) == 1

    asyncio.run(main())


def test_a_server_that_dies_before_its_first_event_is_replaced_unnoticed(tmp_path: Path) -> None:
    async def dies(asked: Asked, answering: Answering) -> None:
        answering.die()

    async def works(asked: Asked, answering: Answering) -> None:
        await say(asked, answering, "Hel", "lo")

    async def main() -> None:
        routing = '[routing]\npolicy = ["round_robin"]'
        async with (
            fake_server(dies) as a,
            fake_server(works) as b,
            running(pool_file(tmp_path / "g.toml", a, b, extra=routing)) as case,
        ):
            for _ in range(4):
                assert text_of(await case.events()) == "Hello"
                assert (await case.ask()).json()["choices"][0]["message"]["content"] == "Hello"
            assert len(a.asked) >= 4 and len(b.asked) == 8

    asyncio.run(main())
