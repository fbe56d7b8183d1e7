"""How servers are found: a file for each way. Each yields the addresses that it sees, again whenever they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from ..config import Pool

log = logging.getLogger("lmworks.gateway")

RETRY_S = 2.0


class Discovery(Protocol):
    @property
    def name(self) -> str: ...

    def watch(self) -> AsyncIterator[list[str]]: ...


def discoveries(pool: Pool) -> list[Discovery]:
    """Those that have to be watched; urls of the file and registrations need no watching."""
    from .dns import DNS
    from .kubernetes import Kubernetes

    found: list[Discovery] = []
    scheme = "https" if pool.tls else "http"
    if pool.dns:
        found.append(DNS(pool.dns, scheme))
    if pool.kubernetes:
        found.append(Kubernetes.in_cluster(pool.kubernetes, scheme))
    return found


async def follow(discovery: Discovery, update: Callable[[str, list[str]], None]) -> None:
    """Reports what it sees, for ever. While it fails, the servers of its last answer stay."""
    while True:
        try:
            async for urls in discovery.watch():
                update(discovery.name, urls)
        except Exception as error:
            log.warning("discovery failed", extra={"source": discovery.name, "reason": f"{error}"})
        await asyncio.sleep(RETRY_S)
