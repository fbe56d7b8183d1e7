"""How blocks get from one server to another: a backend for each kind of address.

`tcp://HOST:PORT` is the socket (`socket_store.py`). Others are plug-ins: a package whose entry point in the group
`lmworks.kv_transfer` has the name of the scheme, and is a class with the methods of `TransferBackend`. A backend for
RDMA (NIXL) registers host memory once, and reads blocks of others into it: the buffers that `BlockStore.read` gets are
parts of it.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol

from ...spec import SpecError
from .socket_store import SCHEME, BlockServer, SocketStore, Source
from .store import BlockStore

GROUP = "lmworks.kv_transfer"


class Listener(Protocol):
    @property
    def address(self) -> str:
        """Where others read, with the port that was taken."""
        ...

    def start(self) -> None: ...
    def server_close(self) -> None: ...


class TransferBackend(Protocol):
    def connect(self, address: str, memory: memoryview) -> BlockStore:
        """Blocks of another server. `memory`: all of host memory, which buffers of `read` are parts of."""
        ...

    def listen(self, address: str, source: Source, memory: memoryview) -> Listener:
        """Hand out this server's blocks."""
        ...


class SocketBackend:
    def connect(self, address: str, memory: memoryview) -> BlockStore:
        return SocketStore(address)

    def listen(self, address: str, source: Source, memory: memoryview) -> Listener:
        return BlockServer(address, source)


def backend_of(address: str) -> TransferBackend:
    scheme, mark, _ = address.partition("://")
    if not mark:
        raise SpecError(f"{address!r} is not an address of blocks: write {SCHEME}://HOST:PORT")
    if scheme == SCHEME:
        return SocketBackend()
    found = entry_points(group=GROUP)
    for point in found:
        if point.name == scheme:
            backend: TransferBackend = point.load()()
            return backend
    names = ", ".join([SCHEME, *sorted(point.name for point in found)])
    raise SpecError(f"{address!r}: no backend transfers blocks by {scheme!r}; there are: {names}")
