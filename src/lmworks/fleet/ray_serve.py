"""Servers as replicas of a Ray Serve deployment: Ray places, scales, restarts and drains them.

    serve run lmworks.fleet.ray_serve:app source=runs/demo replicas=2

A replica is an actor with `lmworks serve` as its own process, on the GPUs that Ray gave the actor, and passes requests
to it. So a model that crashes takes no actor of Ray's along, and every option of `lmworks serve` holds.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field

from ..record.parent_death import until_this_process_ends
from ..spec import LMWorksError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

STARTUP_S = 1800.0  # for weights to be loaded
DRAIN_S = 30.0
CONNECT_S = 5.0
# Of one connection, not of the request; and what the server is told anew.
NOT_PASSED_ON = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
    *(b"transfer-encoding", b"upgrade", b"host", b"content-length"),
}


class Arguments(BaseModel):
    """What `serve run` and a `serve.yaml` may say."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field(description="run folder, Hugging Face folder or preset; NAME=SOURCE")
    options: str = Field(
        "", description="further words of `lmworks serve`, e.g. 'engine.dtype=bf16 --config keys.toml'"
    )
    replicas: int = Field(1, ge=1)
    gpus: float = Field(0, ge=0, description="of each replica")
    cpus: float = Field(1, ge=0)
    max_ongoing_requests: int = Field(256, ge=1, description="of each replica; Ray Serve queues what is beyond")
    max_replicas: int = Field(0, ge=0, description="scale between `replicas` and so many (0: no scaling)")
    target_ongoing_requests: float = Field(32, gt=0, description="of each replica, which scaling aims at")


def app(arguments: Arguments) -> Any:
    """The application, for `serve run` and `serve deploy`."""
    from ray import serve

    server = ReplicaServer(arguments.source, tuple(shlex.split(arguments.options)))

    class LMWorksServer:
        async def check_health(self) -> None:
            """Asked by Ray Serve every few seconds: a replica that raises is replaced."""
            await current().check_health()

    size: dict[str, Any] = {"num_replicas": arguments.replicas}
    if arguments.max_replicas:
        scaling = {"min_replicas": arguments.replicas, "max_replicas": arguments.max_replicas}
        size = {"autoscaling_config": scaling | {"target_ongoing_requests": arguments.target_ongoing_requests}}
    deployment = serve.deployment(
        name="lmworks",
        max_ongoing_requests=arguments.max_ongoing_requests,
        ray_actor_options={"num_gpus": arguments.gpus, "num_cpus": arguments.cpus},
        health_check_period_s=5,
        health_check_timeout_s=15,
        graceful_shutdown_timeout_s=DRAIN_S + 10,
        **size,
    )
    return deployment(serve.ingress(server)(LMWorksServer)).bind()


started: ReplicaServer | None = None  # a replica is a process of its own


def current() -> ReplicaServer:
    if started is None:
        raise LMWorksError("the server has not been started")
    return started


@dataclass
class ReplicaServer:
    """An ASGI application before a server's process, which its lifespan starts and ends."""

    source: str
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    http: httpx.AsyncClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
        elif scope["type"] == "http":
            await self.forward(scope, receive, send)

    async def lifespan(self, receive: Receive, send: Send) -> None:
        global started
        await receive()
        try:
            await self.start()
        except Exception as error:
            await self.stop()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        started = self
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Returns when the model is loaded."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["serve", self.source, "--port", str(port), "--drain-seconds", f"{DRAIN_S:g}", *self.options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmworks", *words],
            start_new_session=True,
            env={**os.environ, **until_this_process_ends()},  # Ray kills a replica that is slow to shut down
        )
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        async with asyncio.timeout(STARTUP_S):
            while True:
                with suppress(httpx.TransportError):
                    if (await self.http.get("/ready")).status_code == 200:
                        return
                if self.process.poll() is not None:
                    raise LMWorksError(f"lmworks serve ended with exit code {self.process.returncode}: see its log")
                await asyncio.sleep(0.2)

    async def stop(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            await asyncio.to_thread(self.process.wait)
        if self.http is not None:
            await self.http.aclose()

    async def check_health(self) -> None:
        assert self.process is not None and self.http is not None
        if self.process.poll() is not None:
            raise LMWorksError(f"lmworks serve ended with exit code {self.process.returncode}")
        answer = await self.http.get("/health", timeout=10)
        if answer.status_code != 200:
            raise LMWorksError(f"lmworks serve is not healthy: {answer.text[:200]}")

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A client that leaves cancels this, which closes the connection, which ends its request at the server."""
        assert self.http is not None
        body, more = b"", True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                return
            body, more = body + part.get("body", b""), part.get("more_body", False)
        path = scope.get("path", "/").removeprefix(scope.get("root_path", "")) or "/"
        query = scope.get("query_string", b"")
        url = httpx.URL(self.http.base_url, path=path, query=query or None)
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in NOT_PASSED_ON]
        request = self.http.build_request(scope["method"], url, headers=headers, content=body)
        try:
            answer = await self.http.send(request, stream=True)
        except httpx.TransportError:
            content = (
                b'{"error": {"message": "the server of this replica is down", "type": "server_error", "param": null, '
            )
            content += b'"code": "engine_unavailable"}}'
            shown = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": shown})
            await send({"type": "http.response.body", "body": content})
            return
        try:
            kept = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in NOT_PASSED_ON]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await answer.aclose()
