"""Faults at unusual moments, of servers and of clients: what each would break if it were not noticed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from gateway_case import Answering, Asked, Running, chunk, fake_server, pool_file, running, say, text_of


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hel", "lo")


def journaled(tokens: str, content: dict[str, Any]) -> bytes:
    return f": tokens {tokens}\ndata: {json.dumps(content)}\n\n".encode()


async def raw(case: Running, sent: bytes) -> bytes:
    """What a client gets that sends these bytes and waits for the connection's end."""
    reader, writer = await asyncio.open_connection(case.http.base_url.host, case.http.base_url.port)
    writer.write(sent)
    async with asyncio.timeout(10):
        found = await reader.read(-1)
    writer.close()
    return found


def post(body: dict[str, Any], *headers: str, path: str = "/v1/chat/completions") -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + content


# --- servers ---------------------------------------------------------------------------------------------


def test_half_a_first_event_is_not_put_before_another_servers(tmp_path: Path) -> None:
    first = True

    async def half(asked: Asked, answering: Answering) -> None:
        nonlocal first
        if not first:
            await hello(asked, answering)
            return
        first = False
        answering.begin_stream()
        await answering.send(b'data: {"choices": [{"index": 0, "del')
        await asyncio.sleep(0.05)
        answering.die()

    async def main() -> None:
        async with (
            fake_server(half) as a,
            fake_server(half) as b,
            running(pool_file(tmp_path / "g.toml", a, b)) as case,
        ):
            assert text_of(await case.events()) == "Hello"
            assert len(a.asked) == len(b.asked) == 1

    asyncio.run(main())


