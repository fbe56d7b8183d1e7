"""An engine for asyncio: it steps in a thread of its own, and every consumer gets its pieces as they come.

    async with AsyncEngine(engine) as serving:
        async for piece in serving.stream(request):
            ...

Only that thread touches the engine, and nobody else may until it is closed; consumers leave it orders. One that leaves
(breaks off, is cancelled) takes its request back. If the engine fails, everyone who waits gets the exception, and so
does everyone who comes later.
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
    """Who waits for a request's pieces, and in which event loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[OutputDelta | BaseException] = field(default_factory=asyncio.Queue)


class AsyncEngine:
    def __init__(self, engine: Engine) -> None:
        engine.drive(self)
        self.engine = engine
        self.consumers: dict[int, Consumer] = {}  # by the id of the request
        self.orders: list[Callable[[], object]] = []
        self.changed = threading.Condition()  # guards orders, consumers, closing and failure
        self.closing = False
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self.work, name="lmworks-engine", daemon=True)
        self.thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def stream(self, request: Request) -> AsyncIterator[OutputDelta]:
        """Pieces as they come; the last one carries the result. A request that cannot be served raises SpecError."""
        request.stream = True
        grammars = self.engine.runner.grammars
        if request.params.structured and grammars is not None:
            # Compiled here: it may take a second, and the engine's thread has others to serve.
            request.grammar = await asyncio.to_thread(lambda: grammars.compile(grammar(request.params)))
        consumer = Consumer(asyncio.get_running_loop())
        self.order(lambda: self.take_in(request, consumer), request.id, consumer)
        finished = False
        try:
            while not finished:
                delta = await consumer.queue.get()
                if isinstance(delta, BaseException):
                    finished = True
                    raise LMWorksError(f"the request cannot go on: {delta}") from delta
                finished = delta.result is not None
                if delta.result is not None and not request.sequences:
                    raise SpecError(delta.result.error or "the request was refused")
                yield delta
        finally:
            self.leave(request.id, finished)

    def take_in(self, request: Request, consumer: Consumer) -> None:
        """Whatever goes wrong here is this request's own affair."""
        try:
            self.engine.add(request)
        except Exception as error:
            send(consumer.loop, [(consumer, error)])

    def leave(self, request_id: int, finished: bool) -> None:
        """Nobody waits for this request any more."""
        with self.changed:
            self.consumers.pop(request_id, None)
            if not finished:
                self.orders.append(lambda: self.engine.cancel(request_id))
                self.changed.notify()

    def order(self, what: Callable[[], object], request_id: int, consumer: Consumer) -> None:
        with self.changed:
            if self.failure is not None:
                raise LMWorksError(f"the engine has stopped: {self.failure}") from self.failure
            if request_id in self.consumers:
                raise SpecError(f"a request with id = {request_id} is under way already")
            self.consumers[request_id] = consumer
            self.orders.append(what)
            self.changed.notify()

    def close(self) -> None:
        """Stops the thread after the step it is in. Those who still wait get an exception."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()
        if self.engine.driver is self:
            if self.engine.failure is None:
                for request_id in list(self.engine.requests):
                    self.engine.cancel(request_id)
            self.engine.driver = None

    def work(self) -> None:
        """What the thread does until it is closed."""
        try:
            while self.next_orders():
                self.deliver(self.engine.step())
            self.fail(LMWorksError(CLOSED))
        except BaseException as error:
            self.fail(error)

    def next_orders(self) -> bool:
        """Waits until there is something to do, and carries out what was ordered; false when closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing or self.orders or self.engine.busy)
            orders, self.orders = self.orders, []
        for order in orders:
            order()
        return not self.closing

    def deliver(self, deltas: list[OutputDelta]) -> None:
        """One call into each event loop for all that a step brought."""
        parcels: defaultdict[asyncio.AbstractEventLoop, list[tuple[Consumer, OutputDelta | BaseException]]]
        parcels = defaultdict(list)
        with self.changed:
            for delta in deltas:
                consumer = self.consumers.get(delta.request.id)
                if consumer is not None:
                    parcels[consumer.loop].append((consumer, delta))
        for loop, parcel in parcels.items():
            send(loop, parcel)

    def fail(self, error: BaseException) -> None:
        """Everyone who waits, and everyone to come, hears of it."""
        with self.changed:
            self.failure = error
            waiting, self.consumers = list(self.consumers.values()), {}
        for consumer in waiting:
            send(consumer.loop, [(consumer, error)])


def send(loop: asyncio.AbstractEventLoop, parcel: list[tuple[Consumer, OutputDelta | BaseException]]) -> None:
    def put() -> None:
        for consumer, delta in parcel:
            consumer.queue.put_nowait(delta)

    with suppress(RuntimeError):  # that loop was closed: nobody waits there any more, and others wait elsewhere
        loop.call_soon_threadsafe(put)
