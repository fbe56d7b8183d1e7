"""Worker processes for what would hold up the event loop: parsing large bodies, templates, tokenizing long texts.

A thread would not do: parsers and tokenizers hold the interpreter's lock while they work. Processes are started when
they are first needed, and again when one is lost. Keys take turns: one with a hundred long texts does not make another
wait for all of them.

    ids = await workers.run(key, local, encode, texts)       # encode(speech, texts), in another process
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from ..engine.chat_template import Chat
from .backend import Words
from .channel import Wire, frame, pack_tokenizer, receive, unpack_tokenizer
from .limits import BREATHER_S, Refusal, too_many

WORK_SECONDS = 30.0  # after which the request is given up, and its process with it
MOST_WAITING = 1024  # pieces of work
ENDED = (asyncio.IncompleteReadError, ConnectionError)

Found = TypeVar("Found")


@dataclass
class Speech:
    """The tokenizer and the chat template of a model, in whichever process."""

    name: str
    words: Words

    @cached_property
    def chat(self) -> Chat:
        return self.words.chat()

    @cached_property
    def packed(self) -> bytes:
        """For another process: a pickled tokenizer would forget its settings."""
        return pickle.dumps((self.name, replace(self.words, tokenizer=None), pack_tokenizer(self.words.tokenizer)))

    @classmethod
    def unpacked(cls, packed: bytes) -> Speech:
        name, words, tokenizer = pickle.loads(packed)
        return cls(name, replace(words, tokenizer=unpack_tokenizer(tokenizer)))


@dataclass(eq=False)
class Worker:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    knows: set[str] = field(default_factory=set)  # models

    async def ask(self, speech: Speech | None, work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        name = speech.name if speech is not None else None
        if speech is not None and name not in self.knows:
            self.writer.write(frame(speech.packed))
            self.knows.add(speech.name)
        self.writer.write(frame((name, work, given)))
        await self.writer.drain()
        return await receive(self.reader)

    def end(self) -> None:
        self.writer.transport.abort()
        self.process.kill()
        self.process.wait()


class Workers:
    def __init__(self, most: int | None = None) -> None:
        self.most = most or min(4, max(2, (os.cpu_count() or 1) // 2))
        self.all: set[Worker] = set()
        self.idle: list[Worker] = []
        self.busy: Counter[str] = Counter()  # pieces of work under way, by key
        self.waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self.closed = False

    async def run(self, key: str, speech: Speech | None, work: Callable[..., Found], *given: Any) -> Found:
        """`work(speech, *given)`, a function of a module, and its result; or what it raised, as a Refusal."""
        await self.turn(key)
        # A caller that is gone does not stop a process in the middle of its work.
        task = asyncio.create_task(self.done(key, speech, work, given))
        found: Found = await asyncio.shield(task)
        return found

    async def done(self, key: str, speech: Speech | None, work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        try:
            worker = self.idle.pop() if self.idle else await self.begin()
            try:
                async with asyncio.timeout(WORK_SECONDS):
                    found, refused = await worker.ask(speech, work, given)
            except BaseException as error:
                self.all.discard(worker)
                worker.end()
                if isinstance(error, TimeoutError):
                    message = f"it took more than {WORK_SECONDS:g} s to read the request"
                    raise Refusal(400, "limit_exceeded", message) from None
                if isinstance(error, ENDED):
                    raise RuntimeError("a worker process was lost") from None
                raise
            self.idle.append(worker)
        finally:
            self.next(key)
        if refused is not None:
            raise Refusal(*refused)
        return found

    async def warm(self) -> None:
        """One is there before it is needed: to start it takes a second."""
        self.idle.append(await self.begin())

    async def begin(self) -> Worker:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "lmworks.serve.worker", str(theirs.fileno())]

        def start() -> subprocess.Popen[bytes]:
            with theirs:
                return subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
                )

        process = await asyncio.to_thread(start)
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(frame(sys.path))
        worker = Worker(process, reader, writer)
        self.all.add(worker)
        return worker

    # --- turns --------------------------------------------------------------------------------------------

    async def turn(self, key: str) -> None:
        if self.closed:
            raise Refusal(503, "shutting_down", "the server is shutting down", retry_after=1)
        if self.busy.total() < self.most and not self.waiting:
            self.busy[key] += 1
            return
        if sum(map(len, self.waiting.values())) >= MOST_WAITING:
            raise too_many("queue_full", "too many long requests wait to be read", BREATHER_S)
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.next(key)  # it had come just now
            raise

    def next(self, key: str) -> None:
        """A piece of work has ended. Of those that wait, the key with the least under way comes first."""
        self.busy[key] -= 1
        while self.waiting and self.busy.total() < self.most:
            chosen = min(self.waiting, key=lambda each: self.busy[each])
            turns = self.waiting.pop(chosen)
            turn = turns.popleft()
            if turns:
                self.waiting[chosen] = turns  # behind the others
            if not turn.done():
                self.busy[chosen] += 1
                turn.set_result(None)

    def close(self) -> None:
        self.closed = True
        for worker in self.all:
            worker.end()
        self.all.clear()
        self.idle.clear()


# --- the process ------------------------------------------------------------------------------------------


def serve(wire: Wire) -> None:
    """What a worker process does, until the other end of its wire is closed."""
    from .errors import refusal_of

    models: dict[str, Speech] = {}
    messages = wire.messages()
    sys.path[:] = next(messages)
    for message in messages:
        if isinstance(message, bytes):
            speech = Speech.unpacked(message)
            models[speech.name] = speech
            continue
        name, work, given = message
        try:
            answer: tuple[Any, Any] = (work(models.get(name), *given), None)
        except BaseException as error:  # a panic of a library is no Exception
            refusal = refusal_of(error if isinstance(error, Exception) else RuntimeError())
            answer = (None, (refusal.status, refusal.code, str(refusal), refusal.param, refusal.retry_after))
        wire.send(answer)
