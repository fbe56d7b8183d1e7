"""A fake OpenAI-compatible server with configurable latency and errors, for tests of the load generator."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Handler = Callable[["Talk"], Awaitable[None]]


@dataclass
class Talk:
    """One request, and the way back."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    number: int
    arrived: float = field(default_factory=time.perf_counter)

    async def head(self, status: str = "200 OK", kind: str = "text/event-stream", more: str = "") -> None:
        lines = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{more}transfer-encoding: chunked\r\n\r\n"
        self.writer.write(lines.encode())

    async def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, event: Any) -> None:
        await self.chunk(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")

    async def token(self, text: str = "x", finish: str | None = None) -> None:
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})

    async def end(self, completion: int, prompt: int = 0, cached: int = 0) -> None:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        await self.event({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}})
        await self.event(b"[DONE]")
        await self.chunk(b"")

    async def delta(self, text: str, finish: str | None = None) -> None:
        await self.event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})

    async def document(self, status: str, document: Any, more: str = "") -> None:
        await self.head(status, "application/json", more)
        await self.chunk(json.dumps(document).encode())
        await self.chunk(b"")


def models(*names: str, context: int | None = None) -> bytes:
    found = [{"id": name, "object": "model", "max_model_len": context} for name in names]
    return json.dumps({"object": "list", "data": found}).encode()


class FakeServer:
    """`with FakeServer(handler) as server:` — its handler gets every POST; `pages` are what a GET finds."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.pages: dict[str, tuple[dict[str, str], bytes]] = {
            "/v1/models": ({"content-type": "application/json"}, models("fake"))
        }
        self.talks: list[Talk] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> FakeServer:
        self.thread.start()
        began = asyncio.run_coroutine_threadsafe(asyncio.start_server(self.serve, "127.0.0.1", 0), self.loop)
        self.server = began.result(10)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return  # somebody who only knocked
        (method, path, _), *lines = (line.split(" ", 2) for line in head.strip().split("\r\n"))
        headers = {name.rstrip(":").lower(): " ".join(rest) for name, *rest in lines}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        talk = Talk(path, headers, body, writer, len(self.talks))
        if method == "GET":
            more, found = self.pages[path]
            lines = "".join(f"{name}: {value}\r\n" for name, value in more.items())
            writer.write(f"HTTP/1.1 200 OK\r\n{lines}content-length: {len(found)}\r\n\r\n".encode() + found)
            await writer.drain()
        else:
            self.talks.append(talk)
            await self.handler(talk)
        writer.close()
