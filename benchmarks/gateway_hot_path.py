"""What the gateway adds to a stream, and how many requests it passes on, beside LiteLLM's proxy and nginx.

    python -m venv .venv-litellm && .venv-litellm/bin/pip install 'litellm[proxy]'      # apt install nginx
    python benchmarks/gateway_hot_path.py --litellm .venv-litellm/bin/litellm --save

A stub streams tokens at 20 a second, each with the time at which it was sent, so a delay is that of one chunk between
two clocks that are one. 200 streams, then 32 clients that ask without streams. "direct" is the stub itself: what the
load generator and the machine take; what a proxy adds is the difference to it. All are up at the same time and take
turns, --rounds times, so that who else is busy on the machine disturbs them alike; medians of the rounds are shown. A
first token's delay is from the request to its chunk, less the stub's own pause. Processor time is the proxy's process
and its children's: it depends less on others than delays do. With two cores or more the load generator and the stub
are pinned to the first one, proxies to the others. The gateway runs with everything that it has by default, the prefix
cache policy, objectives and a hedging limit.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
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
[routing]
policy = ["prefix_cache", "least_loaded"]
[[models]]
name = "stub"
hedge_seconds = 30.0
[[slos]]
model = "stub"
ttft = 30.0
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

    def __init__(self, delays: list[int], first: list[int]) -> None:
        self.first, self.asked_at = first, 0  # of streams
        self.delays, self.parser = delays, httptools.HttpResponseParser(self)
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(ConnectionError("lost"))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        found = [now - int(one[1]) for one in STAMP.finditer(data)]
        if found and self.asked_at:
            self.first.append(now - self.asked_at - int(GAP_S * 1e9))
            self.asked_at = 0
        self.delays += found
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
        self.asked_at = time.monotonic_ns() if stream else 0
        self.transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await self.answered


async def load(port: int, pid: int, streams: int, tokens: int, seconds: float) -> dict[str, Any]:
    loop, delays, first = asyncio.get_running_loop(), list[int](), list[int]()

    async def connect() -> Client:
        return (await loop.create_connection(lambda: Client(delays, first), "127.0.0.1", port))[1]

    async def stream(client: Client, delay: float) -> None:
        await asyncio.sleep(delay)
        await client.ask(True, tokens)

    clients, before = [await connect() for _ in range(streams)], processor_seconds(pid)
    ended = await asyncio.gather(
        *(stream(client, number / streams) for number, client in enumerate(clients)), return_exceptions=True
    )
    used, chunks = processor_seconds(pid) - before, sorted(delays)
    first.sort()
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
        "first_token_ms": {"p50": first[len(first) // 2] / 1e6, "p99": first[int(len(first) * 0.99)] / 1e6},
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


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of figures that are numbers, and of those within them."""
    return {
        name: middle([one[name] for one in rounds]) if isinstance(value, dict) else median(one[name] for one in rounds)
        for name, value in rounds[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0, help="of requests without streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--many", type=int, default=2000, help="streams at once through the gateway alone (0: none)")
    parser.add_argument("--litellm", default="", help="its command (none: left out)")
    parser.add_argument("--stub", action="store_true", help="only the stub")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.stub:
        uvloop.run(serve_stub())
        return
    own, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {own})
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder, pids = Path(name), dict[str, int]()
        stub = [sys.executable, __file__, "--stub"]
        url = f"http://127.0.0.1:{STUB}/v1/models"
        pids["direct"] = running.enter_context(started(stub, url, folder / "stub.log"))
        os.sched_setaffinity(0, set(others) or {own})  # of what is started from now on
        for proxy, (words, probe) in proxies(folder, options.litellm).items():
            url = f"http://127.0.0.1:{PORTS[proxy]}{probe}"
            pids[proxy] = running.enter_context(started(words, url, folder / f"{proxy}.log"))
        os.sched_setaffinity(0, {own})
        time.sleep(3)  # the gateway finds the stub's model
        rounds: dict[str, list[dict[str, Any]]] = {proxy: [] for proxy in pids}
        for _ in range(options.rounds):
            for proxy, pid in pids.items():
                port = PORTS.get(proxy, STUB)
                rounds[proxy].append(uvloop.run(load(port, pid, options.streams, options.tokens, options.seconds)))
                print(proxy, json.dumps(rounds[proxy][-1]), flush=True)
        found = {proxy: middle(each) for proxy, each in rounds.items()}
        many = None
        if options.many:
            many = uvloop.run(load(PORTS["gateway"], pids["gateway"], options.many, 20, 0.5))
            print("many", json.dumps(many), flush=True)
    if options.save:
        shown = {"load_of_the_machine": os.getloadavg()[0], "proxies": found, "many_streams": many}
        print(write_result("gateway_hot_path", shown))


if __name__ == "__main__":
    main()
