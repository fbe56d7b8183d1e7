"""Blocks over sockets: a shared store, a decode server that gets a prompt's blocks, and ways in which that fails."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_kv_tiers import GREEDY, KINDS, MIB, PREFIX, ask, make_engine, settled, tiers_of, told

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Request, Result
from lmworks.engine.kv_tiers import socket_store
from lmworks.engine.kv_tiers.disk import DiskStore
from lmworks.engine.kv_tiers.socket_store import HELLO, NONCE, BlockServer, SocketStore
from lmworks.engine.kv_tiers.store import HEADER, CorruptBlock, header
from lmworks.engine.kv_tiers.transfer import backend_of
from lmworks.spec import SpecError

ANY_PORT = "tcp://127.0.0.1:0"
KEYS = [bytes([number]) * 16 for number in range(4)]
CONTENT = [bytes([65 + number]) * 1000 for number in range(4)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockServer]:
    disk = DiskStore(tmp_path / "store", 2**20)
    server = BlockServer(ANY_PORT, disk)
    server.start()
    yield server
    server.shutdown()
    server.server_close()
    disk.close()


def buffers(count: int = 4) -> list[memoryview]:
    return [memoryview(bytearray(1000)) for _ in range(count)]


def address(engine: Engine) -> str:
    listener = tiers_of(engine).listener
    assert listener is not None
    return listener.address


def ask_from(engine: Engine, remote: str) -> Result:
    engine.add(request := Request(list(PREFIX), GREEDY, kv_remote=remote))
    return next(delta.result for delta in engine.run() if delta.request is request and delta.result)


# --- the store --------------------------------------------------------------------------------------------


def test_a_closed_server_leaves_no_thread(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "store", 2**20)
    server = BlockServer(ANY_PORT, disk)
    server.start()
    assert server.thread is not None and server.thread.is_alive()
    server.server_close()
    server.thread.join(5)
    assert not server.thread.is_alive()
    disk.close()


def test_blocks_are_written_read_and_deleted_over_a_socket(store: BlockServer) -> None:
    client, other, into = SocketStore(store.address), SocketStore(store.address), buffers()
    assert [client.write(key, block) for key, block in zip(KEYS[:3], CONTENT, strict=False)] == [True] * 3
    assert not other.write(KEYS[0], CONTENT[0])
    assert other.read(KEYS, into) == 3 and [bytes(each) for each in into[:3]] == CONTENT[:3]
    client.delete(KEYS[1])
    assert other.read(KEYS, into) == 1
    assert client.read([KEYS[3]], buffers(1)) == 0
    client.close()
    other.close()


def test_secret_is_proved_and_needed_beyond_this_machine(store: BlockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    good, place = socket_store.proof, socket_store.parse_address(store.address)
    with socket.create_connection(place) as raw:
        raw.settimeout(5)
        hello = socket_store.receive_bytes(raw, len(HELLO) + NONCE)
        raw.sendall(good(hello[len(HELLO) :])[::-1])
        assert raw.recv(1) == b"\0" and raw.recv(1) == b""
    monkeypatch.delenv("LMWORKS_KV_SECRET", raising=False)
    with pytest.raises(SpecError, match="set LMWORKS_KV_SECRET"):
        BlockServer("tcp://0.0.0.0:0", store.source)
    monkeypatch.setenv("LMWORKS_KV_SECRET", "one")
    first = good(bytes(NONCE))
    monkeypatch.setenv("LMWORKS_KV_SECRET", "two")
    assert good(bytes(NONCE)) != first


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        socket_store.COMMAND.pack(9, 1, 10) + KEYS[0],
        socket_store.COMMAND.pack(socket_store.GET, 2**31, 10),
        socket_store.COMMAND.pack(socket_store.GET, 1, 2**60) + KEYS[0],
        socket_store.COMMAND.pack(socket_store.PUT, 1, 1000) + KEYS[0] + header(KEYS[1], CONTENT[0]) + CONTENT[0],
        socket_store.COMMAND.pack(socket_store.PUT, 1, 1000) + KEYS[0] + header(KEYS[0], CONTENT[1]) + CONTENT[0],
    ],
    ids=["http", "unknown command", "many keys", "huge block", "key of another block", "wrong checksum"],
)
def test_nonsense_ends_the_connection_alone(store: BlockServer, sent: bytes) -> None:
    client = SocketStore(store.address)
    connection = client.connected()
    connection.sendall(sent)
    assert connection.recv(1) == b""
    other = SocketStore(store.address)
    assert other.read(KEYS, buffers()) == 0 and other.write(KEYS[0], CONTENT[0])
    client.close()
    other.close()


def test_connection_is_opened_again(store: BlockServer) -> None:
    client = SocketStore(store.address)
    assert client.write(KEYS[0], CONTENT[0])
    client.connected().shutdown(socket.SHUT_RDWR)
    assert client.read(KEYS[:1], buffers(1)) == 1
    client.close()


def test_idle_connection_stays_open(store: BlockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_store, "READ_S", 0.2)
    client = SocketStore(store.address)
    for number in range(2):
        assert client.write(KEYS[number], CONTENT[number])
        connection = client.connected()
        time.sleep(0.5)
        assert client.fresh() is connection
    client.close()


@pytest.mark.parametrize("given", ["tcp://host", "tcp://:80", "http://host:80", "tcp://host:99999", "host:80"])
def test_wrong_addresses_are_named(given: str) -> None:
    with pytest.raises(SpecError, match=r"write tcp://HOST:PORT|there are: tcp"):
        backend_of(given).connect(given, memoryview(b""))


def test_engines_share_blocks_over_a_store(store: BlockServer) -> None:
    engine = make_engine(kv_shared=store.address)
    want = ask(engine, PREFIX).token_ids
    engine.close()
    again = make_engine(kv_shared=store.address)
    found = ask(again, PREFIX)
    assert (found.token_ids, found.cached_tokens, again.metrics.kv_tier_hits) == (want, 64, {"shared": 8})
    again.close()


# --- prefill and decode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_answer_of_two_engines_is_that_of_one(kind: str) -> None:
    """The decode engine computes what a prefix hit leaves, and no more; bit by bit as with its own prefix."""
    want = told(ask(alone := make_engine(kind, blocks=200, tiers=False), PREFIX)), told(ask(alone, PREFIX))
    prefill = make_engine(kind, kv_listen=ANY_PORT)
    decode = make_engine(kind, kv_peers=[address(prefill)])
    assert told(ask(prefill, PREFIX)) == want[0]
    found = ask_from(decode, address(prefill))
    assert told(found) == want[1]
    assert (found.cached_tokens, decode.metrics.kv_tier_hits) == (64, {"peer": 8})
    prefill.close()
    decode.close()


def test_blocks_come_from_the_disk_of_the_prefill_server(tmp_path: Path) -> None:
    options = {"kv_disk": str(tmp_path), "kv_disk_gib": MIB, "kv_listen": ANY_PORT}
    first = make_engine(**options)
    want = ask(first, PREFIX).token_ids
    first.close()
    prefill = make_engine(**options)
    decode = make_engine(kv_peers=[address(prefill)])
    found = ask_from(decode, address(prefill))
    assert (found.token_ids, found.cached_tokens) == (want, 64)
    prefill.close()
    decode.close()


def test_peer_of_other_weights_has_nothing() -> None:
    prefill = make_engine(seed=2, kv_listen=ANY_PORT)
    ask(prefill, PREFIX)
    decode = make_engine(kv_peers=[address(prefill)])
    assert ask_from(decode, address(prefill)).cached_tokens == 0
    prefill.close()
    decode.close()


def test_request_may_name_configured_servers_alone() -> None:
    """Else whoever sends requests could make the server connect anywhere."""
    decode = make_engine(kv_peers=["tcp://127.0.0.1:9"])
    decode.add(request := Request(list(PREFIX), GREEDY, kv_remote="tcp://169.254.169.254:80"))
    [delta] = decode.run()
    assert delta.request is request and delta.result is not None
    assert "not one of the servers of engine.kv_peers" in (delta.result.error or "")
    decode.close()


def half_a_block(connection: socket.socket, block_bytes: int) -> None:
    key = b"\0" * 16
    connection.sendall(b"\1" + header(key, bytes(block_bytes)) + bytes(block_bytes // 2))


def flipped_block(connection: socket.socket, block_bytes: int) -> None:
    command = socket_store.receive_bytes(connection, socket_store.COMMAND.size)
    count = socket_store.COMMAND.unpack(command)[1]
    key = socket_store.receive_bytes(connection, 16 * count)[:16]
    connection.sendall(b"\1" + header(key, bytes(block_bytes)) + b"x" * block_bytes)


def silence(connection: socket.socket, block_bytes: int) -> None:
    while connection.recv(2**16):
        pass


def no_greeting(connection: socket.socket, block_bytes: int) -> None: ...


@pytest.mark.parametrize("what", [half_a_block, flipped_block, silence, no_greeting, None])
def test_failed_transfer_is_a_local_prefill(
    what: Callable[[socket.socket, int], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill server that is gone, dies in the middle of a block, sends another one, or says nothing."""
    monkeypatch.setattr(socket_store, "READ_S", 0.3)
    want = ask(plain := make_engine(), PREFIX).token_ids
    size = tiers_of(plain).host.block_bytes
    with socket.create_server(("127.0.0.1", 0)) as listening:
        remote = f"tcp://127.0.0.1:{listening.getsockname()[1]}"

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                if what is not no_greeting:
                    connection.sendall(HELLO + bytes(NONCE))
                    socket_store.receive_bytes(connection, NONCE)
                    connection.sendall(b"\1")
                assert what is not None
                what(connection, size)

        decode = make_engine(kv_peers=[remote])
        if what is None:
            listening.close()
        else:
            threading.Thread(target=serve, daemon=True).start()
        found = ask_from(decode, remote)
        assert (found.token_ids, found.cached_tokens) == (want, 0)
        kind = "peer corrupt" if what in (half_a_block, flipped_block) else "peer failed"
        assert settled(decode).report().errors == {"peer corrupt": 0} | {kind: 1}
        decode.close()


