"""An engine in a process of its own, watched over: what kills or hangs it does not take the API along.

    API ── Submit, Cancel ──▶ engine_loop: add, cancel, step
    API ◀── Hello, Report ───

The process dies, or its loop fails: every open request hears so at once, and another process is started, later each
time it does not last. It has work and takes no step: `state.stuck`, and after a while it is killed, which is the case
before. Grammars that are being compiled are no work for the engine: they have a clock of their own. The API dies: the
process sees its wire end, and ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..spec import LMWorksError, SpecError
from .backend import Ask, BackendError, Event, ModelCard, State, Words
from .channel import Assignment, Cancel, Factory, Failed, Hello, Report, Submit, frame, receive, unpack_tokenizer
from .event_queue import Box

log = logging.getLogger("lmworks.serve")

TICK_S = 0.25  # how often it is looked whether the engine advances
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0  # before a process is started again; twice as long each time
STEADY_S = 60.0  # a process that lasted so long starts the pauses anew
SHUTTING_DOWN = "the server is shutting down"
COMPILING = 64  # requests of one key that may wait for their grammars
BACKLOG = 64 * 2**20  # bytes that a process may have left unread: one that hangs is not written to for ever
ENDED = (asyncio.IncompleteReadError, ConnectionError)


@dataclass(frozen=True)
class Patience:
    """Seconds of work without a step."""

    stuck: float = 30.0  # after which the backend is not healthy
    kill: float = 120.0  # after which its process is started anew (0: never)


@dataclass(eq=False)
class Life:
    """One process, from its start to its end."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    began: float = field(default_factory=time.monotonic)
    ready: float = 0.0  # when it said hello
    steps: int = 0
    why: str = ""  # it ended: what it said, or what was done to it
    usage: bool = False  # what it was asked to load is wrong


