"""Operations: the engine sleeps and wakes, forgets its prefix cache, loads and unloads adapters while it serves.

For keys with `admin = true`, or without keys for clients on this machine alone; every action is logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from typing_extensions import TypedDict

from .. import __version__
from ..spec import LMWorksError
from .backend import Backend
from .body import read_body
from .limits import APIError
from .middleware import loopback
from .openapi import error_responses, request_body
from .request_bodies import LoadAdapterRequest, UnloadAdapterRequest
from .serving import Caller, Serving, Upstream
from .telemetry import log

FORWARDED = ("forwarded", "x-forwarded-for")  # by a proxy, on behalf of a client elsewhere
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Version(TypedDict):
    version: str


class Sleeping(TypedDict):
    is_sleeping: bool


class Done(TypedDict):
    model: str
    action: str


class AdapterDone(TypedDict):
    model: str
    adapter: str
    sha256: str | None  # of its files; None: it was unloaded


def add_admin_routes(app: FastAPI, serving: Serving) -> None:
    @app.get("/version")
    async def version() -> Version:
        """The version of this server."""
        return {"version": __version__}

    @app.get("/is_sleeping", responses=error_responses(400, 401, 404))
    async def is_sleeping(request: Request, model: str | None = None) -> Sleeping:
        """Whether an engine is without its KV cache."""
        _, backend = administrated(serving, request, model)
        return {"is_sleeping": backend.state.asleep}

    def add_action(action: str, what: str) -> None:
        async def act(request: Request, model: str | None = None) -> Done:
            caller, backend = administrated(serving, request, model)
            await audited(caller, action, backend, lambda: backend.control(action))
            return {"model": backend.name, "action": action}

        act.__doc__ = what
        app.post(f"/{action}", name=action, responses=error_responses(400, 401, 404, 409, 429, 503))(act)

    add_action("sleep", "Release the memory of the KV cache; no request may be under way.")
    add_action("wake_up", "Take it again.")
    add_action("reset_prefix_cache", "Forget cached prefixes.")

    @app.post(
        "/v1/load_lora_adapter",
        name="load_lora_adapter",
        openapi_extra=request_body(LoadAdapterRequest),
        responses=error_responses(400, 401, 404, 409, 429, 503),
    )
    async def load_adapter(request: Request) -> AdapterDone:
        """Load a LoRA adapter of --adapter-root."""
        body, _ = await read_body(serving, request, serving.authenticate(request), LoadAdapterRequest)
        caller, backend = administrated(serving, request, body.model)
        if body.lora_name in serving.models():  # of all: the key may not see the one whose requests it would take
            raise APIError(409, "adapter_exists", f"{body.lora_name!r} is served already", "lora_name")
        folder = adapter_folder(serving, body.lora_path)
        digest = await asyncio.to_thread(adapter_digest, folder)
        what = {"adapter": body.lora_name, "sha256": digest}
        await audited(
            caller, "load_adapter", backend, lambda: backend.control("load_adapter", body.lora_name, folder), what
        )
        return {"model": backend.name, "adapter": body.lora_name, "sha256": digest}

    @app.post(
        "/v1/unload_lora_adapter",
        name="unload_lora_adapter",
        openapi_extra=request_body(UnloadAdapterRequest),
        responses=error_responses(400, 401, 404, 409, 429, 503),
    )
    async def unload_adapter(request: Request) -> AdapterDone:
        """Unload one: requests under way finish with it."""
        body, _ = await read_body(serving, request, serving.authenticate(request), UnloadAdapterRequest)
        caller, backend = administrated(serving, request, body.model)
        if body.lora_name not in backend.card.adapters:
            raise APIError(404, "adapter_not_found", f"no adapter is called {body.lora_name!r}", "lora_name")
        await audited(
            caller,
            "unload_adapter",
            backend,
            lambda: backend.control("unload_adapter", body.lora_name),
            {"adapter": body.lora_name},
        )
        return {"model": backend.name, "adapter": body.lora_name, "sha256": None}


def administrated(serving: Serving, request: Request, name: str | None) -> tuple[Caller, Backend]:
    """The engine of a model; raises APIError for callers that may not administrate it."""
    caller = serving.authenticate(request)
    if caller.config.keys and not caller.key.admin:
        raise APIError(403, "admin_only", "this is for keys with admin = true in the config")
    if not caller.config.keys and not own_machine(request):
        raise APIError(403, "admin_only", "without keys this is for programs on the server's own machine")
    if name is None and len(serving.local_models) == 1:
        name = serving.local_models[0].backend.name  # its adapters are models of their own
    model, _ = serving.find(caller, name)
    if isinstance(model, Upstream):
        raise APIError(400, "not_local", "only engines of this server can be administrated", "model")
    return caller, model.backend


def own_machine(request: Request) -> bool:
    """Not through a proxy there, nor from the page of another site in a browser there."""
    headers, client = request.headers, request.client
    host, origin = headers.get("host", "localhost"), headers.get("origin")
    forwarded = any(name in headers for name in FORWARDED)
    same = origin is None or origin.partition("://")[2] == host
    return client is not None and loopback(client.host) and loopback(host) and same and not forwarded


async def audited(
    caller: Caller,
    action: str,
    backend: Backend,
    act: Callable[[], Awaitable[Any]],
    what: dict[str, Any] | None = None,
) -> None:
    """Who did what, and how it ended."""
    fields = {"action": action, "key": caller.key.name, "share": caller.share, "model": backend.name, **(what or {})}
    try:
        await act()
    except LMWorksError as error:
        log.warning("admin", extra={**fields, "refused": str(error)})
        raise
    log.info("admin", extra=fields)


def adapter_folder(serving: Serving, path: str) -> Path:
    """A folder below --adapter-root, links resolved."""
    root = serving.adapter_root
    if root is None:
        raise APIError(
            403, "no_adapter_root", "adapters can be loaded where the server has --adapter-root", "lora_path"
        )
    if "\0" in path:
        raise APIError(400, "invalid_request", "lora_path holds a NUL character", "lora_path")
    folder = (root / path).resolve()
    files = [(folder / name).resolve() for name in ADAPTER_FILES]
    if not all(one.is_relative_to(root.resolve()) for one in (folder, *files)):
        raise APIError(403, "outside_adapter_root", "lora_path is not below the server's --adapter-root", "lora_path")
    if not all(map(os.path.isfile, files)):  # False, too, for a name that is longer than names may be
        raise APIError(
            404, "adapter_not_found", f"lora_path: no folder there with {' and '.join(ADAPTER_FILES)}", "lora_path"
        )
    return folder


def adapter_digest(folder: Path) -> str:
    """Of its files, by name and content."""
    found = hashlib.sha256()
    for name in ADAPTER_FILES:
        with (folder / name).open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