def test_interrupted_transfer_keeps_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = make_engine(kv_listen=ANY_PORT)
    want = ask(prefill, PREFIX).token_ids
    server = tiers_of(prefill).listener
    assert isinstance(server, BlockServer)
    read, served = server.source.read, []

    def dying(keys: Any, into: Any) -> int:
        served.append(1)
        if len(served) > 3:
            raise OSError("killed")
        return read(keys, into)

    monkeypatch.setattr(server.source, "read", dying)
    decode = make_engine(kv_peers=[address(prefill)])
    found = ask_from(decode, address(prefill))
    assert (found.token_ids, found.cached_tokens) == (want, 24)
    prefill.close()
    decode.close()


# --- other backends ---------------------------------------------------------------------------------------

PLUG_IN = '''
"""A backend as one for RDMA would be: it registers memory once, and writes blocks of others into it."""

registered, served = [], {}


class Remote:
    def __init__(self, address, memory):
        self.source, self.memory = served[address], memory

    def may_have(self, key):
        return True

    def read(self, keys, into):
        assert all(inside(self.memory, buffer) for buffer in into)
        return self.source.read(keys, into)

    def close(self):
        registered.remove(self.memory)


def inside(memory, buffer):
    import numpy
    whole, part = (numpy.frombuffer(each, numpy.uint8).__array_interface__["data"][0] for each in (memory, buffer))
    return whole <= part and part + len(buffer) <= whole + len(memory)


class Listener:
    def __init__(self, address):
        self.address = address

    def start(self):
        pass

    def server_close(self):
        del served[self.address]


class Backend:
    def connect(self, address, memory):
        registered.append(memory)
        return Remote(address, memory)

    def listen(self, address, source, memory):
        served[address] = source
        return Listener(address)
'''


