"""A server that makes itself known to gateways: `lmworks serve --register`.

It takes a lease at each gateway and renews it three times before it would end, for as long as it takes requests. When
it drains it gives the lease back; one that is killed is let go when its lease ends.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from .telemetry import log

LEASE_S = 15.0
TIMEOUT_S = 5.0
PATH = "/gateway/servers"


@dataclass
class Registration:
    gateways: list[str]  # their addresses, without a path
    url: str  # of this server, as gateways reach it: ending in /v1
    pool: str
    secret: str | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        self.tasks = [asyncio.create_task(self.renew(one), name=f"register at {one}") for one in self.gateways]

    async def renew(self, gateway: str) -> None:
        was: str | None = "never registered"
        async with self.client() as client:
            while True:
                error = await self.tell(client, gateway, LEASE_S)
                if error != was:
                    fields = {"gateway": gateway, "pool": self.pool, **({"reason": error} if error else {})}
                    log.log(30 if error else 20, "not registered" if error else "registered", extra=fields)
                was = error
                await asyncio.sleep(LEASE_S / 3)

    async def leave(self) -> None:
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            async with self.client() as client:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TIMEOUT_S):
                        await asyncio.gather(*(self.tell(client, one, 0.0) for one in self.gateways))

    def client(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.secret}"} if self.secret else {}
        return httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, trust_env=False)

    async def tell(self, client: httpx.AsyncClient, gateway: str, seconds: float) -> str | None:
        """What was wrong."""
        lease = {"url": self.url, "pool": self.pool, "seconds": seconds}
        try:
            answer = await client.post(gateway.rstrip("/") + PATH, json=lease)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.status_code == 200 else f"status {answer.status_code}: {answer.text[:200]}"
