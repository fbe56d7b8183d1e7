"""An engine in a supervised process: a crash or hang of the engine does not affect the API.

    API ── Submit, Cancel ──────────▶ engine_loop: add, cancel, step
    API ◀── EngineReady, StepReport ───

When the process dies or its loop fails, all open requests fail at once and it is restarted, with exponential backoff.
When it has work and takes no step it is reported as stuck (`state.stuck`), and later killed and restarted. Grammars
that are being compiled do not count as work: they have a timeout of their own. While a profile is being written no step
is expected. When the API dies, the socket closes and the engine process ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..record.oom import is_oom_message, oom_kills
from ..spec import LMWorksError, SpecError
from .backend import BackendError, EngineRequest, Event, EventQueue, ModelCard, ProfileRequest, PromptTokenizer, State
from .cache_events import CacheChange, CacheKeys
from .channel import (
    ENDED,
    Cancel,
    Control,
    ControlReply,
    EngineFailed,
    EngineReady,
    Factory,
    LoadEngine,
    Profile,
    ProfileReport,
    StepReport,
    Submit,
    encode_frame,
    read_frame,
    spawn,
    unpack_tokenizer,
)
from .limits import APIError

log = logging.getLogger("lmworks.serve")

TICK_S = 0.25  # interval of the watchdog
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 30.0  # restart backoff: doubled each time
STEADY_S = 60.0  # a process that lasted so long resets the backoff
SHUTTING_DOWN = "the server is shutting down"
MAX_COMPILING = 64  # requests of one key that may wait for their grammars
MAX_UNSENT_BYTES = 64 * 2**20  # bytes in the socket's write buffer: a hung process must not fill memory


@dataclass(frozen=True)
class StallTimeouts:
    """Seconds of work without a step."""

    stuck: float = 30.0  # after which the backend is not healthy
    kill: float = 120.0  # after which its process is restarted (0: never)


@dataclass(eq=False)
class ProcessHandle:
    """One engine process."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    started: float = field(default_factory=time.monotonic)
    oom_kills: int = field(default_factory=oom_kills)  # of the kernel, when it was started
    ready: float = 0.0  # when it reported ready
    steps: int = 0
    cancelling: bool = False  # it was told of a cancelled request, and has not reported since
    profiling: bool = False  # a profiler is being started, or its trace written: no step is taken meanwhile
    exit_reason: str = ""  # what it reported, or why it was killed
    spec_error: bool = False  # the model's spec was wrong


