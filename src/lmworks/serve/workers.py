"""Worker processes for work that would block the event loop: large bodies, chat templates, long texts.

Threads would not help: parsers and tokenizers hold the GIL. Processes are started when they are first needed, and again
when one is lost. Slots are shared fairly between keys: one with a hundred long texts does not delay another by all of
them.

    ids = await workers.run(key, processor, encode, texts)   # encode(processor, texts), in a worker process
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from ..data.chat_template import Chat
from .backend import PromptTokenizer
from .channel import ENDED, SocketChannel, encode_frame, pack_tokenizer, read_frame, spawn, unpack_tokenizer
from .limits import RETRY_S, APIError, rate_limit_error

WORK_SECONDS = 30.0  # after which the request fails, and its process is killed
MAX_WAITING = 1024  # tasks

Found = TypeVar("Found")


@dataclass
class PromptProcessor:
    """Tokenizer and chat template of a model; can be sent to another process."""

    name: str
    prompt_tokenizer: PromptTokenizer

    @cached_property
    def chat(self) -> Chat:
        return self.prompt_tokenizer.chat()

    @cached_property
    def packed(self) -> bytes:
        """For another process: a pickled tokenizer would lose its settings."""
        return pickle.dumps(
            (self.name, replace(self.prompt_tokenizer, tokenizer=None), pack_tokenizer(self.prompt_tokenizer.tokenizer))
        )

    @classmethod
    def unpacked(cls, packed: bytes) -> PromptProcessor:
        name, prompt_tokenizer, tokenizer = pickle.loads(packed)
        return cls(name, replace(prompt_tokenizer, tokenizer=unpack_tokenizer(tokenizer)))


@dataclass(eq=False)
class Worker:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    loaded_models: set[str] = field(default_factory=set)  # models

    async def call(
        self, processor: PromptProcessor | None, work: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        name = processor.name if processor is not None else None
        if processor is not None and name not in self.loaded_models:
            self.writer.write(encode_frame(processor.packed))
            self.loaded_models.add(processor.name)
        self.writer.write(encode_frame((name, work, arguments)))
        await self.writer.drain()
        return await read_frame(self.reader)

    def end(self) -> None:
        self.writer.transport.abort()
        self.process.kill()
        self.process.wait()


class WorkerPool:
    def __init__(self, max_workers: int | None = None) -> None:
        self.max_workers = max_workers or min(4, max(2, (os.cpu_count() or 1) // 2))
        self.all: set[Worker] = set()
        self.idle: list[Worker] = []
        self.busy: Counter[str] = Counter()  # pieces of work under way, by key
        self.waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self.closed = False

    async def run(
        self, key: str, processor: PromptProcessor | None, work: Callable[..., Found], *arguments: Any
    ) -> Found:
        """The result of `work(processor, *arguments)`, a module's function; its errors are raised as APIError."""
        await self.acquire_slot(key)
        # A client that disconnects does not interrupt a worker process.
        task = asyncio.create_task(self.run_in_worker(key, processor, work, arguments))
        found: Found = await asyncio.shield(task)
        return found

    async def run_in_worker(
        self, key: str, processor: PromptProcessor | None, work: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        try:
            worker = self.idle.pop() if self.idle else await self.spawn()
            try:
                async with asyncio.timeout(WORK_SECONDS):
                    found, refused = await worker.call(processor, work, arguments)
            except BaseException as error:
                self.all.discard(worker)
                worker.end()
                if isinstance(error, TimeoutError):
                    message = f"it took more than {WORK_SECONDS:g} s to read the request"
                    raise APIError(400, "limit_exceeded", message) from None
                if isinstance(error, ENDED):
                    raise RuntimeError("a worker process was lost") from None
                raise
            self.idle.append(worker)
        finally:
            self.release_slot(key)
        if refused is not None:
            raise APIError(*refused)
        return found

    async def warm(self) -> None:
        """Starts one before it is needed: that takes a second."""
        self.idle.append(await self.spawn())

    async def spawn(self) -> Worker:
        worker = Worker(*await spawn("lmworks.serve", "worker"))
        worker.writer.write(encode_frame(sys.path))
        self.all.add(worker)
        return worker

    # --- slots --------------------------------------------------------------------------------------------

    async def acquire_slot(self, key: str) -> None:
        if self.closed:
            raise APIError(503, "shutting_down", "the server is shutting down", retry_after=1)
        if self.busy.total() < self.max_workers and not self.waiting:
            self.busy[key] += 1
            return
        if sum(map(len, self.waiting.values())) >= MAX_WAITING:
            raise rate_limit_error("queue_full", "too many long requests wait to be read", RETRY_S)
        slot = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(key, deque()).append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self.release_slot(key)  # granted just now
            raise

    def release_slot(self, key: str) -> None:
        """Frees a slot; of the keys that wait, the one with the fewest slots gets it."""
        self.busy[key] -= 1
        while self.waiting and self.busy.total() < self.max_workers:
            chosen = min(self.waiting, key=lambda each: self.busy[each])
            slots = self.waiting.pop(chosen)
            slot = slots.popleft()
            if slots:
                self.waiting[chosen] = slots  # behind the others
            if not slot.done():
                self.busy[chosen] += 1
                slot.set_result(None)

    def close(self) -> None:
        self.closed = True
        for worker in self.all:
            worker.end()
        self.all.clear()
        self.idle.clear()


# --- the process ------------------------------------------------------------------------------------------


def serve(channel: SocketChannel) -> None:
    """The loop of a worker process, until the socket is closed."""
    from .errors import to_api_error

    models: dict[str, PromptProcessor] = {}
    messages = channel.messages()
    sys.path[:] = next(messages)
    for message in messages:
        if isinstance(message, bytes):
            processor = PromptProcessor.unpacked(message)
            models[processor.name] = processor
            continue
        name, work, arguments = message
        try:
            answer: tuple[Any, Any] = (work(models.get(name), *arguments), None)
        except BaseException as error:  # a panic of a library is no Exception
            api_error = to_api_error(error if isinstance(error, Exception) else RuntimeError())
            answer = (None, api_error.fields)
        channel.send(answer)
