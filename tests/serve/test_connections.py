"""Connections: each state of one has a deadline, and there are only so many, in all and from one address."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from api_server import MODEL, Api, House, until

from lmworks.serve import body, connection, server
from lmworks.serve.connection import client_address

COMPLETIONS = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def connect(api: Api, address: str = "") -> socket.socket:
    return socket.create_connection(("127.0.0.1", api.port), 30, (address, 0) if address else None)


def received(one: socket.socket) -> bytes:
    """Until the server ends the connection, in whatever way; a test that waits for ever fails."""
    found = b""
    try:
        while part := one.recv(65536):
            found += part
    except ConnectionError:
        pass
    return found


def answer(found: bytes) -> tuple[int, dict[str, str]]:
    head, _, content = found.partition(b"\r\n\r\n")
    error: dict[str, str] = json.loads(content)["error"]
    return int(head.split(b" ")[1]), error


def empty(api: Api) -> bool:
    return not api.server.server_state.connections


@pytest.fixture
def hasty(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """A server in which nothing may take long."""
    for name in ("HEADER_SECONDS", "LINGER_SECONDS", "WRITE_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(connection, name, 0.4)
    for module in (connection, body):
        monkeypatch.setattr(module, "BODY_SECONDS", 0.4)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    yield house.open()


@pytest.mark.parametrize("path", [b"/no/such/path", b"/health", b"/v1/models"])
def test_unread_body_closes_connection(hasty: Api, path: bytes) -> None:
    """Neither with silence nor with a byte now and then: the answer says that the connection ends, and it does."""
    for drip in (b"", b"x"):
        with connect(hasty) as one:
            one.sendall(b"POST " + path + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\nx")
            head = one.recv(65536).lower()
            assert head.startswith(b"http/1.1 40") and b"connection: close" in head
            one.sendall(drip)
            until(lambda: empty(hasty))


def test_body_timeout(hasty: Api) -> None:
    with connect(hasty) as one:
        one.sendall(COMPLETIONS + b'content-length: 99\r\n\r\n{"')
        assert answer(received(one))[1]["code"] == "body_timeout"
    until(lambda: empty(hasty))


def test_idle_timeout(hasty: Api) -> None:
    """Empty lines before a request are allowed, and are no request."""
    with connect(hasty) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert one.recv(65536).startswith(b"HTTP/1.1 200")
        until(lambda: closed_or_sent(one, b"\r\n"))
        assert received(one) == b""
    until(lambda: empty(hasty))


def closed_or_sent(one: socket.socket, data: bytes) -> bool:
    """Whether the other side is gone; if not, it gets more."""
    one.settimeout(0.1)
    try:
        one.sendall(data)
        return one.recv(65536) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("times", [1, 200])
def test_unread_answer_is_dropped(hasty: Api, times: int) -> None:
    """One of a megabyte, and a pipeline of small ones."""
    content = json.dumps({"model": MODEL, "prompt": "x" * 2**20}).encode()
    asked = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", hasty.port))
        one.sendall(asked if times == 1 else b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * times)
        until(lambda: hasty.server.server_state.connections)
        until(lambda: empty(hasty))
    until(lambda: not hasty.server.server_state.tasks)


def test_connection_limit(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.2)
    path = tmp_path / "narrow.toml"
    path.write_text("[limits]\nconnections = 5\nconnections_per_address = 3\n")
    api = house.open(path)
    with ExitStack() as stack:
        mine = [stack.enter_context(connect(api, "127.0.0.1")) for _ in range(3)]
        until(lambda: len(api.server.server_state.connections) == 3)
        status, error = answer(received(stack.enter_context(connect(api, "127.0.0.1"))))
        assert (status, error["code"]) == (503, "too_many_connections") and "your address has 3" in error["message"]
        until(lambda: len(api.server.server_state.connections) == 3)
        for _ in range(2):
            stack.enter_context(connect(api, "127.0.0.2"))
        until(lambda: len(api.server.server_state.connections) == 5)
        assert "the server has 5" in answer(received(stack.enter_context(connect(api, "127.0.0.3"))))[1]["message"]
        for one in mine:
            one.close()
        until(lambda: len(api.server.server_state.connections) == 2)
        assert api.http.get("/health").status_code == 200
        api.http.close()


def test_ipv6_address_counts_as_its_64() -> None:
    assert (
        client_address(("2001:db8::1", 1))
        == client_address(("2001:db8::ffff:2", 1))
        != client_address(("2001:db8:0:1::1", 1))
    )
    assert (
        client_address(("::ffff:192.0.2.1", 1)) == client_address(("192.0.2.1", 1)) != client_address(("192.0.2.2", 1))
    )


def test_content_length_with_chunks_is_rejected(api: Api) -> None:
    """RFC 9112, 6.1: what one server takes for the body may be another request to the next."""
    smuggled = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    framing = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    with connect(api) as one:
        one.sendall(COMPLETIONS + framing + smuggled)
        found = received(one)
    assert answer(found)[0] == 400 and found.count(b"HTTP/1.1") == 1 and b"connection: close" in found.lower()


def test_too_many_chunks(api: Api) -> None:
    with connect(api) as one:
        one.sendall(COMPLETIONS + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 10_000)
        assert answer(received(one))[1]["code"] == "body_too_large"
    body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 2}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with connect(api) as one:
        one.sendall(COMPLETIONS + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        assert received(one).startswith(b"HTTP/1.1 200 OK")
