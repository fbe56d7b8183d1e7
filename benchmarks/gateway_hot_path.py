"""What the gateway adds to a stream, and how many requests it passes on, beside LiteLLM's proxy and nginx.

    python -m venv .venv-litellm && .venv-litellm/bin/pip install 'litellm[proxy]'      # apt install nginx
    python benchmarks/gateway_hot_path.py --litellm .venv-litellm/bin/litellm --save

A stub streams tokens at 20 a second, each with the time at which it was sent, so a delay is that of one chunk between
two clocks that are one. 200 streams, then 32 clients that ask without streams. "direct" is the stub itself: what the
load generator and the machine take; what a proxy adds is the difference to it. All are up at the same time and take
turns, --rounds times, so that who else is busy on the machine disturbs them alike; medians of the rounds are shown. A
first token's delay is from the request to its chunk, less the stub's own pause. Processor time is the proxy's process
and its children's: it depends less on others than delays do. With four cores or more the load generator has one, the
stub one, and the proxies share two; with fewer the first is for the generator and the stub, the others for proxies.
The gateway asks for keys, counts limits, budgets and usage, has the prefix cache policy, objectives and a hedging
limit, and would continue streams. LiteLLM gets a key, too, and FEW_STREAMS: it cannot pass on hundreds in time.
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

from lmworks.bench.serve import raise_open_file_limit

STUB, PORTS = 9301, {"gateway": 9302, "nginx": 9303, "LiteLLM": 9304}
GAP_S = 0.05
STAMP = re.compile(rb'"content":\s?"(\d{10,}) ')
CLOCK = os.sysconf("SC_CLK_TCK")
KEY = "sk-of-this-benchmark"  # LiteLLM's; the gateway makes one
FEW_STREAMS = 10
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
[tenants]
store = "sqlite:///FOLDER/gateway.db"
[[pools]]
name = "stub"
kind = "openai"
urls = ["http://127.0.0.1:{STUB}/v1"]
price_in = 0.1
price_out = 0.4
"""
LIMITS = ("requests_per_minute=1000000000", "tokens_per_minute=1000000000", "dollars_per_month=1000000")
NGINX = f"""
worker_processes 1;
daemon off;
pid FOLDER/pid;
error_log FOLDER/error;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  client_body_temp_path FOLDER/nginx-body; proxy_temp_path FOLDER/nginx-proxy;
  fastcgi_temp_path FOLDER/nginx-fastcgi; uwsgi_temp_path FOLDER/nginx-uwsgi; scgi_temp_path FOLDER/nginx-scgi;
  upstream stub {{ server 127.0.0.1:{STUB}; keepalive 256; keepalive_requests 1000000000; }}
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


LMWORKS = [sys.executable, "-m", "lmworks"]


def made_key(folder: Path) -> str:
    """Of a tenant of the gateway, with limits."""

    def told(*words: str) -> str:
        command = [*LMWORKS, "gateway", *words, "--config", str(folder / "gateway.toml")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    told("tenants", "create", "bench", *(word for limit in LIMITS for word in ("--limit", limit)))
    return told("keys", "create", "bench")


class Stub(asyncio.Protocol):
    transport: asyncio.Transport
    next_chunk: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport, self.parser = transport, httptools.HttpRequestParser(self)
        self.url, self.parts = b"", list[bytes]()
        self.loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.next_chunk is not None:
            self.next_chunk.cancel()

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
            self.begin_stream(asked["max_tokens"])
            return
        found = json.dumps(ANSWER if body else MODELS).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        self.transport.write(head % (len(found), found))

    def begin_stream(self, tokens: int) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.transport.write(head)
        self.begun, self.tokens = self.loop.time(), tokens
        self.wait_for(1)

    def wait_for(self, number: int) -> None:
        self.next_chunk = self.loop.call_at(self.begun + number * GAP_S, self.send_chunk, number)

    def send_chunk(self, number: int) -> None:
        self.send(CHUNK + b'{"content":"%d "},"logprobs":null,"finish_reason":null}]}' % time.monotonic_ns())
        if number < self.tokens:
            self.wait_for(number + 1)
            return
        self.send(b"[DONE]")
        self.transport.write(b"0\r\n\r\n")

    def send(self, data: bytes) -> None:
        event = b"data: %b\n\n" % data
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))


class Client(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, key: str, delays: list[int], first: list[int]) -> None:
        self.key = key
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
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n" % self.key.encode()
        self.answered = asyncio.get_running_loop().create_future()
        self.asked_at = time.monotonic_ns() if stream else 0
        self.transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await self.answered


async def load(port: int, key: str, pid: int, streams: int, tokens: int, seconds: float) -> dict[str, Any]:
    loop, delays, first = asyncio.get_running_loop(), list[int](), list[int]()

    async def connect() -> Client:
        return (await loop.create_connection(lambda: Client(key, delays, first), "127.0.0.1", port))[1]

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
            "LITELLM_MASTER_KEY": KEY,
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
    files = {"gateway.toml": GATEWAY, "nginx": NGINX, "litellm.yaml": LITELLM}
    for name, text in files.items():
        (folder / name).write_text(text.replace("FOLDER", str(folder)))
    found = {"gateway": ([*LMWORKS, "gateway", str(folder / "gateway.toml")], "/ready")}
    if nginx := shutil.which("nginx"):
        found["nginx"] = ([nginx, "-c", str(folder / "nginx"), "-e", str(folder / "error")], "/v1/models")
    if litellm:
        where = ["--host", "127.0.0.1", "--port", str(PORTS["LiteLLM"])]
        found["LiteLLM"] = ([*litellm.split(), "--config", str(folder / "litellm.yaml"), *where], "/health/liveliness")
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
    raise_open_file_limit()  # of what is started, too
    cores = sorted(os.sched_getaffinity(0))
    own, stub, others = ({cores[0]}, {cores[1]}, set(cores[2:4])) if len(cores) > 3 else shared(cores)
    os.sched_setaffinity(0, own)
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder, pids = Path(name), dict[str, int]()
        commands = proxies(folder, options.litellm)
        keys = {"gateway": made_key(folder)}
        os.sched_setaffinity(0, stub)  # of what is started from now on
        url = f"http://127.0.0.1:{STUB}/v1/models"
        pids["direct"] = running.enter_context(started([sys.executable, __file__, "--stub"], url, folder / "stub.log"))
        os.sched_setaffinity(0, others)
        for proxy, (words, probe) in commands.items():
            url = f"http://127.0.0.1:{PORTS[proxy]}{probe}"
            pids[proxy] = running.enter_context(started(words, url, folder / f"{proxy}.log"))
        os.sched_setaffinity(0, own)
        time.sleep(3)  # the gateway finds the stub's model

        def measured(proxy: str, streams: int, tokens: int, seconds: float) -> dict[str, Any]:
            port, key = PORTS.get(proxy, STUB), keys.get(proxy, KEY)
            found = uvloop.run(load(port, key, pids[proxy], streams, tokens, seconds))
            print(proxy, json.dumps(found), flush=True)
            return found

        for proxy in pids:  # the first requests of a process take ten times as long
            measured(proxy, FEW_STREAMS, 5, 0.2)
        rounds: dict[str, list[dict[str, Any]]] = {proxy: [] for proxy in pids}
        for _ in range(options.rounds):
            for proxy in pids:
                streams = FEW_STREAMS if proxy == "LiteLLM" else options.streams
                rounds[proxy].append(measured(proxy, streams, options.tokens, options.seconds))
        found = {proxy: middle(each) for proxy, each in rounds.items()}
        many = {
            proxy: measured(proxy, options.many, options.tokens, 0.5)
            for proxy in pids
            if options.many and proxy != "LiteLLM"
        }
    added = {proxy: difference(found[proxy], found["direct"]) for proxy in found if proxy != "direct"}
    print("added", json.dumps(added))
    if options.save:
        shown = {"load_of_the_machine": os.getloadavg()[0], "proxies": found, "added_ms": added, "many_streams": many}
        print(write_result("gateway_hot_path", shown))


def shared(cores: list[int]) -> tuple[set[int], set[int], set[int]]:
    first, *others = cores
    return {first}, {first}, set(others) or {first}


def difference(proxy: dict[str, Any], direct: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What a proxy adds to a first token and to each chunk."""
    return {
        kind: {quantile: proxy[kind][quantile] - direct[kind][quantile] for quantile in ("p50", "p99")}
        for kind in ("first_token_ms", "delay_ms")
    }


if __name__ == "__main__":
    main()
