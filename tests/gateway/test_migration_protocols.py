"""Streams of Responses and Anthropic's messages whose server is killed: one answer, as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_case import Answering, Asked, fake_server, pool_file, running
from serve_processes import ServeProcess, start_server

LONG = {"type": "string", "minLength": 40, "maxLength": 60, "pattern": "^[a-z ]*$"}
SCHEMA = {"type": "object", "properties": {"a": LONG, "n": {"type": "integer"}}, "required": ["a", "n"]}
SAID = "say something"
RESPONSE = {"input": SAID, "temperature": 0, "max_output_tokens": 200}
MESSAGE = {"messages": [{"role": "user", "content": SAID}], "temperature": 0, "max_tokens": 200}
FUNCTION = {"type": "function", "name": "look", "parameters": SCHEMA}
FORMAT = {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}}

# Path → bodies of streams that are compared; neither API has a seed.
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/responses", RESPONSE),
    ("/responses", {**RESPONSE, "tools": [FUNCTION], "tool_choice": "required"}),
    ("/responses", {**RESPONSE, "text": FORMAT, "instructions": "in JSON"}),
    ("/messages", MESSAGE),
    ("/messages", {**MESSAGE, "tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}),
    ("/messages", {**MESSAGE, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
]
DELTAS = ("delta", "text", "thinking", "partial_json")
ONCE = ("id", "item_id", "call_id", "created_at", "completed_at", "sequence_number")


async def read_stream(http: httpx.AsyncClient, url: str, body: dict[str, Any], seen: list[dict[str, Any]]) -> None:
    async with http.stream("POST", url, json={"model": "tiny", "stream": True, **body}, timeout=120) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            assert not line.startswith(":"), line
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))


def content(events: list[dict[str, Any]]) -> list[Any]:
    """What a client makes of a stream: deltas of one place joined, ids by the order in which they came."""
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == list(range(len(numbers)))
    names: dict[Any, str] = {}

    def plain(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            kept = {name: plain(each, name) for name, each in value.items() if name != "sequence_number"}
            return kept | ({"completed_at": 0} if "completed_at" in kept else {})
        if isinstance(value, list):
            return [plain(each) for each in value]
        return names.setdefault((key == "created_at", value), f"{key} {len(names)}") if key in ONCE else value

    found: list[Any] = []
    for event in events:
        made, delta = plain(event), event.get("delta") or {}
        text = delta if isinstance(delta, str) else next((delta[one] for one in DELTAS if one in delta), None)
        if text is None:
            found.append(made)
            continue
        place = (made["type"], made.get("item_id"), made.get("index"), made.get("output_index"))
        if isinstance(found[-1], list) and found[-1][0] == place:
            found[-1][1] += text
        else:
            found.append([place, text])
    return found


def without_cache(made: list[Any]) -> list[Any]:
    """What a server found in its cache is its own affair; how many tokens there were is not."""
    for event in made:
        usage = isinstance(event, dict) and (event.get("usage") or (event.get("response") or {}).get("usage"))
        if usage and "cache_read_input_tokens" in usage:
            usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        elif usage:
            usage["input_tokens_details"].pop("cached_tokens")
    return made


@pytest.fixture(scope="module", params=[(), ("--reasoning-parser", "deepseek_r1")], ids=["plain", "reasoning"])
def start(model: Path, request: pytest.FixtureRequest) -> Callable[[str], ServeProcess]:
    return lambda name: start_server(model / "tiny", model / "template.jinja", model / f"{name}.log", *request.param)


@pytest.fixture
def servers(start: Callable[[str], ServeProcess]) -> Iterator[list[ServeProcess]]:
    found = [start(name) for name in ("three", "four")]
    try:
        for server in found:
            server.wait_ready()
        yield found
    finally:
        for server in found:
            server.kill()


def gateway_file(folder: Path, servers: list[ServeProcess]) -> Path:
    routing = '[routing]\npolicy = ["round_robin"]'
    return pool_file(folder / "g.toml", *servers, extra=routing, kind="lmworks")  # type: ignore[arg-type]


def moved(metrics: str) -> int:
    found = [line for line in metrics.splitlines() if line.startswith("lmworks:gateway_migrations_total{")]
    return int(float(found[0].split()[-1])) if found else 0


async def kill_trial(servers: list[ServeProcess], file: Path, events: int) -> int:
    """All streams at once, a kill when five of the six have so many events; returns how many streams moved."""
    async with httpx.AsyncClient(trust_env=False) as http:
        undisturbed: list[list[dict[str, Any]]] = [[] for _ in STREAMS]
        for (path, body), seen in zip(STREAMS, undisturbed, strict=True):
            await read_stream(http, servers[1].url + path, body, seen)
        async with running(file) as case:
            found: list[list[dict[str, Any]]] = [[] for _ in STREAMS]
            base = str(case.http.base_url).rstrip("/") + "/v1"
            reading = [
                asyncio.create_task(read_stream(http, base + path, body, seen))
                for (path, body), seen in zip(STREAMS, found, strict=True)
            ]
            await case.until(lambda: sum(len(one) >= events for one in found) >= 5, 60)
            servers[0].kill()
            await asyncio.gather(*reading)
            for expected, seen, (path, body) in zip(undisturbed, found, STREAMS, strict=True):
                assert without_cache(content(seen)) == without_cache(content(expected)), (path, body)
            return moved((await case.http.get("/metrics")).text)


@pytest.mark.slow
def test_streams_go_on_wherever_their_server_is_killed(
    servers: list[ServeProcess], start: Callable[[str], ServeProcess], tmp_path: Path
) -> None:
    draw, total = random.Random(1), 0
    for trial in range(4):
        total += asyncio.run(kill_trial(servers, gateway_file(tmp_path, servers), draw.randint(3, 60)))
        servers[0] = start(f"again{trial}")
        servers[0].wait_ready()
    assert total >= 4


@pytest.mark.slow
def test_the_apis_own_clients_see_one_answer(model: Path, tmp_path: Path) -> None:
    """openai and anthropic assemble events themselves, and are strict about what belongs to what."""
    import anthropic
    import openai

    started = [start_server(model / "tiny", model / "template.jinja", model / f"{one}.log") for one in ("five", "six")]

    async def response(client: Any, began: Callable[[], None] | None = None) -> tuple[str, Any]:
        text = ""
        async with client.responses.stream(model="tiny", **RESPONSE) as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    text += event.delta
                    if began is not None and len(text) > 40:
                        began()
                if event.type == "response.incomplete":  # at max_output_tokens
                    assert event.response.output_text == text
                    return text, event.response.usage
        raise AssertionError("it has no end")

    asked: Any = MESSAGE["messages"]

    async def message(client: Any, began: Callable[[], None] | None = None) -> tuple[str, Any]:
        text = ""
        async with client.messages.stream(
            model="tiny", max_tokens=200, messages=asked, extra_body={"temperature": 0}
        ) as events:
            async for part in events.text_stream:
                text += part
                if began is not None and len(text) > 40:
                    began()
            final = await events.get_final_message()
            assert "".join(block.text for block in final.content) == text
            return text, (final.usage.input_tokens, final.usage.output_tokens)

    async def main() -> None:
        for server in started:
            server.wait_ready()
        direct = started[1].url
        async with running(gateway_file(tmp_path, started)) as case:
            url = str(case.http.base_url).rstrip("/")
            own = {"api_key": "none", "max_retries": 0}
            expected = (
                await response(openai.AsyncOpenAI(base_url=direct, **own)),
                await message(anthropic.AsyncAnthropic(base_url=direct.removesuffix("/v1"), **own)),
            )
            begun = 0

            def began() -> None:
                nonlocal begun
                begun += 1
                if begun == 2:
                    started[0].kill()

            def once() -> Callable[[], None]:
                left = [began]
                return lambda: left.pop()() if left else None

            found = await asyncio.gather(
                response(openai.AsyncOpenAI(base_url=f"{url}/v1", **own), once()),
                message(anthropic.AsyncAnthropic(base_url=url, **own), once()),
            )
            assert [text for text, _ in found] == [text for text, _ in expected]
            assert found[0][1].total_tokens == expected[0][1].total_tokens and found[1][1][1] == expected[1][1][1]
            assert moved((await case.http.get("/metrics")).text) == 1

    try:
        asyncio.run(main())
    finally:
        for server in started:
            server.kill()


def named(kind: str, number: int, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **more})}\n\n".encode()


def test_events_of_one_token_are_passed_on_together_or_not_at_all(tmp_path: Path) -> None:
    """Cut between two of them: neither is sent, the next server says both; tokens without an event count, too."""
    first = {"response": {"id": "resp_1", "created_at": 7}}
    begin = b": prompt 3\n: tokens 0 5 6\n: events 2\n" + named("response.created", 0, **first)
    begin += named("response.output_text.delta", 1, delta="one ") + b": tokens 0 7\n\n"
    group = b": tokens 0 8\n: events 2\n" + named("response.output_text.delta", 2, delta="two ")
    second = named("response.output_text.delta", 3, delta="three")
    usage = {"input_tokens": 3, "output_tokens": 5}
    end = b": tokens 0 9\n: events 1\n" + named("response.completed", 4, response={"id": "resp_1", "usage": usage})

    async def answers(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        if asked.json["continuation"] == {}:
            await answering.send(begin + group)
            await answering.send(second[:-3])
            answering.die()
            return
        sent.append(asked.json["continuation"])
        await answering.send(group + second + end)
        await answering.end(done=False)

    sent: list[dict[str, Any]] = []

    async def main() -> None:
        async with (
            fake_server(answers) as a,
            fake_server(answers) as b,
            running(pool_file(tmp_path / "g.toml", a, b, kind="lmworks")) as case,
        ):
            body = {"model": "m", "input": "x", "stream": True}
            events = (await case.http.post("/v1/responses", json=body)).text
            shown = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
            assert [one["sequence_number"] for one in shown] == [0, 1, 2, 3, 4]
            assert not any(line.startswith(":") for line in events.splitlines())
            assert sent == [{"id": "resp_1", "created": 7, "answers": [[5, 6, 7]], "sequence": 2}]
            text = (await case.http.get("/metrics")).text
            assert 'gateway_generation_tokens_total{model_name="m",tenant="anyone",tier="default"} 5.0' in text
            # Earlier responses are stored at one server: another cannot go on.
            sent.clear()
            answer = await case.http.post("/v1/responses", json={**body, "previous_response_id": "resp_0"})
            assert json.loads(answer.text.splitlines()[-2][6:])["error"]["code"] == "upstream_lost" and not sent

    asyncio.run(main())
