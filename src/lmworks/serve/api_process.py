"""`python -m lmworks.serve.api_process FD LISTENER`: one of several API processes, see engine_host."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import Metric

from ..engine.core.sampling_params import SamplingParams
from ..record.parent_death import kill_with_parent
from .backend import BackendError, EngineRequest, Event, EventQueue, ModelCard, ProfileRequest, PromptTokenizer, State
from .cache_events import CacheChange, CacheKeys
from .channel import ENDED, encode_frame, read_frame
from .engine_host import STATE_INTERVAL_S, APIProcessConfig, Call, Drain, Events, Reply, StateReport
from .limits import Admission, APIError, KeyLimits, Limits, RequestMeter, Size
from .serving import LocalModel, Serving
from .telemetry import log_as_json
from .workers import PromptProcessor

UNAVAILABLE = State(alive=False, ready=False)


class EngineHostClient:
    """Calls the engine host: the process that holds the engines and the limits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.request_ids = itertools.count()
        self.replies: dict[int, asyncio.Future[Any]] = {}
        self.queues: dict[int, EventQueue] = {}
        self.cache_keys: dict[int, CacheKeys] = {}  # that are followed
        self.states: dict[str, State] = {}
        self.other_metrics: list[Metric] = []  # what the other API processes counted

    def notify(self, method: str, *arguments: Any) -> None:
        self.writer.write(encode_frame(Call(None, method, arguments)))

    async def call(self, method: str, *arguments: Any) -> Any:
        number = next(self.request_ids)
        reply = self.replies[number] = asyncio.get_running_loop().create_future()
        self.writer.write(encode_frame(Call(number, method, arguments)))
        return await reply

    async def read_messages(self) -> Drain:
        """Until the host says that this process must drain."""
        while True:
            message = await read_frame(self.reader)
            if isinstance(message, Reply):
                self.on_reply(message)
            elif isinstance(message, Events):
                for number, found in message.found:
                    if number in self.cache_keys:
                        self.cache_keys[number].apply(found)
                    elif number in self.queues:
                        deliver(self.queues[number], found)
            elif isinstance(message, StateReport):
                self.states, self.other_metrics = message
            elif isinstance(message, Drain):
                return message

    def on_reply(self, reply: Reply) -> None:
        waiting = self.replies.pop(reply.number)
        if waiting.done():
            return
        if reply.refused is None:
            waiting.set_result(reply.found)
        else:
            waiting.set_exception(APIError(*reply.refused))

    # --- as Serving uses it -------------------------------------------------------------------------------

    def meter(self, key: KeyLimits) -> RequestMeter:
        return RemoteMeter(self, key)

    async def admit(
        self, meter: RequestMeter, limits: Limits, card: ModelCard, params: SamplingParams, size: Size
    ) -> Admission:
        assert isinstance(meter, RemoteMeter)
        meter.bytes, number = 0, next(self.request_ids)
        return RemoteAdmission(self, number, await self.call("admit", number, meter.number, limits, card, params, size))

    async def stored_responses(self, method: str, *arguments: Any) -> Any:
        return await self.call("stored_responses", method, *arguments)


def deliver(queue: EventQueue, found: Any) -> None:
    if isinstance(found, Event):
        queue.put(found)
        return
    kind, message, retry_after, queue.started = found
    queue.fail(kind, message, retry_after)


class RemoteMeter(RequestMeter):
    """Counted by the engine host."""

    def __init__(self, engine_host: EngineHostClient, key: KeyLimits) -> None:
        self.engine_host, self.key, self.number = engine_host, key, next(engine_host.request_ids)
        self.bytes = self.charged_tokens = 0

    async def start(self) -> None:
        await self.engine_host.call("begin", self.number, self.key)

    def charge_prompt(self, tokens: int) -> None:
        self.bytes = 0
        self.charged_tokens += tokens
        self.engine_host.notify("charge_prompt", self.number, tokens)

    def release(self) -> None:
        self.engine_host.notify("release", self.number, self.bytes)


class RemoteAdmission(Admission):
    def __init__(self, engine_host: EngineHostClient, number: int, tokens: int) -> None:
        self.engine_host, self.number, self.tokens, self.used = engine_host, number, tokens, 0

    def __exit__(self, *_: object) -> None:
        self.engine_host.notify("finish", self.number, self.used)


