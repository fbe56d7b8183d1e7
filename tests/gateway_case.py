"""A gateway in this process, in front of servers that answer as a test says: on sockets, in HTTP written by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lmworks.gateway.gateway import Gateway, GatewaySettings
from lmworks.gateway.http_server import ClientConnection
from lmworks.observability.tracing import Tracing


@dataclass
class Asked:
    """A request as a server sees it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answering:
    """The server's side of one request."""

    writer: asyncio.StreamWriter

    def head(self, status: int, kind: str, *more: str) -> None:
        lines = [f"HTTP/1.1 {status} Some Reason", f"content-type: {kind}", *more]
        self.writer.write("\r\n".join([*lines, "", ""]).encode())

    async def whole(self, content: Any, status: int = 200, *headers: str) -> None:
        body = json.dumps(content).encode()
        self.head(status, "application/json", f"content-length: {len(body)}", *headers)
        self.writer.write(body)
        await self.writer.drain()

    def begin_stream(self) -> None:
        self.head(200, "text/event-stream", "transfer-encoding: chunked")

    async def send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, content: Any) -> None:
        await self.send(f"data: {json.dumps(content)}\n\n".encode())

    async def end(self, done: bool = True) -> None:
        if done:
            await self.send(b"data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def die(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Asked, Answering], Awaitable[None]]


def chunk(text: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": more.pop("finish", None)}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    } | more


async def say(asked: Asked, answering: Answering, *words: str, gap: float = 0.0) -> None:
    """A whole good answer of these words, streamed where that is wanted."""
    usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}
    if not asked.json.get("stream"):
        message = {"role": "assistant", "content": "".join(words)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        await answering.whole(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        )
        return
    answering.begin_stream()
    for word in words:
        await answering.event(chunk(word))
        await asyncio.sleep(gap)
    if (asked.json.get("stream_options") or {}).get("include_usage"):
        await answering.event(chunk("", choices=[], usage=usage))
    await answering.end()


@dataclass
class FakeServer:
    """Answers probes by itself, and requests for models as `behave` says."""

    behave: Behaviour
    models: tuple[str, ...] = ("m",)
    metrics: str = ""
    tell_cache: Callable[[Answering], Awaitable[None]] | None = None  # answers GET /cache_events
    transfers: dict[str, Any] = field(default_factory=dict)  # answers GET /kv_transfer
    asked: list[Asked] = field(default_factory=list)
    left: int = 0  # clients that closed their connection before they had their answer
    healthy: bool = True
    url: str = ""
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            while (asked := await read_request(reader)) is not None:
                answering = Answering(writer)
                if asked.method == "GET":
                    await self.probe(asked, answering)
                    continue
                self.asked.append(asked)
                work = asyncio.ensure_future(self.behave(asked, answering))
                gone = asyncio.ensure_future(reader.read(1))
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    self.left += 1
                    work.cancel()
                    await asyncio.gather(work, gone, return_exceptions=True)
                    return
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
        except ConnectionError:
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def probe(self, asked: Asked, answering: Answering) -> None:
        if asked.path == "/metrics":
            answering.head(200, "text/plain", f"content-length: {len(self.metrics)}")
            answering.writer.write(self.metrics.encode())
        elif asked.path == "/cache_events" and self.tell_cache is not None:
            await self.tell_cache(answering)
        elif asked.path == "/cache_events":
            await answering.whole({}, 404)
        elif asked.path == "/kv_transfer":
            await answering.whole(self.transfers)
        elif not self.healthy:
            await answering.whole({}, 503)
        else:
            await answering.whole({"object": "list", "data": [{"id": model} for model in self.models]})

    def die(self) -> None:
        """As a killed process: nobody listens, and every connection is reset."""
        assert self.server is not None
        self.server.close()
        for writer in list(self.writers):
            writer.transport.abort()


async def read_request(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    method, path, _ = first.split(" ")
    return Asked(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


@asynccontextmanager
async def fake_server(behave: Behaviour, **more: Any) -> AsyncGenerator[FakeServer, None]:
    found = FakeServer(behave, **more)
    found.server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{found.server.sockets[0].getsockname()[1]}/v1"
    try:
        yield found
    finally:
        found.die()


@dataclass
class Running:
    gateway: Gateway
    http: httpx.AsyncClient
    file: Path

    async def until(self, condition: Callable[[], Any], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    async def ask(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"model": "m", "messages": [], **body})

    async def events(self, **body: Any) -> list[str]:
        """The data of a stream's events."""
        answer = await self.ask(stream=True, **body)
        return [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]

    async def lines(self, **body: Any) -> AsyncIterator[str]:
        request = {"model": "m", "messages": [], "stream": True, **body}
        async with self.http.stream("POST", "/v1/chat/completions", json=request) as answer:
            async for line in answer.aiter_lines():
                if line:
                    yield line.removeprefix("data: ")


def text_of(events: list[str]) -> str:
    """What a client reads."""
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks if one.get("choices"))


def pool_file(file: Path, *servers: FakeServer, extra: str = "", kind: str = "openai", pool: str = "") -> Path:
    urls = ", ".join(f'"{server.url}"' for server in servers)
    head = f'{extra}\n[health]\ninterval = 0.05\n[[pools]]\nname = "fake"\nkind = "{kind}"\nurls = [{urls}]\n{pool}\n'
    file.write_text(head, encoding="utf-8")
    return file


@asynccontextmanager
async def running(file: Path, wait: bool = True, tracing: Tracing | None = None) -> AsyncGenerator[Running, None]:
    """A gateway of this file, once it knows every server."""
    gateway = Gateway(GatewaySettings(file), tracing)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: ClientConnection(gateway.handle, gateway.edge_limits, gateway.connections), "127.0.0.1", 0
    )
    gateway.apply_config()
    background = [asyncio.create_task(gateway.maintain())]
    if gateway.proxy.tenancy is not None:
        background.append(asyncio.create_task(gateway.proxy.tenancy.run()))
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=address, timeout=20, trust_env=False) as http:
        found = Running(gateway, http, file)
        if wait:
            await found.until(lambda: all(one.good_probes + one.bad_probes for one in gateway.servers))
        try:
            yield found
        finally:
            tasks = [*background, *gateway.probes, *(task for _, tasks in gateway.watched.values() for task in tasks)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            server.close()
            for connection in list(gateway.connections):
                connection.transport.abort()
            if gateway.proxy.tenancy is not None:
                await asyncio.sleep(0)  # requests that were cut off are counted
                await gateway.proxy.tenancy.close()
