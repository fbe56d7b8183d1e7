"""Several API processes over the same engines: the engine host holds the engines and the rate limits.

    client ── HTTP ──▶ API process ── begin, admit, stream ──▶ engine host ──▶ engine
    client ── HTTP ──▶ API process ──▶

The API processes accept connections on one socket. Rate limits are counted here, so they hold for all processes
together; a process that dies is restarted, and only its own requests are lost. `serve.api_process` is the other side.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import Metric

from ..engine.core.sampling_params import SamplingParams
from ..spec import LMWorksError
from .backend import BackendError, EngineRequest, ModelCard, ProfileRequest, State
from .channel import ENDED, encode_frame, read_frame, spawn
from .engine_process import EngineProcess
from .errors import to_api_error
from .limits import Admission, KeyLimits, Limits, RequestMeter, Size
from .reload import has_terminal
from .serving import Serving
from .tls import TLSFiles
from .workers import PromptProcessor

log = logging.getLogger("lmworks.serve")

STATE_INTERVAL_S = 0.25  # between two reports of the engines' states
RESTART_DELAY_S = 1.0  # before a process is started again
CLOSE_GRACE_S = 10.0  # beyond the time of a drain


@dataclass(frozen=True)
class APIProcessConfig:
    """Configuration of an API process, and the models that it serves."""

    config: Path | None
    keys: list[str]
    upstreams: list[str]
    upstream_key: str | None
    origins: tuple[str, ...]
    local: bool
    drain_seconds: float
    tls: TLSFiles | None
    processes: int
    pooling: str | None = None
    profile_dir: Path | None = None
    generation_config: bool = True
    adapter_root: Path | None = None
    models: tuple[tuple[ModelCard, bytes], ...] = ()  # cards, and `PromptProcessor.packed`


class Call(NamedTuple):
    """From an API process: `APIProcessHandle.method(*arguments)`. With a number: a reply is expected."""

    number: int | None
    method: str
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    number: int
    found: Any
    refused: tuple[Any, ...] | None  # arguments of an APIError


class Events(NamedTuple):
    """Of streams: (number, Event), or (number, fields of a BackendError)."""

    found: list[tuple[int, Any]]


class StateReport(NamedTuple):
    states: dict[str, State]
    counts: list[Metric]  # of all API processes but the one it is sent to


class Drain(NamedTuple):
    notice: float


class APIProcessHandle:
    """One API process and its open requests, on the side of the engine host."""

    def __init__(self, serving: Serving, process: subprocess.Popen[bytes], writer: asyncio.StreamWriter) -> None:
        self.serving, self.process, self.writer = serving, process, writer
        self.meters: dict[int, RequestMeter] = {}
        self.admissions: dict[int, Admission] = {}
        self.streams: dict[int, asyncio.Task[None]] = {}
        self.calls: set[asyncio.Task[None]] = set()  # that are answered later
        self.metrics: list[Metric] = []
        self.pending_events: list[tuple[int, Any]] = []
        self.methods: dict[str, Callable[..., Any]] = {
            each.__name__: each
            for each in (
                self.begin,
                self.charge_prompt,
                self.release,
                self.admit,
                self.finish,
                self.stream,
                self.follow_cache,
                self.cancel,
                self.profile,
                self.control,
                self.report_metrics,
                self.stored_responses,
            )
        }

    def call(self, call: Call) -> None:
        try:
            found = self.methods[call.method](*call.arguments)
        except Exception as error:
            self.reply(call, None, error)
            return
        if inspect.isawaitable(found):
            task = asyncio.create_task(self.reply_later(call, found))
            self.calls.add(task)
            task.add_done_callback(self.calls.discard)
        else:
            self.reply(call, found)

    async def reply_later(self, call: Call, found: Awaitable[Any]) -> None:
        try:
            self.reply(call, await found)
        except Exception as error:
            self.reply(call, None, error)

    def reply(self, call: Call, found: Any, error: Exception | None = None) -> None:
        refused = None
        if error is not None:
            api_error = to_api_error(error)
            if api_error.code == "internal_error":
                log.error("a call of an API process failed", exc_info=error)
            refused = api_error.fields
        if call.number is not None:
            self.send(Reply(call.number, found, refused))

    def send(self, message: Any) -> None:
        if not self.writer.is_closing():
            self.writer.write(encode_frame(message))

    # --- limits -------------------------------------------------------------------------------------------

    def begin(self, number: int, key: KeyLimits) -> None:
        meter = RequestMeter(self.serving.rate_limiter, key)
        meter.begin()
        self.meters[number] = meter

    def charge_prompt(self, number: int, tokens: int) -> None:
        self.meters[number].charge_prompt(tokens)

    def release(self, number: int, unread_bytes: int) -> None:
        """A request that `begin` refused has no meter."""
        if (meter := self.meters.pop(number, None)) is not None:
            meter.bytes = unread_bytes
            meter.release()

    def admit(
        self, number: int, meter_number: int, limits: Limits, card: ModelCard, params: SamplingParams, size: Size
    ) -> int:
        admission = self.serving.rate_limiter.admit(self.meters[meter_number], limits, card, params, size)
        self.admissions[number] = admission
        return admission.tokens

    def finish(self, number: int, used: int) -> None:
        admission = self.admissions.pop(number)
        admission.use(used)
        admission.__exit__(None, None, None)

    def report_metrics(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    def stored_responses(self, method: str, *arguments: Any) -> Any:
        """Of all API processes: a conversation may go on with another one."""
        return getattr(self.serving.responses, method)(*arguments)

    # --- streams ------------------------------------------------------------------------------------------

    def stream(self, number: int, model: str, request: EngineRequest) -> None:
        self.streams[number] = asyncio.create_task(self.forward_events(number, model, request))

    def follow_cache(self, number: int, model: str) -> None:
        self.streams[number] = asyncio.create_task(self.forward_changes(number, model))

    async def forward_changes(self, number: int, model: str) -> None:
        backend = next(each.backend for each in self.serving.local_models if each.backend.name == model)
        async with aclosing(backend.follow_cache()) as changes:
            async for change in changes:
                self.put(number, change)

    def cancel(self, number: int) -> None:
        if (task := self.streams.pop(number, None)) is not None:
            task.cancel()

    async def forward_events(self, number: int, model: str, request: EngineRequest) -> None:
        backend = next(each.backend for each in self.serving.local_models if each.backend.name == model)
        try:
            async with aclosing(backend.stream(request)) as events:
                async for event in events:
                    self.put(number, event)
        except BackendError as error:
            self.put(number, (error.kind, str(error), error.retry_after, error.started))
        self.streams.pop(number, None)

    async def profile(self, model: str, wanted: ProfileRequest | None) -> Path:
        backend = next(each.backend for each in self.serving.local_models if each.backend.name == model)
        assert isinstance(backend, EngineProcess)
        return await backend.profile(wanted)

    async def control(self, model: str, action: str, *arguments: Any) -> None:
        backend = next(each.backend for each in self.serving.local_models if each.backend.name == model)
        await backend.control(action, *arguments)

    def put(self, number: int, found: Any) -> None:
        """Events of one engine step are sent in one message."""
        if not self.pending_events:
            asyncio.get_running_loop().call_soon(self.flush)
        self.pending_events.append((number, found))

    def flush(self) -> None:
        self.send(Events(self.pending_events))
        self.pending_events = []

    def shut_down(self) -> None:
        """The process is gone: cancel its requests, release its limits."""
        for task in (*self.streams.values(), *self.calls):
            task.cancel()
        for admission in self.admissions.values():
            admission.__exit__(None, None, None)
        for meter in self.meters.values():
            meter.release()
        self.writer.transport.abort()
        self.process.kill()


@dataclass
class EngineHost:
    """Runs API processes until a signal; then drains them, as with one process."""

    serving: Serving
    spec: APIProcessConfig
    listening: socket.socket
    notice: float
    api_processes: set[APIProcessHandle] = field(default_factory=set)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    failed: bool = False  # a process ended before it was ready: a restart would end too

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        await self.serving.start()
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self.stop, sign)
        if not has_terminal():  # the API processes look at the files themselves, within a second
            loop.add_signal_handler(signal.SIGHUP, self.serving.check_files)
        try:
            self.listening.listen(2048)
            models = [
                (each.backend.card, PromptProcessor(each.backend.name, each.backend.prompt_tokenizer).packed)
                for each in self.local_models
            ]
            setup = encode_frame((sys.path, {**vars(self.spec), "models": tuple(models)}))
            self.tasks = [asyncio.create_task(self.supervise(setup)) for _ in range(self.spec.processes)]
            reports = asyncio.create_task(self.report())
            await self.stopping.wait()
            log.info("shutting down", extra={"seconds": self.spec.drain_seconds})
            for api_process in self.api_processes:
                api_process.send(Drain(self.notice))
            self.listening.close()  # the API processes have copies of their own
            await asyncio.wait(self.tasks, timeout=self.spec.drain_seconds + self.notice + CLOSE_GRACE_S)
            reports.cancel()
            for api_process in list(self.api_processes):
                api_process.shut_down()
            log.info("shut down")
        finally:
            await self.serving.close()
        if self.failed:
            raise LMWorksError("an API process could not be started: see its log")

    @property
    def local_models(self) -> list[Any]:
        return self.serving.local_models

    def stop(self, sign: int) -> None:
        if self.stopping.is_set():
            os._exit(128 + sign)  # the other processes see their sockets close, and end
        self.notice = self.notice if sign == signal.SIGTERM else 0.0
        self.stopping.set()

    async def supervise(self, setup: bytes) -> None:
        """Restarts an API process until the server stops."""
        while not self.stopping.is_set():
            code = await self.run_process(setup)
            if not self.stopping.is_set():
                log.error("API process ended", extra={"exit_code": code})
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), RESTART_DELAY_S)

    async def run_process(self, setup: bytes) -> int:
        process, reader, writer = await spawn("lmworks.serve.api_process", inherit=(self.listening.fileno(),))
        api_process = APIProcessHandle(self.serving, process, writer)
        self.api_processes.add(api_process)
        writer.write(setup)
        try:
            while True:
                api_process.call(await read_frame(reader))
        except ENDED:
            pass
        finally:
            self.api_processes.discard(api_process)
            api_process.shut_down()
        if not api_process.metrics and not self.stopping.is_set():
            self.failed = True
            self.stopping.set()
        return await asyncio.to_thread(process.wait)

    async def report(self) -> None:
        while True:
            states = {each.backend.name: each.backend.state for each in self.local_models}
            for api_process in self.api_processes:
                others = [
                    metric for other in self.api_processes if other is not api_process for metric in other.metrics
                ]
                api_process.send(StateReport(states, others))
            await asyncio.sleep(STATE_INTERVAL_S)