@dataclass
class RemoteBackend:
    """An engine of the engine host: a backend, see `serve.backend`."""

    engine_host: EngineHostClient
    first_card: ModelCard  # as it was at the start
    prompt_tokenizer: PromptTokenizer
    open: set[int] = field(default_factory=set)
    draining: bool = False

    @property
    def name(self) -> str:
        return self.first_card.id

    @property
    def card(self) -> ModelCard:
        adapters = self.state.adapters
        return self.first_card if adapters is None else replace(self.first_card, adapters=adapters)

    async def control(self, action: str, *arguments: Any) -> None:
        await self.engine_host.call("control", self.name, action, *arguments)

    @property
    def state(self) -> State:
        return self.engine_host.states.get(self.name, UNAVAILABLE)

    async def start(self) -> None:
        pass

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        if self.draining:
            raise BackendError("dead", "the server is shutting down", 1.0)
        number, queue, finished = next(self.engine_host.request_ids), EventQueue(request), False
        self.engine_host.queues[number] = queue
        self.open.add(number)
        self.engine_host.notify("stream", number, self.name, request)
        try:
            while not finished:
                for event in await queue.get():
                    finished = event.final is not None
                    yield event
        finally:
            self.open.discard(number)
            del self.engine_host.queues[number]
            if not finished:
                self.engine_host.notify("cancel", number)

    async def follow_cache(self) -> AsyncGenerator[CacheChange, None]:
        number, keys = next(self.engine_host.request_ids), CacheKeys()
        self.engine_host.cache_keys[number] = keys
        self.engine_host.notify("follow_cache", number, self.name)
        try:
            async with aclosing(keys.follow()) as changes:
                async for change in changes:
                    yield change
        finally:
            del self.engine_host.cache_keys[number]
            self.engine_host.notify("cancel", number)

    async def profile(self, wanted: ProfileRequest | None) -> Path:
        found: Path = await self.engine_host.call("profile", self.name, wanted)
        return found

    async def drain(self, seconds: float) -> int:
        self.draining = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self.open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for number in self.open:
            self.engine_host.queues[number].fail("dead", "the server is shutting down")
        return len(self.open)

    async def close(self) -> None:
        pass


async def serve(channel: socket.socket, listening: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    path, fields = await read_frame(reader)
    sys.path[:] = path
    spec, engine_host = APIProcessConfig(**fields), EngineHostClient(reader, writer)
    serving = make_serving(engine_host, spec)
    listening_task = asyncio.create_task(engine_host.read_messages())

    from ..observability.tracing import tracing_from_environment
    from .app import make_app
    from .server import Server, make_server

    tracing = tracing_from_environment("lmworks")
    app = make_app(serving, spec.origins, tracing, spec.local)
    server: Server = make_server(app, serving, spec.drain_seconds, spec.tls, processes=spec.processes)
    serving_task = asyncio.create_task(server.serve([listening]))
    counting = asyncio.create_task(report_metrics(engine_host, serving))
    await asyncio.wait([listening_task, serving_task], return_when=asyncio.FIRST_COMPLETED)
    if not listening_task.done() or listening_task.exception() is not None:
        os._exit(1)  # the engine host is gone, or serving failed
    server.notice, server.should_exit = listening_task.result().notice, True
    draining = asyncio.create_task(engine_host.read_messages())  # events still arrive while it drains
    await serving_task
    for task in (counting, draining):
        task.cancel()
    if tracing is not None:
        tracing.close()


def make_serving(engine_host: EngineHostClient, spec: APIProcessConfig) -> Serving:
    from .keys import Settings
    from .serving import Upstream

    locals_ = []
    for card, packed in spec.models:
        local = LocalModel(RemoteBackend(engine_host, card, PromptProcessor.unpacked(packed).prompt_tokenizer))
        locals_.append(local)
    upstreams = [Upstream(url, spec.upstream_key) for url in spec.upstreams]
    settings = Settings(spec.config, spec.keys)
    return Serving(
        settings,
        locals_,
        upstreams,
        engine_host=engine_host,
        pooling=spec.pooling,
        profile_dir=spec.profile_dir,
        generation_config=spec.generation_config,
        adapter_root=spec.adapter_root,
    )


async def report_metrics(engine_host: EngineHostClient, serving: Serving) -> None:
    while True:
        engine_host.notify("report_metrics", list(serving.http_metrics.registry.collect()))
        await asyncio.sleep(STATE_INTERVAL_S)


if __name__ == "__main__":
    kill_with_parent()  # one that is stopped does not see its socket close
    # Signals are for the engine host, which then sends Drain.
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    log_as_json()
    channel, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for one in (channel, listening):
        one.set_inheritable(False)
    with suppress(*ENDED):
        asyncio.run(serve(channel, listening))
    sys.stderr.flush()
    os._exit(0)
