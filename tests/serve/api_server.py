"""A real server on a loopback socket, in a thread of its own, over one engine's process that all tests share."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import tiny_engine
import torch
import uvicorn
from openai import DefaultHttpxClient, OpenAI

from lmworks.model import GPT
from lmworks.serve.app import make_app
from lmworks.serve.backend import PromptTokenizer
from lmworks.serve.batches.service import BatchService
from lmworks.serve.channel import LoadedEngine
from lmworks.serve.engine_process import EngineProcess, StallTimeouts
from lmworks.serve.keys import Settings
from lmworks.serve.server import Server, bind_socket, make_server
from lmworks.serve.serving import LocalModel, Serving, Upstream
from lmworks.serve.tls import TLSFiles
from lmworks.serve.workers import PromptProcessor

MODEL = "tiny"
# Knows tools, in the way of models that write <tool_call>.
TEMPLATE = """
{%- if tools %}Tools: {{ tools | tojson }}
{% endif %}
{%- if mood %}[{{ mood }}]{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

# Knows tools and reasoning, in the way of Qwen 3.
REASONING_TEMPLATE = """
{%- if tools %}Tools: {{ tools | tojson }}, called by <tool_call>
{% endif %}
{%- if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}
{%- for message in messages %}<{{ message.role }}>
{%- if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<end>
{% endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def say(text: str) -> str:
    """A message that makes the scripted model write this."""
    return f"{tiny_engine.SAY.decode()}{text}{tiny_engine.SAID.decode()}"


def chatty(folder: str) -> LoadedEngine:
    """The tiny model, with a chat template. Made in the engine's process."""
    return LoadedEngine(tiny_engine.fragile().engine, Path(folder))


def twin() -> GPT:
    """The same weights, to compute by hand."""
    torch.manual_seed(0)
    model = GPT(tiny_engine.MODEL)
    model.init_weights(0)
    return model.eval()


class House:
    """An event loop in a thread, one engine, and as many servers before it as tests want."""

    def __init__(self, folder: Path, template: str = TEMPLATE, factory: Callable[[str], LoadedEngine] = chatty) -> None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.backend = EngineProcess(MODEL, partial(factory, str(folder)), StallTimeouts(stuck=0.6, kill=0.0))
        self.run(self.backend.start())
        self.opened: list[tuple[Server, Any]] = []
        self.shared: list[tuple[Server, Any]] = []  # by several files

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def open(
        self,
        config: Path | None = None,
        keys: Sequence[str] = (),
        upstream: Upstream | list[Upstream] | None = None,
        tls: TLSFiles | None = None,
        prompt_tokenizer: PromptTokenizer | None = None,
        profile_dir: Path | None = None,
        batch_dir: Path | None = None,
        **options: Any,
    ) -> Api:
        """Another server over the same engine (or an upstream alone); `prompt_tokenizer` replaces its tokenizer."""
        local = LocalModel(self.backend)
        if prompt_tokenizer is not None:
            local.processor = PromptProcessor("reworded", prompt_tokenizer)
        behind = [upstream] if isinstance(upstream, Upstream) else upstream or []
        serving = Serving(Settings(config, keys), [] if behind else [local], behind, profile_dir=profile_dir)
        for one in behind:
            self.run(one.start())
        serving.batches = BatchService(batch_dir) if batch_dir is not None else None
        listening, app = bind_socket("127.0.0.1", 0), make_app(serving, **options)
        server = make_server(app, serving, 30.0, tls)
        if serving.batches is not None:
            self.loop.call_soon_threadsafe(serving.batches.start, serving, app)
        # The engine is the house's own: not started and closed with each server.
        task = asyncio.run_coroutine_threadsafe(uvicorn.Server.serve(server, [listening]), self.loop)
        self.opened.append((server, task))
        until(lambda: server.started)
        return Api(listening.getsockname()[1], serving, self, server)

    def idle(self) -> bool:
        """Nothing is left of any request."""
        found = self.backend.state.metrics
        return not self.backend.queues and found["num_requests_running"] == found["num_requests_waiting"] == 0

    def close_servers(self) -> None:
        """Those that tests opened: each looks ten times a second whether it should end."""
        for server, _ in self.opened:
            server.force_exit = server.should_exit = True
            server.seconds = 0.0
            server.serving.local_models = []  # its engine goes on for the others
        for server, task in self.opened:
            task.result(30)
            if server.serving.batches is not None:
                self.run(server.serving.batches.close())
            self.loop.call_soon_threadsafe(server.serving.workers.close)
        self.opened.clear()

    def close(self) -> None:
        self.opened += self.shared
        self.close_servers()
        self.run(self.backend.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


class Api:
    """One server, and ways to talk to it."""

    def __init__(self, port: int, serving: Serving, house: House, server: Server) -> None:
        self.port, self.serving, self.house, self.server = port, serving, house, server
        self.url = f"http://127.0.0.1:{port}"
        # To read the certificates of all authorities, which nobody asks for here, takes a client 40 ms.
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False, limits=limits)

    def client(self, key: str = "none needed") -> OpenAI:
        """Every answer must be what the client's types say."""
        http, url = DefaultHttpxClient(verify=False), f"{self.url}/v1"
        return OpenAI(base_url=url, api_key=key, max_retries=0, http_client=http, _strict_response_validation=True)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, **wishes: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"model": MODEL, "prompt": "Hello", "temperature": 0} | wishes)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def raw(self, data: bytes, wait: float = 60.0) -> bytes:
        """Bytes as they are, and all that comes back until the server closes (or says no more)."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                parts = iter(lambda: connection.recv(65536), b"")
                return b"".join(parts)
            except OSError:  # a connection that the server ended may be gone in several ways
                return b""


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
