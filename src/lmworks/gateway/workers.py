"""`lmworks gateway CONFIG --workers N`: processes that share one listening socket, and the process that keeps them.

Each worker is a whole gateway. What has to be known by all of them goes through the parent: metrics are added up at a
scrape, registered servers and switched rollouts are told to the others. Rates are shared through Redis, keys and usage
through the store. A worker that ends is started again; what it had counted at the last scrape is kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import Metric

from ..observability.families import combined, counted
from ..serve.channel import ENDED, encode_frame, read_frame, spawn
from ..serve.reload import has_terminal
from ..serve.server import NOTICE_S
from ..spec import LMWorksError, SpecError
from .config import GatewayConfig

log = logging.getLogger("lmworks.gateway")

COLLECT_S = 1.0  # how long a scrape waits for a worker; what it had counted before stands for it then
RESTART_S = 1.0  # between two starts of one worker


class Collect(NamedTuple):
    """Parent → worker: what have you counted?"""

    number: int


class Counted(NamedTuple):
    """The answer; and parent → worker: what all others have."""

    number: int
    metrics: list[Metric]


class Scrape(NamedTuple):
    """Worker → parent: what have all others counted? With what itself has."""

    number: int
    metrics: list[Metric]


class Tell(NamedTuple):
    """Worker → parent → all others. The last one of each name is told to workers that are started later."""

    kind: str
    name: str
    content: Any


class Ready(NamedTuple):
    """Worker → parent: it listens."""


@dataclass(frozen=True)
class Place:
    """Which worker this is, of how many."""

    number: int = 0
    count: int = 1

    def share(self, config: GatewayConfig) -> GatewayConfig:
        """What limits a whole gateway, divided; a usage journal of its own."""
        if self.count == 1:
            return config
        pools = [
            replace(pool, max_open=-(-pool.max_open // self.count)) if pool.max_open else pool for pool in config.pools
        ]
        listen = replace(config.listen, connections=-(-config.listen.connections // self.count))
        tenants = config.tenants
        if tenants.on:
            tenants = replace(tenants, journal=f"{tenants.journal}/worker-{self.number}")
        return replace(config, pools=pools, listen=listen, tenants=tenants)


def check_workers(config: GatewayConfig, count: int) -> None:
    if count > 1 and config.tenants.on and not config.tenants.limits:
        raise SpecError(
            f"--workers {count}: the limits of tenants are counted by all workers together, in Redis: "
            'set tenants.limits = "redis://…", or run one worker'
        )


@dataclass(eq=False)
class Worker:
    place: Place
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    metrics: list[Metric] = field(default_factory=list)  # at the last scrape
    asked: dict[int, asyncio.Future[None]] = field(default_factory=dict)

    def send(self, message: Any) -> None:
        self.writer.write(encode_frame(message))

    async def collect(self, number: int) -> None:
        answered = self.asked[number] = asyncio.get_running_loop().create_future()
        self.send(Collect(number))
        with suppress(TimeoutError):
            async with asyncio.timeout(COLLECT_S):
                await answered
        self.asked.pop(number, None)


class Supervisor:
    def __init__(self, config: Path, count: int, sockets: Sequence[socket.socket]) -> None:
        """`sockets`: of clients, and of the admin API where it has one of its own."""
        self.config, self.count, self.sockets = config, count, sockets
        self.workers: dict[int, Worker] = {}
        self.ended: list[Metric] = []  # counters of workers that have ended
        self.told: dict[tuple[str, str], Tell] = {}
        self.scrapes = 0
        self.scraping: set[asyncio.Task[None]] = set()
        self.ready = False  # a worker has been
        self.stopping: signal.Signals | None = None

    async def run(self) -> None:
        """Until SIGTERM or SIGINT, after which workers drain; at once at a second one."""
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, self.stop, one)
        if not has_terminal():
            loop.add_signal_handler(signal.SIGHUP, self.signal_all, signal.SIGHUP)
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self.count):
                    group.create_task(self.keep(Place(number, self.count)))
        except* LMWorksError as failed:
            raise failed.exceptions[0] from None
        finally:
            for worker in self.workers.values():
                worker.process.kill()

    def stop(self, number: signal.Signals) -> None:
        if self.stopping is not None:
            self.signal_all(signal.SIGKILL)
            os._exit(128 + number)
        self.stopping = number
        self.signal_all(number)
        # Workers say for a while that they are not ready, then nobody can connect: not to this process either.
        notice = NOTICE_S if number == signal.SIGTERM else 0.0
        for one in self.sockets:
            asyncio.get_running_loop().call_later(notice, one.close)

    def is_stopping(self) -> bool:
        return self.stopping is not None

    def signal_all(self, number: signal.Signals) -> None:
        for worker in self.workers.values():
            with suppress(ProcessLookupError):
                worker.process.send_signal(number)

    async def keep(self, place: Place) -> None:
        """One worker, again and again."""
        while not self.is_stopping():
            began = time.monotonic()
            worker = await self.start(place)
            with suppress(*ENDED):
                while True:
                    self.receive(worker, await read_frame(worker.reader))
            worker.writer.close()
            status = await asyncio.to_thread(worker.process.wait)
            del self.workers[place.number]
            self.ended = combined([*self.ended, *counted(worker.metrics)])
            if self.is_stopping():
                return
            if not self.ready:
                raise LMWorksError(f"worker {place.number} ended with status {status} before it was ready: see its log")
            log.error("a worker ended", extra={"worker": place.number, "pid": worker.process.pid, "status": status})
            await asyncio.sleep(max(0.0, began + RESTART_S - time.monotonic()))

    async def start(self, place: Place) -> Worker:
        words = (str(self.config), str(place.number), str(place.count))
        inherited = tuple(one.fileno() for one in self.sockets)
        worker = Worker(place, *await spawn("lmworks.gateway.worker_process", *words, inherit=inherited))
        self.workers[place.number] = worker
        for message in self.told.values():
            worker.send(message)
        if self.stopping is not None:  # while it was started
            worker.process.send_signal(self.stopping)
        return worker

    def receive(self, worker: Worker, message: Any) -> None:
        others = [one for one in self.workers.values() if one is not worker]
        if isinstance(message, Tell):
            self.told[message.kind, message.name] = message
            for one in others:
                one.send(message)
        elif isinstance(message, Counted):
            worker.metrics = message.metrics
            if (answered := worker.asked.get(message.number)) is not None and not answered.done():
                answered.set_result(None)
        elif isinstance(message, Scrape):
            worker.metrics = message.metrics
            scraping = asyncio.create_task(self.scrape(worker, message.number, others))
            self.scraping.add(scraping)
            scraping.add_done_callback(self.scraping.discard)
        elif isinstance(message, Ready):
            self.ready = True

    async def scrape(self, worker: Worker, number: int, others: list[Worker]) -> None:
        self.scrapes += 1
        await asyncio.gather(*(one.collect(self.scrapes) for one in others))
        worker.send(Counted(number, combined([*self.ended, *(metric for one in others for metric in one.metrics)])))
