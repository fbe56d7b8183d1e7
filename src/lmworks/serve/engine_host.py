"""Several API processes over the same engines: this process holds the engines and all counts, others speak HTTP.

    client ── HTTP ──▶ API process ── begin, enter, stream ──▶ this one ──▶ engine
    client ── HTTP ──▶ API process ──▶

The API processes accept connections on one socket. What a key may use is counted here, so it holds for all of them
together; a process that is lost takes its own requests along and is replaced. `serve.api_process` is the other side.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import Metric

from ..engine.core.sampling_params import SamplingParams
from ..spec import LMWorksError
from .backend import Ask, BackendError, ModelCard, State
from .channel import frame, receive
from .errors import refusal_of
from .limits import Entry, KeyLimits, Limits, Size, Visit
from .serving import Serving
from .workers import Speech

log = logging.getLogger("lmworks.serve")

STATE_S = 0.25  # between two reports of how the engines fare
PAUSE_S = 1.0  # before a process is started again
LAST_WORDS_S = 10.0  # beyond the time of a drain
ENDED = (asyncio.IncompleteReadError, ConnectionError)


@dataclass(frozen=True)
class FrontSpec:
    """What an API process is told: how to serve, and which models there are."""

    config: Path | None
    keys: list[str]
    upstreams: list[str]
    upstream_key: str | None
    origins: tuple[str, ...]
    local: bool
    drain_seconds: float
    tls: tuple[str, ...]
    processes: int
    models: tuple[tuple[ModelCard, bytes], ...] = ()  # cards, and `Speech.packed`


class Call(NamedTuple):
    """From an API process: `Front.method(*given)`. A number asks for a reply."""

    number: int | None
    method: str
    given: tuple[Any, ...]


class Reply(NamedTuple):
    number: int
    found: Any
    refused: tuple[Any, ...] | None  # as Refusal has it


class Events(NamedTuple):
    """What came of streams: (number, Event), or (number, BackendError as its fields)."""

    found: list[tuple[int, Any]]


class Report(NamedTuple):
    states: dict[str, State]
    counts: list[Metric]  # of all API processes but the one it is sent to


class Drain(NamedTuple):
    notice: float


class Front:
    """One API process, and what it has under way."""

    def __init__(self, serving: Serving, process: subprocess.Popen[bytes], writer: asyncio.StreamWriter) -> None:
        self.serving, self.process, self.writer = serving, process, writer
        self.visits: dict[int, Visit] = {}
        self.entries: dict[int, Entry] = {}
        self.streams: dict[int, asyncio.Task[None]] = {}
        self.metrics: list[Metric] = []
        self.outbox: list[tuple[int, Any]] = []
        self.methods: dict[str, Callable[..., Any]] = {
            each.__name__: each
            for each in (self.begin, self.work, self.leave, self.enter, self.exit, self.stream, self.cancel, self.count)
        }

    def call(self, call: Call) -> None:
        found, refused = None, None
        try:
            found = self.methods[call.method](*call.given)
        except Exception as error:
            said = refusal_of(error)
            if said.code == "internal_error":
                log.error("a call of an API process failed", exc_info=error)
            refused = (said.status, said.code, str(said), said.param, said.retry_after)
        if call.number is not None:
            self.send(Reply(call.number, found, refused))

    def send(self, message: Any) -> None:
        if not self.writer.is_closing():
            self.writer.write(frame(message))

    # --- limits -------------------------------------------------------------------------------------------

    def begin(self, visit: int, key: KeyLimits) -> None:
        made = Visit(self.serving.gate, key)
        made.begin()
        self.visits[visit] = made

    def work(self, visit: int, tokens: int) -> None:
        self.visits[visit].work(tokens)

    def leave(self, visit: int, unread: int) -> None:
        """Those that were refused at once were never here."""
        if (found := self.visits.pop(visit, None)) is not None:
            found.bytes = unread
            found.leave()

    def enter(self, entry: int, visit: int, limits: Limits, card: ModelCard, params: SamplingParams, size: Size) -> int:
        made = self.entries[entry] = self.serving.gate.enter(self.visits[visit], limits, card, params, size)
        return made.tokens

    def exit(self, entry: int, used: int) -> None:
        found = self.entries.pop(entry)
        found.use(used)
        found.__exit__(None, None, None)

    def count(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    # --- streams ------------------------------------------------------------------------------------------

    def stream(self, number: int, model: str, ask: Ask) -> None:
        self.streams[number] = asyncio.create_task(self.follow(number, model, ask))

    def cancel(self, number: int) -> None:
        if (task := self.streams.pop(number, None)) is not None:
            task.cancel()

    async def follow(self, number: int, model: str, ask: Ask) -> None:
        backend = next(each.backend for each in self.serving.locals if each.backend.name == model)
        try:
            async with aclosing(backend.stream(ask)) as events:
                async for event in events:
                    self.put(number, event)
        except BackendError as error:
            self.put(number, (error.kind, str(error), error.retry_after, error.started))
        self.streams.pop(number, None)

    def put(self, number: int, found: Any) -> None:
        """All that one step of an engine brings travels together."""
        if not self.outbox:
            asyncio.get_running_loop().call_soon(self.flush)
        self.outbox.append((number, found))

    def flush(self) -> None:
        self.send(Events(self.outbox))
        self.outbox = []

    def end(self) -> None:
        """It is gone: so is all that it asked for."""
        for task in self.streams.values():
            task.cancel()
        for entry in self.entries.values():
            entry.__exit__(None, None, None)
        for visit in self.visits.values():
            visit.leave()
        self.writer.transport.abort()
        self.process.kill()


@dataclass
class Core:
    """Runs until a signal: then those under way are finished, as with one process."""

    serving: Serving
    spec: FrontSpec
    listening: socket.socket
    notice: float
    fronts: set[Front] = field(default_factory=set)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    failed: bool = False  # a process ended before it served anybody: so would the next

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        await self.serving.start()
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self.stop, sign)
        try:
            self.listening.listen(2048)
            models = [(each.backend.card, Speech(each.backend.name, each.backend.words).packed) for each in self.locals]
            setup = frame((sys.path, {**vars(self.spec), "models": tuple(models)}))
            self.tasks = [asyncio.create_task(self.keep(setup)) for _ in range(self.spec.processes)]
            reports = asyncio.create_task(self.report())
            await self.stopping.wait()
            log.info("shutting down", extra={"seconds": self.spec.drain_seconds})
            for front in self.fronts:
                front.send(Drain(self.notice))
            self.listening.close()  # theirs are open for as long as they listen
            await asyncio.wait(self.tasks, timeout=self.spec.drain_seconds + self.notice + LAST_WORDS_S)
            reports.cancel()
            for front in list(self.fronts):
                front.end()
            log.info("shut down")
        finally:
            await self.serving.close()
        if self.failed:
            raise LMWorksError("an API process could not be started: its log says why")

    @property
    def locals(self) -> list[Any]:
        return self.serving.locals

    def stop(self, sign: int) -> None:
        if self.stopping.is_set():
            os._exit(128 + sign)  # all others see their wires end, and follow
        self.notice = self.notice if sign == signal.SIGTERM else 0.0
        self.stopping.set()

    async def keep(self, setup: bytes) -> None:
        """One API process after the other."""
        while not self.stopping.is_set():
            code = await self.live(setup)
            if not self.stopping.is_set():
                log.error("API process ended", extra={"exit_code": code})
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), PAUSE_S)

    async def live(self, setup: bytes) -> int:
        ours, theirs = socket.socketpair()
        handed = [theirs.fileno(), self.listening.fileno()]
        command = [sys.executable, "-m", "lmworks.serve.api_process", *map(str, handed)]
        with theirs:
            process = await asyncio.to_thread(
                subprocess.Popen, command, pass_fds=handed, stdin=subprocess.DEVNULL, start_new_session=True
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        front = Front(self.serving, process, writer)
        self.fronts.add(front)
        writer.write(setup)
        try:
            while True:
                front.call(await receive(reader))
        except ENDED:
            pass
        finally:
            self.fronts.discard(front)
            front.end()
        if not front.metrics and not self.stopping.is_set():
            self.failed = True
            self.stopping.set()
        return await asyncio.to_thread(process.wait)

    async def report(self) -> None:
        while True:
            states = {each.backend.name: each.backend.state for each in self.locals}
            for front in self.fronts:
                others = [metric for other in self.fronts if other is not front for metric in other.metrics]
                front.send(Report(states, others))
            await asyncio.sleep(STATE_S)
