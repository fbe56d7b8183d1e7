"""The stream of what happens in the prefix caches (see `cache_events`), and whose blocks go where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from .cache_events import HEARTBEAT_S, CacheChange, split_keys
from .serving import LocalModel, Serving
from .sse import sse_event, start_stream

KEYS_AN_EVENT = 4096


def add_cache_routes(app: FastAPI, serving: Serving) -> None:
    @app.get("/cache_events", include_in_schema=False)  # between servers and gateways; it has no end
    async def cache_events(request: Request) -> Response:
        """What the prefix caches hold, for routers."""
        serving.authenticate(request).check_gateway("the events of caches are")
        return await start_stream(request, event_lines(serving.local_models))

    @app.get("/kv_transfer", include_in_schema=False)
    async def kv_transfer(request: Request) -> JSONResponse:
        """Settings of transfers, by model and adapter: gateways compare those of prefill and decode servers."""
        caller = serving.authenticate(request)
        caller.check_gateway("settings of transfers are")
        found = {}
        for name, (model, _) in serving.visible(caller).items():
            settings = model.backend.card.transfer if isinstance(model, LocalModel) else None
            if settings is not None:
                found[name] = asdict(settings)
        return JSONResponse(found)


async def event_lines(models: Sequence[LocalModel]) -> AsyncGenerator[bytes, None]:
    ready: asyncio.Queue[tuple[LocalModel, CacheChange]] = asyncio.Queue(1)

    async def follow(model: LocalModel) -> None:
        async with aclosing(model.backend.follow_cache()) as changes:
            async for change in changes:
                await ready.put((model, change))

    tasks = [asyncio.create_task(follow(model)) for model in models]
    try:
        yield b": cache events\n\n"
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    model, change = await ready.get()
            except TimeoutError:
                yield b": nothing new\n\n"
                continue
            for one in change_events(change):
                yield sse_event({"model": model.backend.name, "block_size": model.backend.card.block_size, **one})
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def change_events(change: CacheChange) -> list[dict[str, Any]]:
    stored, removed = ([key.hex() for key in split_keys(joined)] for joined in (change.stored, change.removed))
    first = {"snapshot": change.snapshot, "stored": stored[:KEYS_AN_EVENT], "removed": removed}
    rest = (stored[start : start + KEYS_AN_EVENT] for start in range(KEYS_AN_EVENT, len(stored), KEYS_AN_EVENT))
    return [first, *({"snapshot": False, "stored": part, "removed": []} for part in rest)]
