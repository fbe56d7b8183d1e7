"""Every ready endpoint of a Kubernetes service is a server.

EndpointSlices are listed, then watched from the version of that list: lines of JSON, {"type": ADDED | MODIFIED |
DELETED | BOOKMARK | ERROR, "object": …}. A version that the API server has forgotten is 410: they are listed anew.
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

from ...serve.tls import Certificates, TLSFiles
from ...spec import SpecError
from ..http_client import ConnectionPool, UpstreamError, fetch
from .dns import server_url

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SECONDS = 10.0  # for a list, and for a watch to begin
WATCH_S = 300  # then the API server ends the watch, and it is begun again

Slices = dict[str, dict[str, Any]]


class EndpointAPI(Protocol):
    """What is asked of the API server."""

    async def list(self) -> dict[str, Any]: ...

    def watch(self, version: str) -> AsyncIterator[dict[str, Any]]: ...


class Gone(Exception):
    """The version is too old to be watched from."""


@dataclass
class Kubernetes:
    api: EndpointAPI
    service: str
    port: str  # a number, or the name of one of the service's ports
    scheme: str = "http"

    @property
    def name(self) -> str:
        return f"kubernetes {self.service}"

    @classmethod
    def in_cluster(cls, target: str, scheme: str = "http") -> Kubernetes:
        """NAMESPACE/SERVICE:PORT, with the account of the pod that this runs in."""
        namespace, _, rest = target.partition("/")
        service, _, port = rest.partition(":")
        return cls(HTTPEndpointAPI.in_cluster(namespace, service), f"{namespace}/{service}", port, scheme)

    async def watch(self) -> AsyncIterator[list[str]]:
        while True:
            listing = await self.api.list()
            slices: Slices = {one["metadata"]["name"]: one for one in listing["items"]}
            version = listing["metadata"]["resourceVersion"]
            yield addresses(slices, self.port, self.scheme)
            try:
                while True:
                    async for event in self.api.watch(version):
                        version = event["object"]["metadata"]["resourceVersion"]
                        if apply(slices, event):
                            yield addresses(slices, self.port, self.scheme)
            except Gone:
                continue


def apply(slices: Slices, event: dict[str, Any]) -> bool:
    """Whether the servers may be others now."""
    kind, slice_ = event["type"], event["object"]
    name = slice_["metadata"].get("name", "")
    if kind in ("ADDED", "MODIFIED"):
        slices[name] = slice_
    elif kind == "DELETED":
        slices.pop(name, None)
    return kind != "BOOKMARK"


def addresses(slices: Slices, port: str, scheme: str) -> list[str]:
    """Of endpoints that are ready; one that does not say is."""
    found = set()
    for one in slices.values():
        ports = [
            each["port"] for each in one.get("ports") or () if each.get("name") == port or str(each["port"]) == port
        ]
        for endpoint in one.get("endpoints") or ():
            if (endpoint.get("conditions") or {}).get("ready") is not False:
                found |= {server_url(scheme, address, number) for address in endpoint["addresses"] for number in ports}
    return sorted(found)


# --- the API server ---------------------------------------------------------------------------------------


@dataclass
class HTTPEndpointAPI:
    pool: ConnectionPool
    namespace: str
    service: str
    token: Path | None = None  # a file: tokens of pods are renewed within an hour

    @classmethod
    def in_cluster(cls, namespace: str, service: str) -> HTTPEndpointAPI:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise SpecError("pools: kubernetes is for gateways in a cluster: KUBERNETES_SERVICE_HOST is not set")
        certificates = Certificates(TLSFiles(ca=ACCOUNT / "ca.crt"), server=False)
        host = f"[{host}]" if ":" in host else host
        return cls(
            ConnectionPool(f"https://{host}:{port}", tls=certificates.context), namespace, service, ACCOUNT / "token"
        )

    def path(self, **query: str) -> str:
        query["labelSelector"] = f"kubernetes.io/service-name={self.service}"
        return f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices?{urlencode(query)}"

    def headers(self) -> list[tuple[bytes, bytes]]:
        accept = [(b"accept", b"application/json")]
        if self.token is None:
            return accept
        return [*accept, (b"authorization", b"Bearer " + self.token.read_bytes().strip())]

    async def list(self) -> dict[str, Any]:
        answer = await fetch(self.pool, "GET", self.path(), self.headers(), SECONDS)
        if answer.status != 200:
            raise UpstreamError("refused", f"the API server answered with status {answer.status}")
        found: dict[str, Any] = json.loads(answer.body)
        return found

    async def watch(self, version: str) -> AsyncIterator[dict[str, Any]]:
        path = self.path(watch="1", resourceVersion=version, allowWatchBookmarks="true", timeoutSeconds=str(WATCH_S))
        lines, connection = Lines(), await self.pool.acquire()
        connection.send(self.pool.encode("GET", path, self.headers()), lines)
        try:
            while (line := await asyncio.wait_for(lines.queue.get(), WATCH_S + SECONDS)) is not None:
                if isinstance(line, Exception):
                    raise line
                event = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == 410:
                        raise Gone
                    raise UpstreamError("refused", str(event["object"].get("message")))
                yield event
        finally:
            if connection.receiver is lines:
                connection.abort()


@dataclass
class Lines:
    """A receiver of lines, as they come; None is their end."""

    queue: asyncio.Queue[bytes | Exception | None] = field(default_factory=asyncio.Queue)
    held: bytes = b""
    status: int = 0

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def data(self, part: bytes) -> None:
        if self.status == 200:
            *whole, self.held = (self.held + part).split(b"\n")
            for line in whole:
                if line.strip():
                    self.queue.put_nowait(line)

    def complete(self) -> None:
        if self.status == 410:
            self.queue.put_nowait(Gone())
        elif self.status != 200:
            self.queue.put_nowait(UpstreamError("refused", f"the API server answered with status {self.status}"))
        else:
            self.queue.put_nowait(None)

    def failed(self, error: UpstreamError) -> None:
        self.queue.put_nowait(error)