class EngineProcess:
    """A backend: see `serve.backend`. `factory` makes the engine, in the process."""

    def __init__(self, name: str, factory: Factory, stall_timeouts: StallTimeouts | None = None) -> None:
        self.name = name
        self.stall_timeouts = stall_timeouts or StallTimeouts()
        self.factory = pickle.dumps(factory)
        self.request_ids = itertools.count()
        self.queues: dict[int, EventQueue] = {}
        self.unfinished: set[int] = set()  # requests that the process has not finished
        self.compiling: dict[int, EngineRequest] = {}  # of those, the ones whose grammar is not compiled yet
        self.all_closed = asyncio.Event()  # set while no request is open
        self.handle: ProcessHandle | None = None
        self.supervisor: asyncio.Task[None] | None = None
        self.first_ready: asyncio.Future[None] | None = None  # resolved by the first EngineReady
        self.ready_message: EngineReady | None = None
        self.loaded_tokenizer: PromptTokenizer | None = None
        self.created = int(time.time())
        self.draining = False
        self.closed = asyncio.Event()
        self.stalled = 0.0
        self.restarts = 0
        self.ooms = 0
        self.last_error: str | None = None
        self.startup_s = 1.0  # of the last start
        self.restart_delay = FIRST_DELAY_S  # before the next start
        self.expected_ready = 0.0  # when it will probably be ready again
        self.metrics: dict[str, Any] = {}
        self.cache_keys = CacheKeys()
        self.asleep = False
        self.adapters: tuple[str, ...] = ()  # that there are now
        self.changed_adapters: dict[str, Path | None] = {}  # since the start, for a new process; None: unloaded
        self.control_replies: dict[int, asyncio.Future[str]] = {}  # what was wrong, by the number of the operation
        self.trace: Path | None = None  # while it is profiled: what will be written
        self.ended_profile: tuple[Path, str] | None = None  # a trace that ended at its limit, and why it is not written
        self.profile_reply: asyncio.Future[str] | None = None  # why it could not be started or ended, once that is over

    # --- state --------------------------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        if self.ready_message is None:
            raise LMWorksError(f"the engine of {self.name!r} has not been started")
        ready = self.ready_message
        return ModelCard(
            self.name,
            self.created,
            ready.context,
            ready.vocab,
            adapters=self.adapters,
            max_seqs=ready.max_seqs,
            hidden=ready.hidden,
            scalar_head=ready.scalar_head,
            block_size=ready.block_size,
            eos=ready.eos,
            transfer=ready.transfer,
        )

    @property
    def prompt_tokenizer(self) -> PromptTokenizer:
        if self.loaded_tokenizer is None:
            raise LMWorksError(f"the engine of {self.name!r} has not been started")
        return self.loaded_tokenizer

    @property
    def ready(self) -> bool:
        return self.ready_process() is not None and not self.draining

    @property
    def state(self) -> State:
        return State(
            alive=self.handle is not None and self.handle.process.poll() is None,
            ready=self.ready,
            open=len(self.queues),
            stalled=self.stalled,
            stuck=self.stalled >= self.stall_timeouts.stuck,
            restarts=self.restarts,
            ooms=self.ooms,
            last_error=self.last_error,
            draining=self.draining,
            asleep=self.asleep,
            adapters=self.adapters,
            metrics=self.metrics,
        )

    @property
    def retry_after(self) -> float:
        return max(1, math.ceil(self.expected_ready - time.monotonic()))

    # --- requests -----------------------------------------------------------------------------------------

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        number, queue = self.submit(request)
        finished = False
        try:
            while not finished:
                for event in await queue.get():
                    finished = event.final is not None
                    yield event
        finally:
            self.close_request(number)

    def submit(self, request: EngineRequest) -> tuple[int, EventQueue]:
        if self.draining or self.closed.is_set():
            raise BackendError("dead", SHUTTING_DOWN, self.retry_after)
        handle = self.ready_process()
        if handle is None:
            raise BackendError("dead", "the engine is being restarted", self.retry_after)
        if self.asleep:
            raise BackendError("dead", f"the engine of {self.name!r} sleeps: POST /wake_up wakes it")
        if handle.writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise BackendError("busy", "the engine does not keep up with what it is sent", 1.0)
        if request.params.structured and self.pending_grammars(request) > MAX_COMPILING:
            raise BackendError("busy", f"{MAX_COMPILING} grammars of this key wait to be compiled already", 1.0)
        number, queue = next(self.request_ids), EventQueue(request)
        try:
            handle.writer.write(encode_frame(Submit(number, request)))
        except RecursionError:
            raise BackendError("refused", "the request is nested too deep to be passed on") from None
        self.queues[number] = queue
        self.unfinished.add(number)
        self.all_closed.clear()
        if request.params.structured:
            self.compiling[number] = request
            self.set_timer(request.compile_seconds, self.on_compile_timeout, number, queue)
        else:
            self.set_timer(request.queue_seconds, self.on_queue_timeout, number, queue)
        self.set_timer(request.request_seconds, self.on_request_timeout, number, queue)
        return number, queue

    def pending_grammars(self, request: EngineRequest) -> int:
        """Grammars of this key or address in compilation, with this one. Prompts of one request share one."""
        waiting = (each for each in self.compiling.values() if each.share == request.share)
        return len({id(each.params) for each in (request, *waiting)})

    def set_timer(
        self, seconds: float, what: Callable[[int, EventQueue], None], number: int, queue: EventQueue
    ) -> None:
        """0: never."""
        if seconds:
            queue.timers.append(asyncio.get_running_loop().call_later(seconds, what, number, queue))

    def close_request(self, number: int) -> None:
        """Cancels the request in the engine, if it has not finished."""
        queue = self.queues.pop(number)
        for timer in queue.timers:
            timer.cancel()
        if not self.queues:
            self.all_closed.set()
        handle = self.ready_process()
        if number in self.unfinished and handle is not None:
            handle.writer.write(encode_frame(Cancel(number)))
            handle.cancelling = True
        self.unfinished.discard(number)
        self.compiling.pop(number, None)

    def ready_process(self) -> ProcessHandle | None:
        """The process, where it is ready and connected."""
        handle = self.handle
        return handle if handle is not None and handle.ready and not handle.writer.is_closing() else None

    def on_compile_timeout(self, number: int, queue: EventQueue) -> None:
        if number in self.compiling:
            seconds = queue.request.compile_seconds
            queue.fail(
                "timeout", f"the grammar of the answer was not compiled within {seconds:g} s", math.ceil(seconds)
            )

    def on_queue_timeout(self, _: int, queue: EventQueue) -> None:
        if not queue.started:
            seconds = queue.request.queue_seconds
            queue.fail("timeout", f"the request waited {seconds:g} s and could not be started", math.ceil(seconds))

    def on_request_timeout(self, _: int, queue: EventQueue) -> None:
        queue.fail("timeout", f"the request was not finished within {queue.request.request_seconds:g} s")

    def fail_all(self, message: str, retry_after: float | None) -> None:
        for queue in self.queues.values():
            queue.fail("dead", message, retry_after)

    async def control(self, action: str, *arguments: Any) -> None:
        handle = self.ready_process()
        if handle is None:
            raise BackendError("dead", "the engine is being restarted", self.retry_after)
        number = next(self.request_ids)
        reply = self.control_replies[number] = asyncio.get_running_loop().create_future()
        handle.writer.write(encode_frame(Control(number, action, arguments)))
        if error := await asyncio.shield(reply):  # a client that leaves cancels nothing
            raise APIError(409, "refused", error)
        if action in ("load_adapter", "unload_adapter"):
            name, *folder = arguments
            self.changed_adapters[name] = folder[0] if folder else None

    def on_control_reply(self, reply: ControlReply) -> None:
        self.adapters, self.asleep = reply.adapters, reply.asleep
        waiting = self.control_replies.pop(reply.number, None)
        if waiting is not None:
            waiting.set_result(reply.error)
        elif reply.error:
            log.error("an adapter is not as before the restart", extra={"model": self.name, "reason": reply.error})

    def repeat_adapters(self, handle: ProcessHandle, loaded: tuple[str, ...]) -> None:
        """In a new process: those that were loaded or unloaded since the start."""
        for name, folder in self.changed_adapters.items():
            if folder is not None or name in loaded:
                action = ("unload_adapter", (name,)) if folder is None else ("load_adapter", (name, folder))
                handle.writer.write(encode_frame(Control(next(self.request_ids), *action)))

    def follow_cache(self) -> AsyncGenerator[CacheChange, None]:
        return self.cache_keys.follow()

    async def profile(self, wanted: ProfileRequest | None) -> Path:
        """Returns when steps are recorded, or when all of the trace is written."""
        handle = self.ready_process()
        if handle is None:
            raise BackendError("dead", "the engine is being restarted", self.retry_after)
        if self.profile_reply is not None or handle.profiling:
            raise BackendError("busy", f"a profile of {self.name!r} is being started or written", 1.0)
        if wanted is None and self.trace is None and self.ended_profile is not None:  # by its limit
            ended, self.ended_profile = self.ended_profile, None
            return self.written(*ended)
        if wanted is not None and self.trace is not None:
            raise BackendError("refused", f"{self.name!r} is being profiled already; /stop_profile ends it")
        if wanted is None and self.trace is None:
            raise BackendError("refused", f"{self.name!r} is not being profiled; /start_profile begins it")
        message = Profile(None)
        if wanted is not None:
            self.trace = wanted.folder.absolute() / f"{self.name}-{time.strftime('%Y%m%d-%H%M%S')}.json.gz"
            self.ended_profile = None
            message = Profile(self.trace, wanted.steps, wanted.seconds)
        trace = self.trace
        assert trace is not None
        self.profile_reply = asyncio.get_running_loop().create_future()
        handle.writer.write(encode_frame(message))
        return self.written(trace, await asyncio.shield(self.profile_reply))  # a client that leaves cancels nothing

    def written(self, trace: Path, error: str) -> Path:
        if error:
            raise APIError(500, "profile_failed", f"{self.name!r} was not profiled: {error}")
        return trace

    def on_profile_report(self, report: ProfileReport, handle: ProcessHandle) -> None:
        handle.profiling = report.busy
        if report.busy:
            return
        if self.profile_reply is None and self.trace is not None and not report.recording:
            log.warning("profile ended at its limit", extra={"model": self.name, "trace": str(self.trace)})
            self.ended_profile = self.trace, report.error
        self.end_profile_call(report.error, report.recording)

    def end_profile_call(self, error: str, recording: bool = False) -> None:
        self.trace = self.trace if recording else None
        reply, self.profile_reply = self.profile_reply, None
        if reply is not None:
            reply.set_result(error)

    # --- the process --------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.first_ready = asyncio.get_running_loop().create_future()
        self.supervisor = asyncio.create_task(self.supervise(), name=f"supervise {self.name}")
        try:
            await asyncio.shield(self.first_ready)
        except BaseException:
            await self.close()
            raise

    async def supervise(self) -> None:
        """Restarts the process until this is closed, or the first start fails."""
        assert self.first_ready is not None
        while not self.closed.is_set():
            error = await self.run_process()
            if self.closed.is_set():
                return
            self.last_error = str(error)
            if not self.first_ready.done():
                self.first_ready.set_exception(error)
                return
            log.error("engine process ended: %s", error, extra={"model": self.name, "restarts": self.restarts})
            self.restarts += 1
            self.ooms += is_oom_message(self.last_error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.closed.wait(), self.restart_delay)

    async def run_process(self) -> LMWorksError:
        """Runs one process to its end and returns why it ended; its open requests fail."""
        try:
            handle = self.handle = ProcessHandle(*await spawn("lmworks.serve", "engine"))
        except OSError as error:
            return LMWorksError(f"no process could be started: {error}")
        handle.writer.write(encode_frame(LoadEngine(sys.path, self.factory)))
        watchdog = asyncio.create_task(self.watchdog(handle))
        try:
            await self.read_messages(handle)
        except ENDED:
            pass
        except Exception as error:
            log.exception("invalid message from the engine process", extra={"model": self.name})
            handle.exit_reason = f"{type(error).__name__}: {error}"
        watchdog.cancel()
        self.handle, self.stalled = None, 0.0
        self.cache_keys.apply(CacheChange(snapshot=True))  # a new process has none of them
        self.end_profile_call("the engine stopped")
        for reply in self.control_replies.values():
            reply.set_result("the engine stopped")
        self.control_replies.clear()
        self.unfinished.clear()
        self.compiling.clear()
        lasted = time.monotonic() - handle.started
        self.restart_delay = FIRST_DELAY_S if lasted > STEADY_S else min(2 * self.restart_delay, MAX_DELAY_S)
        self.expected_ready = time.monotonic() + self.restart_delay + self.startup_s
        self.fail_all("the engine stopped while it worked on this request", self.retry_after)
        exit_reason = await reap(handle)
        return SpecError(exit_reason) if handle.spec_error else LMWorksError(exit_reason)

    async def read_messages(self, handle: ProcessHandle) -> None:
        """Until the socket is closed."""
        while not self.closed.is_set():
            message = await read_frame(handle.reader)
            if isinstance(message, StepReport):
                self.on_report(message, handle)
            elif isinstance(message, ControlReply):
                self.on_control_reply(message)
            elif isinstance(message, ProfileReport):
                self.on_profile_report(message, handle)
            elif isinstance(message, EngineReady):
                await self.on_ready(message, handle)
            elif isinstance(message, EngineFailed):
                handle.exit_reason, handle.spec_error = message

    async def on_ready(self, ready_message: EngineReady, handle: ProcessHandle) -> None:
        assert self.first_ready is not None
        if self.ready_message is None:
            tokenizer = await asyncio.to_thread(unpack_tokenizer, ready_message.tokenizer)
            self.loaded_tokenizer = PromptTokenizer(
                tokenizer,
                ready_message.begin_of_text,
                ready_message.folder,
                ready_message.chat_template,
                ready_message.sentinels,
                ready_message.parsers,
            )
        self.ready_message, self.metrics = ready_message, {}
        self.adapters, self.asleep = ready_message.adapters, False
        self.repeat_adapters(handle, ready_message.adapters)
        handle.ready = time.monotonic()
        self.startup_s = handle.ready - handle.started
        log.info(
            "engine ready", extra={"model": self.name, "seconds": round(self.startup_s, 3), "restarts": self.restarts}
        )
        if not self.first_ready.done():
            self.first_ready.set_result(None)

    def on_report(self, report: StepReport, handle: ProcessHandle) -> None:
        handle.cancelling = False
        # Compiling takes no steps: while there is no other work, a report is a heartbeat.
        if report.steps != handle.steps or self.unfinished <= self.compiling.keys():
            handle.steps, self.stalled = report.steps, 0.0
        for number in report.compiled:
            if self.compiling.pop(number, None) is not None:
                queue = self.queues[number]
                self.set_timer(queue.request.queue_seconds, self.on_queue_timeout, number, queue)
        for number in report.started:
            if number in self.queues:
                self.queues[number].started = True
        for number, reason in report.refused:
            self.unfinished.discard(number)
            self.compiling.pop(number, None)
            if number in self.queues:
                self.queues[number].fail("refused", reason)
        for number, fields in report.events:
            event = Event(*fields)
            if event.final is not None:
                self.unfinished.discard(number)
            if number in self.queues:
                self.queues[number].put(event)
        if report.metrics is not None:
            self.metrics = report.metrics
        if report.cache is not None:
            self.cache_keys.apply(report.cache)

    async def watchdog(self, handle: ProcessHandle) -> None:
        """Counts time without a step tick by tick: time in which the API itself was blocked does not count."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            # Clients that give up must not hide a hang: an engine that is told so reports at once.
            waits = (self.unfinished or handle.cancelling) and not handle.profiling
            self.stalled = self.stalled + min(now - before, 2 * TICK_S) if waits else 0.0
            before = now
            if self.stall_timeouts.kill and self.stalled >= self.stall_timeouts.kill:
                handle.exit_reason = f"it had work and took no step for {self.stalled:.0f} s: killed"
                handle.process.kill()
                return

    # --- the end ------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> int:
        self.draining = True
        if self.queues:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.all_closed.wait(), seconds)
        left = len(self.queues)
        self.fail_all(SHUTTING_DOWN, None)
        return left

    async def close(self) -> None:
        self.closed.set()
        self.fail_all(SHUTTING_DOWN, None)
        if self.handle is not None:
            self.handle.writer.transport.abort()
        if self.supervisor is not None:
            await asyncio.wait([self.supervisor])


async def reap(handle: ProcessHandle) -> str:
    """Kills the process if it still runs; returns why it ended."""
    handle.writer.transport.abort()
    handle.process.kill()  # nothing happens to one that has ended
    code = await asyncio.to_thread(handle.process.wait)
    names = {each.value: each.name for each in signal.Signals}  # not of all that there are
    how = f"killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exit code {code}"
    if code == -signal.SIGKILL and oom_kills() > handle.oom_kills:
        how += ", as the kernel does when memory runs out (out of memory)"
    return handle.exit_reason or f"the engine's process ended: {how}"
