"""What the gateway adds to a stream, and how many requests it passes on, beside LiteLLM's proxy and nginx.

    python -m venv /tmp/litellm && /tmp/litellm/bin/pip install 'litellm[proxy]'      # apt install nginx
    python benchmarks/gateway_cpu.py --litellm /tmp/litellm/bin/litellm --save

A stub streams tokens at 20 a second, each with the time at which it was sent, so a delay is that of one chunk between
two clocks that are one. 200 streams, then 32 clients that ask without streams. "direct" is the stub itself: what the
load generator and the machine take. Processor time is the proxy's process and its children's: it depends less on who
else is busy on the machine than delays do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httptools
import uvloop
from common import write_result

STUB, PORTS = 9301, {"gateway": 9302, "nginx": 9303, "LiteLLM": 9304}
GAP_S = 0.05
STAMP = re.compile(rb'"content":\s?"(\d{10,}) ')
CLOCK = os.sysconf("SC_CLK_TCK")
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "stub",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
}
CHUNK = b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"stub","choices":[{"index":0,"delta":'
MODELS = {"object": "list", "data": [{"id": "stub", "object": "model", "created": 1, "owned_by": "stub"}]}

GATEWAY = f"""
[listen]
port = {PORTS["gateway"]}
[[pools]]
name = "stub"
kind = "openai"
urls = ["http://127.0.0.1:{STUB}/v1"]
"""
NGINX = f"""
worker_processes 1;
daemon off;
pid FOLDER/pid;
error_log FOLDER/error;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  upstream stub {{ server 127.0.0.1:{STUB}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{PORTS["nginx"]};
    location / {{
      proxy_pass http://stub; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
LITELLM = f"""
model_list:
  - model_name: stub
    litellm_params: {{model: openai/stub, api_base: "http://127.0.0.1:{STUB}/v1", api_key: none}}
"""


class Stub(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport, self.parser = transport, httptools.HttpRequestParser(self)
        self.url, self.parts = b"", list[bytes]()
        self.task: asyncio.Task[None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)

    def on_message_complete(self) -> None:
        body, self.parts = b"".join(self.parts), []
        asked = json.loads(body) if body else {}
        if asked.get("stream"):
            self.task = asyncio.ensure_future(self.stream(asked["max_tokens"]))
            return
        found = json.dumps(ANSWER if body else MODELS).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        self.transport.write(head % (len(found), found))

    async def stream(self, tokens: int) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.transport.write(head)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for number in range(1, tokens + 1):
            await asyncio.sleep(begun + number * GAP_S - loop.time())
            self.send(CHUNK + b'{"content":"%d "},"logprobs":null,"finish_reason":null}]}' % time.monotonic_ns())
        self.send(b"[DONE]")
        self.transport.write(b"0\r\n\r\n")

    def send(self, data: bytes) -> None:
        event = b"data: %b\n\n" % data
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))


class Client(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, delays: list[int]) -> None:
        self.delays, self.parser = delays, httptools.HttpResponseParser(self)
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(ConnectionError("lost"))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.delays += [now - int(found[1]) for found in STAMP.finditer(data)]
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() == 200:
            self.answered.set_result(None)
        else:
            self.answered.set_exception(RuntimeError(f"status {self.parser.get_status_code()}"))

    async def ask(self, stream: bool, tokens: int) -> None:
        messages = [{"role": "user", "content": "hello there"}]
        body = json.dumps({"model": "stub", "messages": messages, "stream": stream, "max_tokens": tokens}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-of-this-benchmark\r\n"
        self.answered = asyncio.get_running_loop().create_future()
        self.transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await self.answered


async def load(port: int, pid: int, streams: int, tokens: int, seconds: float) -> dict[str, Any]:
    loop, delays = asyncio.get_running_loop(), list[int]()

    async def connect() -> Client:
        return (await loop.create_connection(lambda: Client(delays), "127.0.0.1", port))[1]

    async def stream(client: Client, delay: float) -> None:
        await asyncio.sleep(delay)
        await client.ask(True, tokens)

    clients, before = [await connect() for _ in range(streams)], processor_seconds(pid)
    ended = await asyncio.gather(
        *(stream(client, number / streams) for number, client in enumerate(clients)), return_exceptions=True
    )
    used, chunks = processor_seconds(pid) - before, sorted(delays)
    asked, before, end = 0, processor_seconds(pid), time.monotonic() + seconds

    async def ask(client: Client) -> None:
        nonlocal asked
        while time.monotonic() < end:
            await client.ask(False, 1)
            asked += 1

    await asyncio.gather(*(ask(client) for client in [await connect() for _ in range(32)]))
    return {
        "streams": streams,
        "lost": sum(isinstance(one, BaseException) for one in ended),
        "chunks": len(chunks),
        "delay_ms": {"p50": chunks[len(chunks) // 2] / 1e6, "p99": chunks[int(len(chunks) * 0.99)] / 1e6},
        "processor_us_a_chunk": used / len(chunks) * 1e6,
        "requests_per_s": asked / seconds,
        "processor_us_a_request": (processor_seconds(pid) - before) / max(1, asked) * 1e6,
    }


def processor_seconds(pid: int) -> float:
    """Of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK + sum(processor_seconds(int(child)) for child in children)


@contextmanager
def started(words: list[str], url: str, log: Path) -> Iterator[int]:
    with log.open("wb") as written:
        environment = {
            **os.environ,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": "sk-of-this-benchmark",
        }
        process = subprocess.Popen(words, stdout=written, stderr=written, env=environment)
    try:
        for _ in range(240):
            try:
                with urllib.request.urlopen(url, timeout=2):
                    break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"{words[0]} ended:\n{log.read_text()[-2000:]}") from None
                time.sleep(0.5)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def proxies(folder: Path, litellm: str) -> dict[str, tuple[list[str], str]]:
    """Command and probe by name."""
    files = {"gateway": GATEWAY, "nginx": NGINX.replace("FOLDER", str(folder)), "LiteLLM": LITELLM}
    for name, text in files.items():
        (folder / name).write_text(text)
    shutil.move(folder / "LiteLLM", folder / "litellm.yaml")
    found = {"gateway": ([sys.executable, "-m", "lmworks", "gateway", str(folder / "gateway")], "/ready")}
    if nginx := shutil.which("nginx"):
        found["nginx"] = ([nginx, "-c", str(folder / "nginx")], "/v1/models")
    if litellm:
        where = ["--host", "127.0.0.1", "--port", str(PORTS["LiteLLM"])]
        found["LiteLLM"] = ([litellm, "--config", str(folder / "litellm.yaml"), *where], "/health/liveliness")
    return found


async def serve_stub() -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", STUB, backlog=4096)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0, help="of requests without streams")
    parser.add_argument("--litellm", default="", help="its command (none: left out)")
    parser.add_argument("--stub", action="store_true", help="only the stub")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.stub:
        uvloop.run(serve_stub())
        return
    sizes = (options.streams, options.tokens, options.seconds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stub = [sys.executable, __file__, "--stub"]
        with started(stub, f"http://127.0.0.1:{STUB}/v1/models", folder / "stub.log") as stub_pid:
            found = {"direct": uvloop.run(load(STUB, stub_pid, *sizes))}
            print("direct", json.dumps(found["direct"]), flush=True)
            for proxy, (words, probe) in proxies(folder, options.litellm).items():
                url = f"http://127.0.0.1:{PORTS[proxy]}{probe}"
                with started(words, url, folder / f"{proxy}.log") as pid:
                    found[proxy] = uvloop.run(load(PORTS[proxy], pid, *sizes))
                    print(proxy, json.dumps(found[proxy]), flush=True)
    if options.save:
        print(write_result("gateway_cpu", {"load_of_the_machine": os.getloadavg()[0], "proxies": found}))


if __name__ == "__main__":
    main()
