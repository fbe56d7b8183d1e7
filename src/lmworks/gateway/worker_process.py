"""`python -m lmworks.gateway.worker_process CONFIG NUMBER COUNT CHANNEL SOCKET…`: one worker, see `workers`."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import Metric

from ..observability.tracing import tracing_from_environment
from ..serve.channel import ENDED, encode_frame, read_frame
from ..serve.telemetry import log_as_json
from ..spec import LMWorksError
from .gateway import Gateway, GatewaySettings
from .workers import Collect, Counted, Place, Ready, Scrape, Tell


class Siblings:
    """The other workers, through their parent. `own`: what this one has counted. `heard`: what others tell."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        own: Callable[[], list[Metric]],
        heard: Callable[[Tell], None],
    ) -> None:
        self.reader, self.writer, self.own, self.heard = reader, writer, own, heard
        self.numbers = itertools.count()
        self.scrapes: dict[int, asyncio.Future[list[Metric]]] = {}

    def send(self, message: Any) -> None:
        self.writer.write(encode_frame(message))

    def tell(self, kind: str, name: str, content: Any) -> None:
        self.send(Tell(kind, name, content))

    async def metrics(self, own: list[Metric]) -> list[Metric]:
        """What all others have counted."""
        number = next(self.numbers)
        found = self.scrapes[number] = asyncio.get_running_loop().create_future()
        self.send(Scrape(number, own))
        return await found

    async def listen(self) -> None:
        """Until the parent is gone: then this worker drains, too."""
        with suppress(*ENDED):
            while True:
                message = await read_frame(self.reader)
                if isinstance(message, Collect):
                    self.send(Counted(message.number, self.own()))
                elif isinstance(message, Counted):
                    self.scrapes.pop(message.number).set_result(message.metrics)
                elif isinstance(message, Tell):
                    self.heard(message)
        os.kill(os.getpid(), signal.SIGTERM)


async def serve(gateway: Gateway, channel: socket.socket, sockets: list[socket.socket]) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    siblings = Siblings(reader, writer, gateway.metrics.collect, gateway.heard)
    gateway.siblings = siblings
    listening = asyncio.create_task(siblings.listen())
    await gateway.run(sockets, started=lambda: siblings.send(Ready()))
    listening.cancel()


def main() -> None:
    config, number, count, *descriptors = sys.argv[1:]
    log_as_json()
    tracing = tracing_from_environment("lmworks-gateway")
    channel, *sockets = (socket.socket(fileno=int(one)) for one in descriptors)
    for one in (channel, *sockets):
        one.set_inheritable(False)
    try:
        settings = GatewaySettings(Path(config), Place(int(number), int(count)))
    except LMWorksError as error:
        sys.exit(f"lmworks: error: {error}")

    async def run() -> None:
        await serve(Gateway(settings, tracing), channel, sockets)

    uvloop.run(run())
    if tracing is not None:
        tracing.close()


if __name__ == "__main__":
    main()
