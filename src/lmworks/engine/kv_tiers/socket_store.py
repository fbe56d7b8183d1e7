"""Blocks over TCP: a store that servers share, or another server's blocks (prefill apart from decode).

A connection begins with a challenge: the client proves that it knows the secret in LMWORKS_KV_SECRET, without sending
it. Content is not encrypted: use a private network. Then requests follow each other, in order:

    get     keys, size of a block     a record (`store.HEADER` and the block) for each key up to the first unknown one
    put     key, record               whether it was new
    delete  key                       done

Nothing is unpickled, and no length is trusted beyond its limit.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import socketserver
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol
from urllib.parse import urlsplit

from ...spec import LMWorksError, SpecError
from .store import HEADER, Buffer, CorruptBlock, StoreError, check_content, check_header, header

SECRET = "LMWORKS_KV_SECRET"
SCHEME = "tcp"
HELLO = b"LMWKVS1\n"
NONCE = 32
GET, PUT, DELETE = 1, 2, 3
COMMAND = struct.Struct("<BIQ")  # what, number of keys, bytes of a block
KEY = 16
MAX_KEYS, MAX_BLOCK = 4096, 2**30
CONNECT_S, READ_S = 2.0, 10.0
CONNECTIONS = 256  # that a server keeps open at once


class Source(Protocol):
    """What a server hands out: a part of `BlockStore`."""

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int: ...
    def write(self, key: bytes, block: Buffer) -> bool: ...
    def delete(self, key: bytes) -> None: ...


def parse_address(address: str) -> tuple[str, int]:
    """Of tcp://HOST:PORT."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != SCHEME or not parts.hostname or port is None or parts.path:
        raise SpecError(f"{address!r} is not an address of blocks: write {SCHEME}://HOST:PORT")
    return parts.hostname, port


def proof(nonce: bytes) -> bytes:
    return hmac.digest(os.environ.get(SECRET, "").encode(), HELLO + nonce, hashlib.sha256)


def receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        count = connection.recv_into(into)
        if not count:
            raise ConnectionError("the connection was closed")
        into = into[count:]


def receive_bytes(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    receive(connection, memoryview(data))
    return bytes(data)


class SocketStore:
    """The client. Each thread has a connection, which is opened again after an error."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.place = parse_address(address)
        self.connections: dict[int, socket.socket] = {}  # by thread

    def may_have(self, key: bytes) -> bool:
        return True

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        done = 0
        try:
            connection = self.fresh()
            connection.sendall(COMMAND.pack(GET, len(keys), len(into[0])) + b"".join(keys))
            while done < len(keys) and receive_bytes(connection, 1) == b"\1":
                found = receive_bytes(connection, HEADER.size)
                digest = check_header(found, keys[done], len(into[done]), self.address)
                receive(connection, into[done])
                check_content(into[done], digest, self.address)
                done += 1
        except CorruptBlock as error:
            self.disconnect()
            raise CorruptBlock(str(error), done) from None
        except OSError as error:
            self.disconnect()
            raise StoreError(f"{self.address}: {error}", done) from None
        return done

    def write(self, key: bytes, block: Buffer) -> bool:
        return self.ask(COMMAND.pack(PUT, 1, len(block)) + key, header(key, block), block) == b"\1"

    def delete(self, key: bytes) -> None:
        with suppress(StoreError):
            self.ask(COMMAND.pack(DELETE, 1, 0) + key)

    def ask(self, *parts: Buffer) -> bytes:
        try:
            connection = self.fresh()
            for part in parts:
                connection.sendall(part)
            return receive_bytes(connection, 1)
        except OSError as error:
            self.disconnect()
            raise StoreError(f"{self.address}: {error}") from None

    def connected(self) -> socket.socket:
        known = self.connections.get(threading.get_ident())
        if known is not None:
            return known
        connection = socket.create_connection(self.place, CONNECT_S)
        try:
            connection.settimeout(READ_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if receive_bytes(connection, len(HELLO)) != HELLO:
                raise ConnectionError("it is not a store of blocks")
            connection.sendall(proof(receive_bytes(connection, NONCE)))
            if receive_bytes(connection, 1) != b"\1":
                raise ConnectionError(f"it has another {SECRET}")
        except BaseException:
            connection.close()
            raise
        self.connections[threading.get_ident()] = connection
        return connection

    def fresh(self) -> socket.socket:
        """Another connection where the server has closed this one since: it was restarted."""
        known = self.connections.get(threading.get_ident())
        if known is not None and select.select([known], [], [], 0)[0]:  # nothing is to be read, but its end
            self.disconnect()
        return self.connected()

    def disconnect(self) -> None:
        connection = self.connections.pop(threading.get_ident(), None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        for connection in list(self.connections.values()):
            connection.close()


class Handler(socketserver.BaseRequestHandler):
    server: BlockServer
    request: socket.socket

    def handle(self) -> None:
        with suppress(OSError, CorruptBlock):
            self.request.settimeout(CONNECT_S)
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = os.urandom(NONCE)
            self.request.sendall(HELLO + nonce)
            known = hmac.compare_digest(receive_bytes(self.request, NONCE), proof(nonce))
            self.request.sendall(b"\1" if known else b"\0")
            self.request.settimeout(None)
            while known:
                self.answer(*COMMAND.unpack(receive_bytes(self.request, COMMAND.size)))

    def answer(self, what: int, count: int, size: int) -> None:
        if not 1 <= count <= MAX_KEYS or size > MAX_BLOCK or what not in (GET, PUT, DELETE):
            raise ConnectionError("a malformed request")
        self.request.settimeout(READ_S)
        names = receive_bytes(self.request, count * KEY)
        keys = [names[begin : begin + KEY] for begin in range(0, len(names), KEY)]
        if what == GET:
            self.send_blocks(keys, size)
        elif what == PUT:
            digest = check_header(receive_bytes(self.request, HEADER.size), keys[0], size, "a sent block")
            block = receive_bytes(self.request, size)
            check_content(block, digest, "a sent block")
            new = False
            with suppress(StoreError):
                new = self.server.source.write(keys[0], block)
            self.request.sendall(b"\1" if new else b"\0")
        else:
            self.server.source.delete(keys[0])
            self.request.sendall(b"\1")
        self.request.settimeout(None)

    def send_blocks(self, keys: list[bytes], size: int) -> None:
        """One at a time: the next one is read while this one is on its way."""
        block = memoryview(bytearray(size))
        for key in keys:
            found = 0
            with suppress(StoreError):
                found = self.server.source.read([key], [block])
            if not found:
                self.request.sendall(b"\0")
                return
            self.request.sendall(b"\1" + header(key, block))
            self.request.sendall(block)


class BlockServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

    def __init__(self, address: str, source: Source) -> None:
        host, port = parse_address(address)
        if not os.environ.get(SECRET) and host not in ("127.0.0.1", "::1", "localhost"):
            raise SpecError(f"{address}: set {SECRET} where other machines can reach it")
        self.source = source
        self.slots = threading.BoundedSemaphore(CONNECTIONS)
        self.thread: threading.Thread | None = None
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise LMWorksError(f"{address}: {error.strerror or error}") from None

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"{SCHEME}://{host!s}:{port}"

    def start(self) -> None:
        self.thread = threading.Thread(target=self.serve_forever, name="kv-server", daemon=True)
        self.thread.start()

    def server_close(self) -> None:
        if self.thread is not None:  # it would look at a closed socket without a pause, for ever
            self.shutdown()
        super().server_close()

    def process_request_thread(self, request: object, client_address: object) -> None:
        with self.slots:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that sends nonsense is cut off, and not answered."""
