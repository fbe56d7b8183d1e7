"""Every address that a name resolves to is a server: headless services, Consul, Docker networks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

INTERVAL_S = 5.0


class DNS:
    def __init__(self, target: str, scheme: str = "http", interval: float = INTERVAL_S) -> None:
        self.name = f"dns {target}"
        self.host, _, port = target.rpartition(":")
        self.port, self.scheme, self.interval = int(port), scheme, interval

    async def watch(self) -> AsyncIterator[list[str]]:
        while True:
            yield await self.resolve()
            await asyncio.sleep(self.interval)

    async def resolve(self) -> list[str]:
        found = await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return sorted({server_url(self.scheme, str(address[0]), self.port) for *_, address in found})


def server_url(scheme: str, address: str, port: int) -> str:
    return f"{scheme}://[{address}]:{port}/v1" if ":" in address else f"{scheme}://{address}:{port}/v1"