def test_backend_of_another_package_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its entry point, as NIXL's would be."""
    (tmp_path / "fake_nixl.py").write_text(PLUG_IN)
    about = tmp_path / "fake_nixl-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-nixl\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[lmworks.kv_transfer]\nnixl = fake_nixl:Backend\n")
    with pytest.raises(SpecError, match="no backend transfers blocks by 'nixl'; there are: tcp"):
        make_engine(kv_listen="nixl://a")
    monkeypatch.syspath_prepend(str(tmp_path))
    prefill = make_engine(kv_listen="nixl://a")
    want = ask(prefill, PREFIX).token_ids
    decode = make_engine(kv_peers=["nixl://a"])
    found = ask_from(decode, "nixl://a")
    assert (found.token_ids, found.cached_tokens, decode.metrics.kv_tier_hits) == (want, 64, {"peer": 8})
    plug_in: Any = sys.modules["fake_nixl"]
    assert len(plug_in.registered) == 1 and list(plug_in.served) == ["nixl://a"]
    prefill.close()
    decode.close()
    assert not plug_in.registered and not plug_in.served


def test_header_is_checked_before_a_block_is_read() -> None:
    good = header(KEYS[0], CONTENT[0])
    assert socket_store.check_header(good, KEYS[0], 1000, "x") == good[-16:]
    for found, message in (
        (good[:-1], "cut off"),
        (b"x" + good[1:], "does not begin"),
        (header(KEYS[1], CONTENT[0]), "another block"),
        (header(KEYS[0], CONTENT[0][:-1]), "999 bytes"),
    ):
        with pytest.raises(CorruptBlock, match=message):
            socket_store.check_header(found, KEYS[0], 1000, "x")
    assert HEADER.size == 48