class EngineProcess:
    """A backend: see `serve.backend`. `factory` makes the engine, in the process."""

    def __init__(self, name: str, factory: Factory, patience: Patience | None = None) -> None:
        self.name = name
        self.patience = patience or Patience()
        self.factory = pickle.dumps(factory)
        self.numbers = itertools.count()
        self.boxes: dict[int, Box] = {}
        self.owed: set[int] = set()  # requests that the process has not finished; consumers may be behind
        self.compiling: dict[int, Ask] = {}  # those of them whose grammar is not compiled yet
        self.emptied = asyncio.Event()  # no request is open
        self.life: Life | None = None
        self.supervisor: asyncio.Task[None] | None = None
        self.first: asyncio.Future[None] | None = None  # the first hello
        self.hello: Hello | None = None
        self.speech: Words | None = None
        self.created = int(time.time())
        self.draining = False
        self.closed = asyncio.Event()
        self.stalled = 0.0
        self.restarts = 0
        self.last_error: str | None = None
        self.boot = 1.0  # seconds that the last start took
        self.pause = FIRST_PAUSE_S  # before the next one
        self.expected = 0.0  # when it will be ready again, as far as one can tell
        self.metrics: dict[str, Any] = {}

    # --- what it is and how it fares ----------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        if self.hello is None:
            raise LMWorksError(f"the engine of {self.name!r} has not been started")
        context, vocab, max_seqs, adapters, *_ = self.hello
        return ModelCard(self.name, self.created, context, vocab, adapters=adapters, max_seqs=max_seqs)

    @property
    def words(self) -> Words:
        if self.speech is None:
            raise LMWorksError(f"the engine of {self.name!r} has not been started")
        return self.speech

    @property
    def ready(self) -> bool:
        return self.hearing() is not None and not self.draining

    @property
    def state(self) -> State:
        return State(
            alive=self.life is not None and self.life.process.poll() is None,
            ready=self.ready,
            open=len(self.boxes),
            stalled=self.stalled,
            stuck=self.stalled >= self.patience.stuck,
            restarts=self.restarts,
            last_error=self.last_error,
            draining=self.draining,
            metrics=self.metrics,
        )

    @property
    def retry_after(self) -> float:
        return max(1, math.ceil(self.expected - time.monotonic()))

    # --- requests -----------------------------------------------------------------------------------------

    async def stream(self, ask: Ask) -> AsyncGenerator[Event, None]:
        number, box = self.submit(ask)
        finished = False
        try:
            while not finished:
                for event in await box.take():
                    finished = event.final is not None
                    yield event
        finally:
            self.leave(number)

    def submit(self, ask: Ask) -> tuple[int, Box]:
        if self.draining or self.closed.is_set():
            raise BackendError("dead", SHUTTING_DOWN, self.retry_after)
        life = self.hearing()
        if life is None:
            raise BackendError("dead", "the engine is being started again", self.retry_after)
        if life.writer.transport.get_write_buffer_size() > BACKLOG:
            raise BackendError("busy", "the engine does not keep up with what it is sent", 1.0)
        if ask.params.structured and self.grammars_of(ask) > COMPILING:
            raise BackendError("busy", f"{COMPILING} grammars of this key wait to be compiled already", 1.0)
        number, box = next(self.numbers), Box(ask)
        try:
            life.writer.write(frame(Submit(number, ask)))
        except RecursionError:
            raise BackendError("refused", "the request is nested too deep to be passed on") from None
        self.boxes[number] = box
        self.owed.add(number)
        self.emptied.clear()
        if ask.params.structured:
            self.compiling[number] = ask
            self.after(ask.compile_seconds, self.not_compiled, number, box)
        else:
            self.after(ask.queue_seconds, self.waited, number, box)
        self.after(ask.request_seconds, self.overran, number, box)
        return number, box

    def grammars_of(self, ask: Ask) -> int:
        """How many would wait for whoever asks. The prompts of one request have the same."""
        waiting = (each for each in self.compiling.values() if each.share == ask.share)
        return len({id(each.params) for each in (ask, *waiting)})

    def after(self, seconds: float, what: Callable[[int, Box], None], number: int, box: Box) -> None:
        """0: never."""
        if seconds:
            box.timers.append(asyncio.get_running_loop().call_later(seconds, what, number, box))

    def leave(self, number: int) -> None:
        """Nobody waits for this request any more."""
        box = self.boxes.pop(number)
        for timer in box.timers:
            timer.cancel()
        if not self.boxes:
            self.emptied.set()
        life = self.hearing()
        if number in self.owed and life is not None:
            life.writer.write(frame(Cancel(number)))
        self.owed.discard(number)
        self.compiling.pop(number, None)

    def hearing(self) -> Life | None:
        """The process, where it is there and ready."""
        life = self.life
        return life if life is not None and life.ready and not life.writer.is_closing() else None

    def not_compiled(self, number: int, box: Box) -> None:
        if number in self.compiling:
            seconds = box.ask.compile_seconds
            box.fail("timeout", f"the grammar of the answer was not compiled within {seconds:g} s", math.ceil(seconds))

    def waited(self, _: int, box: Box) -> None:
        if not box.started:
            seconds = box.ask.queue_seconds
            box.fail("timeout", f"the request waited {seconds:g} s and could not be started", math.ceil(seconds))

    def overran(self, _: int, box: Box) -> None:
        box.fail("timeout", f"the request was not finished within {box.ask.request_seconds:g} s")

    def fail_all(self, message: str, retry_after: float | None) -> None:
        for box in self.boxes.values():
            box.fail("dead", message, retry_after)

    # --- the process --------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.first = asyncio.get_running_loop().create_future()
        self.supervisor = asyncio.create_task(self.supervise(), name=f"supervise {self.name}")
        try:
            await asyncio.shield(self.first)
        except BaseException:
            await self.close()
            raise

    async def supervise(self) -> None:
        """One process after the other, until it is closed or the first does not come up."""
        assert self.first is not None
        while not self.closed.is_set():
            error = await self.live()
            if self.closed.is_set():
                return
            self.last_error = str(error)
            if not self.first.done():
                self.first.set_exception(error)
                return
            log.error("engine process ended: %s", error, extra={"model": self.name, "restarts": self.restarts})
            self.restarts += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self.closed.wait(), self.pause)

    async def live(self) -> LMWorksError:
        """One process, from its start to its end; why it ended. Those who wait for it hear so at once."""
        try:
            life = self.life = await self.begin()
        except OSError as error:
            return LMWorksError(f"no process could be started: {error}")
        watch = asyncio.create_task(self.watch(life))
        try:
            await self.listen(life)
        except ENDED:
            pass
        except Exception as error:
            log.exception("what the engine's process said was not understood", extra={"model": self.name})
            life.why = f"{type(error).__name__}: {error}"
        watch.cancel()
        self.life, self.stalled = None, 0.0
        self.owed.clear()
        self.compiling.clear()
        lasted = time.monotonic() - life.began
        self.pause = FIRST_PAUSE_S if lasted > STEADY_S else min(2 * self.pause, LONGEST_PAUSE_S)
        self.expected = time.monotonic() + self.pause + self.boot
        self.fail_all("the engine stopped while it worked on this request", self.retry_after)
        why = await end(life)
        return SpecError(why) if life.usage else LMWorksError(why)

    async def begin(self) -> Life:
        """In a session of its own: Ctrl-C is for the API, which then closes it."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "lmworks.serve", str(theirs.fileno())]
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(frame(Assignment(sys.path, self.factory)))
        return Life(process, reader, writer)

    async def listen(self, life: Life) -> None:
        """Until the process has nothing more to say."""
        while not self.closed.is_set():
            message = await receive(life.reader)
            if isinstance(message, Report):
                self.take(message, life)
            elif isinstance(message, Hello):
                await self.greet(message, life)
            elif isinstance(message, Failed):
                life.why, life.usage = message

    async def greet(self, hello: Hello, life: Life) -> None:
        assert self.first is not None
        if self.hello is None:
            tokenizer = await asyncio.to_thread(unpack_tokenizer, hello.tokenizer)
            self.speech = Words(tokenizer, hello.begin_of_text, hello.folder, hello.chat_template)
        self.hello, self.metrics = hello, {}
        life.ready = time.monotonic()
        self.boot = life.ready - life.began
        log.info("engine ready", extra={"model": self.name, "seconds": round(self.boot, 3), "restarts": self.restarts})
        if not self.first.done():
            self.first.set_result(None)

    def take(self, report: Report, life: Life) -> None:
        # Compiling needs no step: while there is nothing else to do, a report shows that the process is well.
        if report.steps != life.steps or self.owed <= self.compiling.keys():
            life.steps, self.stalled = report.steps, 0.0
        for number in report.compiled:
            if self.compiling.pop(number, None) is not None:
                box = self.boxes[number]
                self.after(box.ask.queue_seconds, self.waited, number, box)
        for number in report.started:
            if number in self.boxes:
                self.boxes[number].started = True
        for number, reason in report.refused:
            self.owed.discard(number)
            self.compiling.pop(number, None)
            if number in self.boxes:
                self.boxes[number].fail("refused", reason)
        for number, fields in report.events:
            event = Event(*fields)
            if event.final is not None:
                self.owed.discard(number)
            if number in self.boxes:
                self.boxes[number].put(event)
        if report.metrics is not None:
            self.metrics = report.metrics

    async def watch(self, life: Life) -> None:
        """Time without a step is counted tick by tick: an API that was busy itself has not been watching."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.stalled = self.stalled + min(now - before, 2 * TICK_S) if self.owed else 0.0
            before = now
            if self.patience.kill and self.stalled >= self.patience.kill:
                life.why = f"it had work and took no step for {self.stalled:.0f} s: killed"
                life.process.kill()
                return

    # --- the end ------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> int:
        self.draining = True
        if self.boxes:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.emptied.wait(), seconds)
        left = len(self.boxes)
        self.fail_all(SHUTTING_DOWN, None)
        return left

    async def close(self) -> None:
        self.closed.set()
        self.fail_all(SHUTTING_DOWN, None)
        if self.life is not None:
            self.life.writer.transport.abort()
        if self.supervisor is not None:
            await asyncio.wait([self.supervisor])


async def end(life: Life) -> str:
    """Makes sure that the process is gone, and says why it went. It has nothing to put in order."""
    life.writer.transport.abort()
    life.process.kill()  # nothing happens to one that has ended
    code = await asyncio.to_thread(life.process.wait)
    names = {each.value: each.name for each in signal.Signals}  # not of all that there are
    how = f"killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exit code {code}"
    return life.why or f"the engine's process ended: {how}"
