"""A TCP proxy between two processes of a drill: a network that is slow, loses connections, or is cut."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from dataclasses import dataclass, field

CHUNK = 65536
TICK_S = 0.02


@dataclass
class TCPProxy:
    """In a thread of its own. `cut`: bytes are held back in both directions, as when a cable is pulled: nobody is told.
    `reset`: chance per chunk that a connection is reset."""

    port: int
    target: int  # port on this machine
    delay: float = 0.0
    cut: bool = False
    reset: float = 0.0
    luck: random.Random = field(default_factory=lambda: random.Random(0))
    loop: asyncio.AbstractEventLoop | None = None
    stopped: asyncio.Event | None = None
    thread: threading.Thread | None = None

    def start(self) -> None:
        listening = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.main(listening)), name="proxy", daemon=True)
        self.thread.start()
        listening.wait()

    def stop(self) -> None:
        if self.loop is not None and self.stopped is not None and self.thread is not None:
            self.loop.call_soon_threadsafe(self.stopped.set)
            self.thread.join()
            self.loop = None

    async def main(self, listening: threading.Event) -> None:
        self.loop, self.stopped = asyncio.get_running_loop(), asyncio.Event()
        tasks = set[asyncio.Task[None]]()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            with suppress(asyncio.CancelledError):  # by `stop`
                await self.carry_both(reader, writer)
            tasks.discard(task)

        server = await asyncio.start_server(accept, "127.0.0.1", self.port)
        listening.set()
        await self.stopped.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def carry_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            while self.cut:
                await asyncio.sleep(TICK_S)
            from_there, there = await asyncio.open_connection("127.0.0.1", self.target)
            ways = [
                asyncio.ensure_future(self.carry(reader, there)),
                asyncio.ensure_future(self.carry(from_there, writer)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass
        finally:
            for one in (writer, there):
                if one is not None:
                    one.close()  # what was written is sent

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ends where the connection does, or is reset."""
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                if self.reset and self.luck.random() < self.reset:
                    writer.transport.abort()
                    return
                if self.delay:
                    await asyncio.sleep(self.delay)
                while self.cut:
                    await asyncio.sleep(TICK_S)
                writer.write(data)
                await writer.drain()
