"""An engine for asyncio: it steps in a thread of its own, and every consumer gets its deltas as they come.

    async with AsyncEngine(engine) as serving:
        async for delta in serving.stream(request):
            ...

Only that thread touches the engine until it is closed; consumers submit commands to it. A consumer that leaves (breaks
the loop, is cancelled) cancels its request. If the engine fails, all waiting and later consumers get the exception.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ..spec import LMWorksError, SpecError
from .core.engine import Engine
from .core.request import OutputDelta, Request
from .grammars.grammar import grammar

CLOSED = "the engine was closed"


@dataclass(frozen=True)
class Consumer:
    """The queue of a request's deltas, and its event loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[OutputDelta | BaseException] = field(default_factory=asyncio.Queue)


class AsyncEngine:
    def __init__(self, engine: Engine) -> None:
        engine.drive(self)
        self.engine = engine
        self.consumers: dict[int, Consumer] = {}  # by the id of the request
        self.commands: list[Callable[[], object]] = []
        self.changed = threading.Condition()  # guards commands, consumers, closing and failure
        self.closing = False
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self.run_loop, name="lmworks-engine", daemon=True)
        self.thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def stream(self, request: Request) -> AsyncIterator[OutputDelta]:
        """Deltas as they come; the last one carries the result. A request that cannot be served raises SpecError."""
        request.stream = True
        grammars = self.engine.runner.grammars
        if request.params.structured and grammars is not None:
            # Compiled outside the engine thread, as it may take a second.
            request.grammar = await asyncio.to_thread(lambda: grammars.compile(grammar(request.params)))
        consumer = Consumer(asyncio.get_running_loop())
        self.submit(lambda: self.add_request(request, consumer), request.id, consumer)
        finished = False
        try:
            while not finished:
                delta = await consumer.queue.get()
                if isinstance(delta, BaseException):
                    finished = True
                    raise LMWorksError(f"the request failed: {delta}") from delta
                finished = delta.result is not None
                if delta.result is not None and not request.sequences:
                    raise SpecError(delta.result.error or "the request was refused")
                yield delta
        finally:
            self.detach(request.id, finished)

    def add_request(self, request: Request, consumer: Consumer) -> None:
        """An error here fails this request alone."""
        try:
            self.engine.add(request)
        except Exception as error:
            send(consumer.loop, [(consumer, error)])

    def detach(self, request_id: int, finished: bool) -> None:
        """Remove the consumer; cancel the request if it has not finished."""
        with self.changed:
            self.consumers.pop(request_id, None)
            if not finished:
                self.commands.append(lambda: self.engine.cancel(request_id))
                self.changed.notify()

    def submit(self, command: Callable[[], object], request_id: int, consumer: Consumer) -> None:
        with self.changed:
            if self.failure is not None:
                raise LMWorksError(f"the engine has stopped: {self.failure}") from self.failure
            if request_id in self.consumers:
                raise SpecError(f"a request with id = {request_id} is running already")
            self.consumers[request_id] = consumer
            self.commands.append(command)
            self.changed.notify()

    def close(self) -> None:
        """Stop the thread after its current step. Waiting consumers get an exception."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()
        if self.engine.driver is self:
            if self.engine.failure is None:
                for request_id in list(self.engine.requests):
                    self.engine.cancel(request_id)
            self.engine.driver = None

    def run_loop(self) -> None:
        """The loop of the engine thread."""
        try:
            while self.run_commands():
                self.deliver(self.engine.step())
            self.fail(LMWorksError(CLOSED))
        except BaseException as error:
            self.fail(error)

    def run_commands(self) -> bool:
        """Wait for work, and run submitted commands; false when closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing or self.commands or self.engine.busy)
            commands, self.commands = self.commands, []
        for command in commands:
            command()
        return not self.closing

    def deliver(self, deltas: list[OutputDelta]) -> None:
        """One call into each event loop for all deltas of a step."""
        batches: defaultdict[asyncio.AbstractEventLoop, list[tuple[Consumer, OutputDelta | BaseException]]]
        batches = defaultdict(list)
        with self.changed:
            for delta in deltas:
                consumer = self.consumers.get(delta.request.id)
                if consumer is not None:
                    batches[consumer.loop].append((consumer, delta))
        for loop, batch in batches.items():
            send(loop, batch)

    def fail(self, error: BaseException) -> None:
        """Pass the exception to all waiting and later consumers."""
        with self.changed:
            self.failure = error
            waiting, self.consumers = list(self.consumers.values()), {}
        for consumer in waiting:
            send(consumer.loop, [(consumer, error)])


def send(loop: asyncio.AbstractEventLoop, batch: list[tuple[Consumer, OutputDelta | BaseException]]) -> None:
    def put() -> None:
        for consumer, delta in batch:
            consumer.queue.put_nowait(delta)

    with suppress(RuntimeError):  # that loop was closed: no consumer is left there
        loop.call_soon_threadsafe(put)
