"""An upstream: another OpenAI-compatible server behind our keys, limits, metrics and page."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..spec import SpecError
from .backend import ModelCard, State

log = logging.getLogger("lmworks.serve")

POLL_S = 5.0  # between two polls of its models
CONNECT_S = 5.0


class Upstream:
    """Its models are polled: it may start later than this server, go down, and come back."""

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`url` ends in /v1, as clients know it. `api_key` is what we show there: keys of our own clients stay here."""
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")) or not urlsplit(self.url).hostname:
            raise SpecError(f"--upstream {url!r} is not an address, e.g. http://host:8000/v1")
        if "@" in self.url or "?" in self.url:
            raise SpecError(
                "--upstream: the address is shown in /health and in logs: set a key as LMWORKS_UPSTREAM_KEY"
            )
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # No proxy and no .netrc from the environment.
        self.client = httpx.AsyncClient(headers=headers, limits=limits, trust_env=False, transport=transport)
        self.cards: list[ModelCard] = []
        self.up = False
        self.open = 0  # requests under way
        self.last_error: str | None = None
        self.poller: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        return State(alive=self.up, ready=self.up and bool(self.cards), open=self.open, last_error=self.last_error)

    def card(self, name: str) -> ModelCard:
        """A model that is gone has a card with its name alone."""
        return next((card for card in self.cards if card.id == name), ModelCard(name, 0, 0, 0))

    async def start(self) -> None:
        await self.refresh_models()
        self.poller = asyncio.create_task(self.poll(), name=f"poll {self.url}")

    async def poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh_models()

    async def refresh_models(self) -> None:
        """Lists its models; the last list stays while it does not answer."""
        try:
            answer = await self.client.get(f"{self.url}/models", timeout=CONNECT_S)
            answer.raise_for_status()
            self.cards = [card_of(one) for one in answer.json()["data"]]
            self.up, self.last_error = True, None
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            self.mark_down(error)

    def mark_down(self, error: Exception) -> None:
        """It is tried last, until it answers again."""
        reason = f"{type(error).__name__}: {error}"
        if self.last_error is None:
            log.warning("upstream does not answer", extra={"upstream": self.url, "reason": reason})
        self.up, self.last_error = False, reason

    async def close(self) -> None:
        if self.poller is not None:
            self.poller.cancel()
            with suppress(asyncio.CancelledError):
                await self.poller
        await self.client.aclose()


def card_of(model: dict[str, Any]) -> ModelCard:
    """vLLM says how long sequences may be; others do not (0)."""
    context = model.get("max_model_len")
    return ModelCard(
        str(model["id"]),
        int(model.get("created") or time.time()),
        context if isinstance(context, int) else 0,
        0,
        str(model.get("owned_by") or "upstream"),
    )
