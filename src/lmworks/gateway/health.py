"""Probes: whether a server is up, which models it has, and how much it has to do."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

import msgspec

from ..serve.backend import TransferSettings
from .config import Health
from .http_client import UpstreamError, fetch
from .servers import Load, Server

log = logging.getLogger("lmworks.gateway")


class ListedModel(msgspec.Struct):
    id: str


class ModelListing(msgspec.Struct):
    data: list[ListedModel]


ADAPTER = re.compile(r'adapter="((?:[^"\\]|\\.)*)"')
LISTING = msgspec.json.Decoder(ModelListing)
TRANSFERS = msgspec.json.Decoder(dict[str, TransferSettings])


async def probe_forever(
    server: Server, health: Callable[[], Health], transfers: Callable[[], bool] = lambda: False
) -> None:
    """`transfers`: whether its KV blocks, or those of others, move."""
    while not server.draining:
        await probe(server, health(), transfers())
        await asyncio.sleep(health().interval)


async def probe(server: Server, health: Health, transfers: bool = False) -> None:
    was_up = server.up
    try:
        if server.kind.probe:
            await get(server, server.root + server.kind.probe, health.timeout)
        if not server.pool.models:
            listing = await get(server, f"{server.base}/models", health.timeout)
            server.models = frozenset(model.id for model in LISTING.decode(listing).data)
        if transfers:
            server.transfers = TRANSFERS.decode(await get(server, f"{server.root}/kv_transfer", health.timeout))
        if server.kind.running:
            server.load = load_of(server, await get(server, f"{server.root}/metrics", health.timeout))
        server.probed(None, health.fall, health.rise)
    except Exception as error:  # whatever it is, the next probe is made
        server.probed(str(error), health.fall, health.rise)
    if was_up != server.up:
        fields = {"server": server.url, "pool": server.pool.name, "reason": server.last_error}
        log.warning("server is up" if server.up else "server is down", extra=fields)
    server.since = server.since if was_up == server.up else time.monotonic()


async def get(server: Server, path: str, seconds: float) -> bytes:
    answer = await fetch(server.connections, "GET", path, server.headers(), seconds)
    note_clock(server, answer.headers.get(b"date"))
    if answer.status != 200:
        raise UpstreamError("probe", f"GET {path} answered with status {answer.status}")
    return answer.body


def note_clock(server: Server, date: bytes | None) -> None:
    """Dates have whole seconds: half a second is added, as it is what they lack on average."""
    try:
        then = parsedate_to_datetime((date or b"").decode("latin-1")).timestamp()
    except ValueError:
        return
    server.clock_skew = then + 0.5 - time.time()


def load_of(server: Server, text: bytes) -> Load:
    """Sums over the models of a server. Names that it does not report count as 0."""
    names = {server.kind.running: "running", server.kind.waiting: "waiting", server.kind.kv_used: "kv_used"}
    found = Load(open_then=server.open)
    for line in text.decode("utf-8", errors="replace").splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name == server.kind.adapters and (adapter := ADAPTER.search(rest)):
            found.warm_adapters.add(adapter[1])
        if (field := names.get(name)) is None:
            continue
        try:
            value = float(rest.rpartition("}")[2].split()[0])
        except (ValueError, IndexError):
            continue
        more = max(value, found.kv_used) if field == "kv_used" else getattr(found, field) + value
        setattr(found, field, more)
    return found
