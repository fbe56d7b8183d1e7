"""What a server's prefix cache holds, by its own events (`serve.cache_events`): `Server.cached`.

While a server cannot be followed, or does not tell, `cached` is None, and policies estimate. Every connection begins
with a snapshot, so nothing that was missed stays missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from urllib.parse import unquote

import msgspec

from ..serve.cache_events import HEARTBEAT_S, PROMPT_BLOCKS
from .http_client import UpstreamError
from .prompt_index import PromptBlocks
from .servers import Server

log = logging.getLogger("lmworks.gateway")

PATH = "/cache_events"
SILENT_S = 3 * HEARTBEAT_S  # after which a connection counts as lost
RETRY_S = 0.5
UNSUPPORTED_S = 30.0  # until a server that does not know this path is asked again
LONGEST_EVENT = 8 * 2**20


class CacheEvent(msgspec.Struct):
    model: str
    snapshot: bool
    stored: list[str]
    removed: list[str]


EVENT = msgspec.json.Decoder(CacheEvent)


class Unsupported(Exception):
    """The server has no such events, or not for our key."""


async def follow_forever(server: Server, wanted: Callable[[], bool]) -> None:
    """`wanted`: whether any policy uses it."""
    refused = False
    while not server.draining:
        pause = RETRY_S
        if wanted() and server.up:
            try:
                await follow(server)
            except Unsupported as error:
                pause = UNSUPPORTED_S
                if not refused:
                    log.warning("cache is estimated", extra={"server": server.url, "reason": str(error)})
                refused = True
            except (UpstreamError, msgspec.MsgspecError, ValueError) as error:
                log.info("cache events were lost", extra={"server": server.url, "reason": str(error)})
            finally:
                server.cached = None
        await asyncio.sleep(pause)


async def follow(server: Server) -> None:
    """Until the connection is lost, which raises."""
    reader = EventReader(server)
    connection = await server.connections.acquire(fresh=True)
    try:
        connection.send(server.connections.encode("GET", server.root + PATH, server.headers()), reader)
        while not reader.ended.done():
            reader.heard = False
            await asyncio.wait([reader.ended], timeout=SILENT_S)
            if not reader.heard and not reader.ended.done():
                raise UpstreamError("timeout", f"nothing came for {SILENT_S:g} s")
        reader.ended.result()
    finally:
        connection.abort()


class EventReader:
    """A receiver of the stream."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.held = b""
        self.heard = False
        self.status = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status
        if status in (401, 403, 404):
            self.fail(Unsupported(f"GET {PATH} answered with status {status}"))
        elif status != 200:
            self.fail(UpstreamError("refused", f"GET {PATH} answered with status {status}"))

    def data(self, part: bytes) -> None:
        if self.ended.done():
            return
        self.heard = True
        *whole, self.held = (self.held + part).split(b"\n\n")
        try:
            for event in whole:
                if event.startswith(b"data:"):
                    self.apply(EVENT.decode(event[5:]))
            if len(self.held) > LONGEST_EVENT:
                raise UpstreamError("invalid", "an event of the cache has no end")
        except (UpstreamError, msgspec.MsgspecError, ValueError) as error:
            self.fail(error)

    def apply(self, event: CacheEvent) -> None:
        cached = self.server.cached if self.server.cached is not None else {}
        keys = cached.setdefault(event.model, set())
        if event.snapshot:
            keys.clear()
        keys.update(map(bytes.fromhex, event.stored))
        keys.difference_update(map(bytes.fromhex, event.removed))
        self.server.cached = cached

    def complete(self) -> None:
        self.fail(UpstreamError("lost", "the server ended the stream of its cache"))

    def failed(self, error: UpstreamError) -> None:
        self.fail(error)

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


def read_prompt_blocks(header: bytes) -> PromptBlocks | None:
    """The header of an answer; None where it says nothing that can be used."""
    try:
        model, tokens, stride, *keys = header.decode("ascii").split()
        found = PromptBlocks(unquote(model), int(tokens), int(stride), tuple(map(bytes.fromhex, keys)))
    except ValueError:
        return None
    return found if found.tokens > 0 and found.stride > 0 else None


ASK_FOR_BLOCKS = (PROMPT_BLOCKS.encode(), b"1")
BLOCKS_HEADER = PROMPT_BLOCKS.encode()