def test_text_that_came_with_an_error_is_sent_and_then_continued(tmp_path: Path) -> None:
    """Its tokens are in the journal, so the next server does not say it again."""
    error = b'data: {"error": {"message": "the engine ended", "type": "server_error", "code": "engine_lost"}}\n\n'

    async def serve(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        if asked.json["continuation"] == {}:
            await answering.send(journaled("0 5", chunk("one ")) + journaled("0 6", chunk("two ")) + error)
            return
        assert asked.json["continuation"]["answers"] == [[5, 6]]
        await answering.send(journaled("0 7", chunk("three")))
        await answering.end()

    async def main() -> None:
        async with (
            fake_server(serve) as a,
            fake_server(serve) as b,
            running(pool_file(tmp_path / "g.toml", a, b, kind="lmworks")) as case,
        ):
            events = await case.events()
            assert text_of(events) == "one two three" and events[-1] == "[DONE]"
            assert len(a.asked) == len(b.asked) == 1

    asyncio.run(main())


def test_usage_and_end_are_sent_once_wherever_the_server_dies(tmp_path: Path) -> None:
    """After the last event nobody is asked again; after the usage, another server says only the end."""
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    with_end = True

    async def serve(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        continued = bool(asked.json["continuation"])
        if not continued:
            await answering.send(journaled("0 5", chunk("all", finish="stop")))
        await answering.event(chunk("", choices=[], usage=usage))
        if continued or with_end:
            await answering.send(b"data: [DONE]\n\n")
        await asyncio.sleep(0.05)
        answering.die()

    async def main() -> None:
        nonlocal with_end
        async with (
            fake_server(serve) as a,
            fake_server(serve) as b,
            running(pool_file(tmp_path / "g.toml", a, b, kind="lmworks")) as case,
        ):
            for ends, asked in ((True, 1), (False, 3)):
                with_end = ends
                events = await case.events(stream_options={"include_usage": True})
                assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
                assert sum('"usage"' in event for event in events) == 1
                assert len(a.asked) + len(b.asked) == asked

    asyncio.run(main())


def test_an_answer_too_many_is_nobodys(tmp_path: Path) -> None:
    """A server that answers once more than it was asked must not answer the next client with it."""

    async def twice(asked: Asked, answering: Answering) -> None:
        body = json.dumps({"for": asked.json["user"]}).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        answering.writer.write((head + body) * 2)
        await answering.writer.drain()

    async def main() -> None:
        async with fake_server(twice) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            for user in "abc":
                assert (await case.ask(user=user)).json() == {"for": user}
            assert not next(iter(case.gateway.servers)).open

    asyncio.run(main())


def test_streams_of_messages_keep_every_event_and_their_usage_counts(tmp_path: Path) -> None:
    """Anthropic's last event but one has the usage, and why the answer ended."""
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 7, "output_tokens": 1}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]

    async def messages(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        for event in events:
            await answering.send(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        await answering.end(done=False)

    async def main() -> None:
        async with fake_server(messages) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            answer = await case.http.post("/v1/messages?beta=true", json={"model": "m", "stream": True})
            data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
            assert [json.loads(one) for one in data] == events
            assert server.asked[0].path == "/v1/messages" and "stream_options" not in server.asked[0].json
            metrics = (await case.http.get("/metrics")).text
            assert 'lmworks:gateway_prompt_tokens_total{model_name="m",tenant="anyone",tier="default"} 7.0' in metrics
            assert (
                'lmworks:gateway_generation_tokens_total{model_name="m",tenant="anyone",tier="default"} 5.0' in metrics
            )

    asyncio.run(main())


# --- clients ---------------------------------------------------------------------------------------------


def test_a_connection_whose_client_read_too_slowly_is_used_again(tmp_path: Path) -> None:
    """The pause at the client's side ends with its answer: the next request on that connection is read."""

    async def long(asked: Asked, answering: Answering) -> None:
        await say(asked, answering, *(["x" * 50_000] * 400 if asked.json.get("user") == "slow" else ["short"]))

    async def main() -> None:
        async with fake_server(long) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            url = case.http.base_url
            reader, writer = await asyncio.open_connection(url.host, url.port, limit=2**14)
            body = {"model": "m", "messages": [], "stream": True, "user": "slow"}
            writer.write(post(body, "connection: close"))
            connection = None
            while connection is None:
                await asyncio.sleep(0.01)
                connection = next((one for one in case.gateway.connections if one.paused), None)
            size = 0
            while part := await reader.read(2**16):
                size += len(part)
            assert size > 400 * 50_000
            async with asyncio.timeout(5):
                assert (await case.ask()).status_code == 200
            writer.close()

    asyncio.run(main())


def test_requests_that_two_parsers_might_read_differently_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            body = {"model": "m", "messages": []}
            for header in ("transfer-encoding: chunked", "content-length: 3", "x\u00a0y: z", "a: b\rc: d", "a: b\x00"):
                assert (await raw(case, post(body, header))).startswith(b"HTTP/1.1 400 "), header
            assert not server.asked

    asyncio.run(main())


def test_a_second_request_in_one_packet_does_not_cost_the_first_its_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            found = await raw(case, post({"model": "m", "messages": []}) * 2)
            assert found.count(b"HTTP/1.1 200 OK") == 1 and b"connection: close" in found and b"Hello" in found
            assert len(server.asked) == 1

    asyncio.run(main())


def test_queries_and_paths_of_other_versions(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            for path in ("/v2/rerank", "/v1/rerank?key=of-the-client"):
                assert (await case.http.post(path, json={"model": "m"})).status_code == 200
            assert [one.path for one in server.asked] == ["/v2/rerank", "/v1/rerank"]

    asyncio.run(main())


def test_a_continuation_is_not_taken_from_clients(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            fake_server(hello) as server,
            running(pool_file(tmp_path / "g.toml", server, kind="lmworks")) as case,
        ):
            for stream in (True, False):
                answer = await case.ask(stream=stream, continuation={"answers": [[1, 2]]})
                assert answer.status_code == 400 and answer.json()["error"]["param"] == "continuation"
            assert not server.asked
            await case.events(continuation={})  # what a gateway in front of this one says
            assert len(server.asked) == 1

    asyncio.run(main())


def test_connections_beyond_the_limit_are_told_so(tmp_path: Path) -> None:
    async def main() -> None:
        limit = "[listen]\nconnections = 1"
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server, extra=limit)) as case:
            assert (await case.http.get("/health")).status_code == 200  # kept alive
            assert (await raw(case, b"")).startswith(b"HTTP/1.1 503 ")
            assert (await case.http.get("/health")).status_code == 200

    asyncio.run(main())


def test_a_key_file_that_is_gone_fails_probes_until_it_is_back(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("of-the-pool\n")

    async def main() -> None:
        async with fake_server(hello) as server:
            file = pool_file(tmp_path / "g.toml", server, pool=f'key_file = "{key}"')
            async with running(file) as case:
                (only,) = case.gateway.servers
                key.unlink()
                assert (await case.ask()).status_code in (502, 503)
                await case.until(lambda: not only.up)
                assert "key_file" in str(only.last_error) and "No such file" in str(only.last_error)
                key.write_text("another\n")
                await case.until(lambda: only.up)
                assert (await case.ask()).status_code == 200
            assert server.asked[-1].headers["authorization"] == "Bearer another"

    asyncio.run(main())
