"""The gateway's edge: what is ambiguous, too large or too deep is refused there, and servers see nothing of clients."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway_case import Answering, Asked, Running, fake_server, pool_file, running, say
from lmworks.gateway.gateway import Gateway, GatewaySettings
from lmworks.serve.server import bind_socket
from smuggling import AMBIGUOUS, BODY, CLEAR, HEAD, LINES, SMUGGLED, statuses

CHATS = "/v1/chat/completions"
HEADS = HEAD % CHATS.encode()


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hello")


async def exchange(case: Running, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(case.http.base_url.host, case.http.base_url.port)
    writer.write(sent)
    found = b""
    try:
        async with asyncio.timeout(5):
            while part := await reader.read(65536):
                found += part
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return found


def test_ambiguous_requests_reach_no_server(tmp_path: Path) -> None:
    """One gateway for all cases: each is refused, alone, and its connection ends."""
    wrong: dict[str, list[int]] = {}

    async def main() -> None:
        async with (
            fake_server(hello, models=("m", "tiny")) as server,
            running(pool_file(tmp_path / "g.toml", server)) as case,
        ):
            cases = {name: HEADS + rest for name, rest in AMBIGUOUS.items()}
            cases |= {name: line + b"\r\nhost: x\r\n\r\n" for name, line in LINES.items()}
            del cases["two blanks"]  # read as one
            cases["no host"] = b"GET /health HTTP/1.1\r\n\r\n"
            for name, sent in cases.items():
                found = statuses(await exchange(case, sent + SMUGGLED))
                if len(found) != 1 or found[0] not in (400, 404, 413, 431, 505):
                    wrong[name] = found
            assert not server.asked

    asyncio.run(main())
    assert not wrong, wrong


def test_clear_requests_are_sent_on_with_one_length(tmp_path: Path) -> None:
    """Whatever framing a client chose, chunk extensions and trailers do not go further."""

    async def main() -> None:
        async with (
            fake_server(hello, models=("m", "tiny")) as server,
            running(pool_file(tmp_path / "g.toml", server)) as case,
        ):
            for name, rest in CLEAR.items():
                assert statuses(await exchange(case, HEADS + b"connection: close\r\n" + rest)) == [200], name
            assert [one.body for one in server.asked] == [BODY] * len(CLEAR)
            for one in server.asked:
                assert "transfer-encoding" not in one.headers and one.headers["content-length"] == str(len(BODY))
                assert "authorization" not in one.headers

    asyncio.run(main())


HOSTILE = {
    "authorization": "Bearer of-the-client",
    "x-api-key": "of-the-client",
    "cookie": "session=1",
    "x-forwarded-for": "203.0.113.9",
    "x-forwarded-host": "elsewhere",
    "x-real-ip": "203.0.113.9",
    "forwarded": "for=203.0.113.9",
    "connection": "close, x-lmworks-tenant",
    "keep-alive": "timeout=1000",
    "proxy-authorization": "Basic eDp5",
    "te": "trailers",
    "trailer": "authorization",
    "x-lmworks-tenant": "another",
    "x-lmworks-continuation": "1",
    "x-original-url": "/admin",
    "x-rewrite-url": "/admin",
    "x-http-method-override": "DELETE",
    "content-encoding": "gzip",
}


def test_headers_of_clients_stay_with_the_gateway(tmp_path: Path) -> None:
    """A list of what passes, not of what does not: a header that nobody thought of stays, too."""

    async def main() -> None:
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            for name, value in {**HOSTILE, "x-nobody-thought-of": "1"}.items():
                lines = f"{name}: {value}\r\nconnection: close\r\ncontent-length: {len(BODY)}\r\n\r\n".encode()
                assert statuses(await exchange(case, HEADS + lines + BODY.replace(b"tiny", b"m   "))) in ([404], [200])
            answer = await case.http.post(CHATS, json={"model": "m", "messages": []}, headers=HOSTILE)
            assert answer.status_code == 200
            allowed = {"host", "content-type", "content-length", "x-request-id", "accept"}
            for one in server.asked:
                assert set(one.headers) <= allowed, set(one.headers) - allowed

    asyncio.run(main())


def test_headers_of_servers_stay_with_the_gateway(tmp_path: Path) -> None:
    """A server's cookies, names of software, and hop-by-hop headers are not the gateway's."""

    async def talks(asked: Asked, answering: Answering) -> None:
        await answering.whole({"a": 1}, 200, "set-cookie: a=b", "server: x/1", "x-internal: 1", "keep-alive: max=9")

    async def main() -> None:
        async with fake_server(talks) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            answer = await case.ask()
            assert set(answer.headers) == {"content-type", "content-length", "x-request-id"}

    asyncio.run(main())


def deep(levels: int) -> dict[str, Any]:
    return {"model": "m", "messages": [], "metadata": json.loads("[" * levels + "]" * levels)}


def test_deep_and_crowded_bodies_reach_no_server(tmp_path: Path) -> None:
    """Parsers of servers recurse, and count: one such body took down whole engines."""
    limits = "[listen]\ndepth = 64\nvalues = 4096\nheader_bytes = 4096"

    async def main() -> None:
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server, extra=limits)) as case:
            assert (await case.http.post(CHATS, json=deep(60))).status_code == 200
            for body in (deep(70), {"model": "m", "messages": [{}] * 5000}):
                answer = await case.http.post(CHATS, json=body)
                assert answer.status_code == 400 and answer.json()["error"]["code"] == "limit_exceeded"
            text = b'{"model": "m", "messages": ' + b"[" * 1_000_000
            answer = await case.http.post(CHATS, content=text)
            assert answer.status_code == 400
            for headers in ({f"x{i}": "1" for i in range(300)}, {"x": "y" * 5000}):
                answer = await case.http.post(CHATS, json={"model": "m"}, headers=headers)
                assert answer.status_code == 431, "too many, or too long"
            same = HEADS + b"x: 1\r\n" * 300 + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
            assert statuses(await exchange(case, same)) == [431], "many of one name are many"
            assert len(server.asked) == 1

    asyncio.run(main())


PATHS = [
    "//v1/models", "/v1//models", "/V1/models", "/v1/models/", "/v1/models.", "/v1%2fmodels", "/%76%31/models",
    "/v1/./models", "/v1/x/../models", "/v1/models;x", "/v1\\models", "/v1/models%00", "/v1/models%20", "/./v1/models",
    "/health/../v1/models", "/health%2f..%2fv1/models", "http://x/v1/models", "*", "/gateway//servers",
    "/GATEWAY/servers",
]  # fmt: skip


@pytest.mark.parametrize("method", [b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"TRACE", b"CONNECT"])
def test_paths_are_what_they_say(tmp_path: Path, method: bytes) -> None:
    """Routes are compared as bytes: nothing is decoded or normalised, so no other spelling of a path is a route."""

    async def main() -> None:
        async with fake_server(hello) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            for path in PATHS:
                rest = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
                found = statuses(await exchange(case, method + b" " + path.encode() + rest))
                assert found in ([404], [400], [405]), (path, found)
            assert not server.asked

    asyncio.run(main())


def test_no_field_of_a_body_chooses_where_a_request_goes(tmp_path: Path) -> None:
    """LiteLLM's class: `api_base` in a body sent the proxy's key to whoever asked for it."""
    calls: list[Asked] = []

    async def caught(asked: Asked, answering: Answering) -> None:
        calls.append(asked)
        await answering.whole({})

    async def main() -> None:
        async with (
            fake_server(hello) as server,
            fake_server(caught) as thief,
            running(pool_file(tmp_path / "g.toml", server)) as case,
        ):
            for name in ("api_base", "base_url", "api_key", "custom_llm_provider", "url", "endpoint", "proxy"):
                assert (await case.ask(**{name: thief.url})).status_code == 200
            for headers in ({"host": thief.url[7:-3]}, {"x-forwarded-host": thief.url[7:-3]}):
                body = {"model": "m", "messages": []}
                assert (await case.http.post(CHATS, json=body, headers=headers)).status_code == 200
            assert not calls and len(server.asked) == 9

    asyncio.run(main())


def test_numbers_of_a_body_reserve_nothing_in_the_gateway(tmp_path: Path) -> None:
    """A stream that is to be continued has a list for each of its answers: not for as many as a client says."""

    async def dies(asked: Asked, answering: Answering) -> None:
        answering.begin_stream()
        await answering.send(b": tokens 0 5\n" + b'data: {"id": "x", "created": 1, "choices": [{"index": 0}]}\n\n')
        answering.die()

    async def main() -> None:
        async with (
            fake_server(dies) as one,
            fake_server(dies) as other,
            running(pool_file(tmp_path / "g.toml", one, other, kind="lmworks")) as case,
        ):
            events = await case.events(n=10**12)
            assert "upstream_lost" in events[-1]
            assert len(one.asked) + len(other.asked) == 1, "not continued"

    asyncio.run(main())


def test_a_gateway_may_open_two_files_for_each_connection(tmp_path: Path) -> None:
    """A request has one to its client and one to its server; many shells allow 1,024 in all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> int:
        file = tmp_path / "g.toml"
        file.write_text('[listen]\nconnections = 900\n[[pools]]\nname = "p"\nurls = ["http://127.0.0.1:9/v1"]')
        started = asyncio.Event()
        with bind_socket("127.0.0.1", 0) as listening:
            running = asyncio.create_task(Gateway(GatewaySettings(file)).run([listening], started.set))
            await started.wait()
            found = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            os.kill(os.getpid(), signal.SIGINT)
            await running
        return found

    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        assert asyncio.run(main()) >= 1800
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
