"""`python -m lmworks.serve.api_process FD LISTENER`: one of several API processes, see engine_host."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Metric

from ..engine.core.sampling_params import SamplingParams
from .backend import Ask, BackendError, Event, ModelCard, State, Words
from .channel import frame, receive
from .engine_host import ENDED, STATE_S, Call, Drain, Events, FrontSpec, Reply, Report
from .event_queue import Box
from .limits import Entry, KeyLimits, Limits, Refusal, Size, Visit
from .logs import log_as_json
from .serving import Local, Serving
from .workers import Speech

NOTHING = State(alive=False, ready=False)


class Core:
    """The process that holds engines and counts, as this one knows it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.numbers = itertools.count()
        self.replies: dict[int, asyncio.Future[Any]] = {}
        self.boxes: dict[int, Box] = {}
        self.states: dict[str, State] = {}
        self.others: list[Metric] = []  # what the other API processes counted

    def tell(self, method: str, *given: Any) -> None:
        self.writer.write(frame(Call(None, method, given)))

    async def ask(self, method: str, *given: Any) -> Any:
        number = next(self.numbers)
        reply = self.replies[number] = asyncio.get_running_loop().create_future()
        self.writer.write(frame(Call(number, method, given)))
        return await reply

    async def listen(self) -> Drain:
        """Until it is time to end."""
        while True:
            message = await receive(self.reader)
            if isinstance(message, Reply):
                self.answer(message)
            elif isinstance(message, Events):
                for number, found in message.found:
                    if number in self.boxes:
                        deliver(self.boxes[number], found)
            elif isinstance(message, Report):
                self.states, self.others = message
            elif isinstance(message, Drain):
                return message

    def answer(self, reply: Reply) -> None:
        waiting = self.replies.pop(reply.number)
        if waiting.done():
            return
        if reply.refused is None:
            waiting.set_result(reply.found)
        else:
            waiting.set_exception(Refusal(*reply.refused))

    # --- what Serving asks of it --------------------------------------------------------------------------

    def visit(self, key: KeyLimits) -> Visit:
        return RemoteVisit(self, key)

    async def enter(self, visit: Visit, limits: Limits, card: ModelCard, params: SamplingParams, size: Size) -> Entry:
        assert isinstance(visit, RemoteVisit)
        visit.bytes, number = 0, next(self.numbers)
        return RemoteEntry(self, number, await self.ask("enter", number, visit.number, limits, card, params, size))


def deliver(box: Box, found: Any) -> None:
    if isinstance(found, Event):
        box.put(found)
        return
    kind, message, retry_after, box.started = found
    box.fail(kind, message, retry_after)


class RemoteVisit(Visit):
    """Counted in the other process."""

    def __init__(self, core: Core, key: KeyLimits) -> None:
        self.core, self.key, self.number = core, key, next(core.numbers)
        self.bytes = self.worked = 0

    async def start(self) -> None:
        await self.core.ask("begin", self.number, self.key)

    def work(self, tokens: int) -> None:
        self.bytes = 0
        self.worked += tokens
        self.core.tell("work", self.number, tokens)

    def leave(self) -> None:
        self.core.tell("leave", self.number, self.bytes)


class RemoteEntry(Entry):
    def __init__(self, core: Core, number: int, tokens: int) -> None:
        self.core, self.number, self.tokens, self.used = core, number, tokens, 0

    def __exit__(self, *_: object) -> None:
        self.core.tell("exit", self.number, self.used)


@dataclass
class RemoteBackend:
    """An engine behind the other process: a backend, see `serve.backend`."""

    core: Core
    card: ModelCard
    words: Words
    open: set[int] = field(default_factory=set)
    draining: bool = False

    @property
    def name(self) -> str:
        return self.card.id

    @property
    def state(self) -> State:
        return self.core.states.get(self.name, NOTHING)

    async def start(self) -> None:
        pass

    async def stream(self, ask: Ask) -> AsyncGenerator[Event, None]:
        if self.draining:
            raise BackendError("dead", "the server is shutting down", 1.0)
        number, box, finished = next(self.core.numbers), Box(ask), False
        self.core.boxes[number] = box
        self.open.add(number)
        self.core.tell("stream", number, self.name, ask)
        try:
            while not finished:
                for event in await box.take():
                    finished = event.final is not None
                    yield event
        finally:
            self.open.discard(number)
            del self.core.boxes[number]
            if not finished:
                self.core.tell("cancel", number)

    async def drain(self, seconds: float) -> int:
        self.draining = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self.open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for number in self.open:
            self.core.boxes[number].fail("dead", "the server is shutting down")
        return len(self.open)

    async def close(self) -> None:
        pass


async def serve(wire: socket.socket, listening: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=wire)
    path, told = await receive(reader)
    sys.path[:] = path
    spec, core = FrontSpec(**told), Core(reader, writer)
    serving = serving_of(core, spec)
    listening_task = asyncio.create_task(core.listen())

    from .app import make_app
    from .server import Server, make_server
    from .tracing import tracing_from_environment

    tracing = tracing_from_environment()
    app = make_app(serving, spec.origins, tracing, spec.local)
    server: Server = make_server(app, serving, spec.drain_seconds, *spec.tls, processes=spec.processes)
    serving_task = asyncio.create_task(server.serve([listening]))
    counting = asyncio.create_task(count(core, serving))
    await asyncio.wait([listening_task, serving_task], return_when=asyncio.FIRST_COMPLETED)
    if not listening_task.done() or listening_task.exception() is not None:
        os._exit(1)  # the other process is gone, or we cannot serve
    server.notice, server.should_exit = listening_task.result().notice, True
    hearing = asyncio.create_task(core.listen())  # answers go on to come
    await serving_task
    for task in (counting, hearing):
        task.cancel()
    if tracing is not None:
        tracing.close()


def serving_of(core: Core, spec: FrontSpec) -> Serving:
    from .keys import Settings
    from .upstream import Upstream

    locals_ = []
    for card, packed in spec.models:
        local = Local(RemoteBackend(core, card, Speech.unpacked(packed).words))
        locals_.append(local)
    upstreams = [Upstream(url, spec.upstream_key) for url in spec.upstreams]
    return Serving(Settings(spec.config, spec.keys), locals_, upstreams, core=core)


async def count(core: Core, serving: Serving) -> None:
    while True:
        core.tell("count", list(serving.counts.registry.collect()))
        await asyncio.sleep(STATE_S)


if __name__ == "__main__":
    # The process that started this one is told to end, and then tells us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_as_json()
    wire, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for one in (wire, listening):
        one.set_inheritable(False)
    with suppress(*ENDED):
        asyncio.run(serve(wire, listening))
    sys.stderr.flush()
    os._exit(0)
