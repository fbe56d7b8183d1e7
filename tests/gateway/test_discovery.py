"""Servers found by DNS, and by a server that speaks Kubernetes' watch protocol."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gateway_case import Answering, Asked, fake_server, read_request, running, say
from lmworks.gateway.discovery.dns import DNS
from lmworks.gateway.discovery.kubernetes import HTTPEndpointAPI, Kubernetes
from lmworks.gateway.http_client import ConnectionPool


def slice_of(name: str, version: int, *addresses: str, ready: bool | None = True) -> dict[str, Any]:
    endpoints = [{"addresses": [address], "conditions": {"ready": ready}} for address in addresses]
    ports = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}]
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "endpoints": endpoints, "ports": ports}


class FakeAPI:
    """Lists `slices`; a watch sends what is put into `events`. None ends it, as the API server does after a while."""

    def __init__(self, *slices: dict[str, Any]) -> None:
        self.slices, self.version = list(slices), 10
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.lists = 0
        self.watched: list[str] = []  # versions that were watched from

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (asked := await read_request(reader)) is not None:
            assert asked.headers["authorization"] == "Bearer token-of-the-pod"
            parts, answering = urlsplit(asked.path), Answering(writer)
            assert parts.path == "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
            query = parse_qs(parts.query)
            assert query["labelSelector"] == ["kubernetes.io/service-name=llm"]
            if "watch" not in query:
                self.lists += 1
                await answering.whole({"metadata": {"resourceVersion": str(self.version)}, "items": self.slices})
                continue
            self.watched += query["resourceVersion"]
            answering.head(200, "application/json", "transfer-encoding: chunked")
            while (event := await self.events.get()) is not None:
                data = json.dumps(event).encode() + b"\n"
                await answering.send(data[:20])  # an event may come in pieces
                await answering.send(data[20:])
            await answering.end(done=False)


def test_endpoints_of_a_kubernetes_service(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("token-of-the-pod\n")

    async def main() -> None:
        api = FakeAPI(slice_of("a", 3, "10.0.0.1", "10.0.0.2"), slice_of("b", 4, "10.0.1.1", ready=False))
        server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
        pool = ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        seen = Kubernetes(HTTPEndpointAPI(pool, "prod", "llm", token), "prod/llm", "http").watch()

        async def after(*events: dict[str, Any] | None) -> list[str]:
            for event in events:
                api.events.put_nowait(event)
            return await asyncio.wait_for(anext(seen), 5)

        one, two, three, four = (f"http://10.0.{place}:8000/v1" for place in ("0.1", "0.2", "1.1", "2.1"))
        assert await after() == [one, two]
        assert await after({"type": "MODIFIED", "object": slice_of("b", 11, "10.0.1.1", ready=None)}) == [
            one,
            two,
            three,
        ]
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "15"}}}
        assert await after(bookmark, {"type": "DELETED", "object": slice_of("a", 16)}) == [three]
        # The watch ends by itself: the next one goes on from the last version.
        assert await after(None, {"type": "ADDED", "object": slice_of("c", 17, "10.0.2.1")}) == [three, four]
        assert api.watched == ["10", "16"] and api.lists == 1
        # The version is forgotten: listed anew.
        api.slices, api.version = [slice_of("c", 30, "10.0.2.1")], 30
        assert await after({"type": "ERROR", "object": {"code": 410, "message": "too old"}}) == [four]
        assert api.lists == 2
        pool.close()
        server.close()

    asyncio.run(main())


def test_addresses_of_a_name() -> None:
    assert asyncio.run(DNS("127.0.0.1:8000").resolve()) == ["http://127.0.0.1:8000/v1"]
    assert asyncio.run(DNS("::1:8000").resolve()) == ["http://[::1]:8000/v1"]


def test_servers_of_a_name_are_used(tmp_path: Path) -> None:
    async def hello(asked: Asked, answering: Answering) -> None:
        await say(asked, answering, "hello")

    async def main() -> None:
        async with fake_server(hello) as server:
            port = urlsplit(server.url).port
            file = tmp_path / "g.toml"
            file.write_text(f'[[pools]]\nname = "found"\nkind = "openai"\ndns = "127.0.0.1:{port}"\n')
            async with running(file, wait=False) as case:
                await case.until(lambda: any(one.up for one in case.gateway.servers))
                assert (await case.ask()).status_code == 200

    asyncio.run(main())
