"""The tiers of the KV cache below the device: blocks are written through to host memory, disk and a shared store.

A full block is copied to host memory after the step that computes it, and from there to the stores, in the background.
So nothing has to be copied when the device evicts it, and a process that is killed has lost no more than its last
steps. A new sequence takes the longest prefix that the device has, continues with blocks of host memory, and computes
the rest. Blocks that only a store has are fetched to host memory while the sequence waits in the queue and others run.

No failure of a tier fails a request: a block that is missing, late or corrupted is computed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from ..core.block_events import StoredBlocks, TierReport
from ..core.request import Request, Sequence
from .device_copies import Done
from .disk import DiskStore
from .fingerprint import block_key
from .host_memory import HostMemory, Slot
from .store import BlockStore, Buffer, CorruptBlock, StoreError
from .transfer import Listener, backend_of

log = logging.getLogger("lmworks.engine")

FETCH_TIMEOUT_S = 10.0  # a sequence that waited so long for a store is computed
FETCH_BLOCKS = 8  # that are asked for at once
# Threads: a checksum of a block takes longer than reading it, about two seconds for 1 GB on one core.
FETCH_READERS = 8  # of one sequence
READERS = 32
WRITERS = 4
FILL_TIMEOUT_S = 1.0  # of a block that is on its way to host memory, when another server asks for it
HOST, PEER = "host", "peer"
WRITE_SHARE = 4  # one slot in so many may wait to be written


@dataclass(eq=False)
class Fetch:
    """Blocks of one sequence on their way from a store to host memory."""

    deadline: float
    stores: list[tuple[str, BlockStore]]
    keys: deque[list[bytes]]  # that no thread has taken yet, in groups of FETCH_BLOCKS
    readers: int  # threads that fetch
    slots: list[Slot] = field(default_factory=list)  # pinned until the sequence is admitted
    over: bool = False
    given_up: bool = False


@dataclass
class TierCounts:
    """Since the start. Blocks, by tier; errors by what went wrong."""

    hits: Counter[str] = field(default_factory=Counter)  # blocks loaded to the device, by the tier they came from
    stored: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


class Copies(Protocol):
    """Between the cache and host memory: of one device (`DeviceCopies`), or of all ranks (`RankCopies`)."""

    def save(self, blocks: Many[int], slots: Many[int], done: Done) -> None: ...
    def load(self, slots: Many[int], blocks: Many[int], done: Done) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None: ...


class KVTiers:
    """The engine's thread calls it, but for what is marked."""

    def __init__(
        self, host: HostMemory, copies: Copies, fingerprint: bytes, stores: Many[tuple[str, BlockStore]] = ()
    ) -> None:
        """`stores`: by name, nearest first."""
        self.host, self.copies = host, copies
        self.fingerprint, self.stores = fingerprint, list(stores)
        self.adapters: dict[str, bytes] = {}  # digests of their files: a name may come to mean others
        self.peers: dict[str, BlockStore] = {}  # other servers, by address; asked for requests that name one
        self.listener: Listener | None = None
        self.counts = TierCounts()
        self.fresh: dict[int, bytes] = {}  # blocks that became full, to be saved after the step is launched
        self.urgent: dict[int, bytes] = {}  # those that the step overwrites: before it is
        self.loads: list[tuple[Slot, int]] = []  # to blocks, before the step is launched
        self.fetches: dict[Request, Fetch] = {}  # of requests that wait in the queue
        self.finished = threading.Condition()  # notified when a fetch is over, or what is counted below has changed
        self.copying = 0  # blocks on their way from the device
        self.queued_writes = 0
        self.readers = ThreadPoolExecutor(READERS, "kv-fetch")
        self.writers = [Writer(self) for _ in range(WRITERS if self.stores else 0)]

    # --- events of the prefix cache -----------------------------------------------------------------------

    def stored(self, event: StoredBlocks) -> None:
        self.fresh.update(zip(event.blocks, self.keys(event.sequence, event.hashes), strict=True))

    def evicted(self, block: int, digest: bytes) -> None:
        """It became full in an earlier step, and has not been saved yet."""
        key = self.fresh.pop(block, None)
        if key is not None:
            self.urgent[block] = key

    def corrupted(self, digest: bytes) -> None:
        for adapter in {b"", *self.adapters.values()}:
            key = block_key(self.fingerprint + adapter, digest)
            self.host.drop(key)
            for pending in (self.fresh, self.urgent):
                for block in [block for block, found in pending.items() if found == key]:
                    del pending[block]
            if self.stores:
                self.writer(key).queue.put(key)

    def cleared(self) -> None:
        """The device's blocks alone: the engine sleeps."""

    def keys(self, sequence: Sequence, digests: Many[bytes]) -> list[bytes]:
        """Of blocks in all tiers."""
        adapter = sequence.params.adapter
        root = self.fingerprint + (b"" if adapter is None else self.adapters[adapter])
        return [block_key(root, digest) for digest in digests]

    # --- around a step ------------------------------------------------------------------------------------

    def before_launch(self) -> None:
        """Save what the step overwrites, then load what it reads."""
        self.save(self.urgent)
        if self.loads:
            loads, self.loads = self.loads, []
            slots = [slot for slot, _ in loads]
            self.counts.hits.update(slot.source for slot in slots)
            for slot in slots:
                slot.source = HOST
            self.copies.load(
                [slot.index for slot in slots], [block for _, block in loads], lambda: self.host.unpin(slots)
            )

    def after_launch(self) -> None:
        self.save(self.fresh)

    def save(self, pending: dict[int, bytes]) -> None:
        """Copy blocks to host memory, unless they are there."""
        if not pending:
            return
        blocks, slots = [], []
        for block, key in pending.items():
            slot = self.host.reserve(key)
            if slot is not None:
                blocks.append(block)
                slots.append(slot)
            elif key not in self.host:
                self.counts.errors["host memory busy"] += 1
        pending.clear()
        if slots:
            self.counts.stored[HOST] += len(slots)
            with self.finished:
                self.copying += len(slots)
            self.copies.save(blocks, [slot.index for slot in slots], lambda: self.on_saved(slots))

    def on_saved(self, slots: list[Slot]) -> None:
        """Also called by the thread of the copies."""
        self.host.fill(slots)
        for slot in slots:
            self.write_later(slot)
        with self.finished:
            self.copying -= len(slots)
            self.finished.notify_all()

    # --- sequences ----------------------------------------------------------------------------------------

    def begin_fetch(self, sequence: Sequence, digests: list[bytes], on_device: int) -> None:
        """Fetch what follows the blocks that the device has, where a store has it. The sequence waits meanwhile."""
        peer = self.peers.get(sequence.request.kv_remote or "")
        stores = [*self.stores, *([] if peer is None else [(PEER, peer)])]
        if not stores:
            return
        # From the device's blocks on, so that those in host memory are not evicted meanwhile.
        keys = self.keys(sequence, digests[on_device:])
        first = next((key for key in keys if key not in self.host), None)
        if first is None or not any(store.may_have(first) for _, store in stores):
            return
        groups = deque(keys[begin : begin + FETCH_BLOCKS] for begin in range(0, len(keys), FETCH_BLOCKS))
        readers = min(FETCH_READERS, len(groups))
        fetch = self.fetches[sequence.request] = Fetch(time.monotonic() + FETCH_TIMEOUT_S, stores, groups, readers)
        for _ in range(readers):
            self.readers.submit(self.fetch_blocks, fetch)

    def is_fetching(self, sequence: Sequence) -> bool:
        fetch = self.fetches.get(sequence.request)
        if fetch is None or fetch.over:
            return False
        if time.monotonic() > fetch.deadline:
            self.counts.errors["fetch timeout"] += 1
            self.end_fetch(sequence)
            return False
        return True

    def wait(self, seconds: float) -> None:
        """Until a fetch is over."""
        with self.finished:
            self.finished.wait_for(lambda: any(each.over for each in self.fetches.values()), seconds)

    def load(self, sequence: Sequence, digests: list[bytes], blocks: list[int]) -> int:
        """Have host memory's blocks loaded to these, up to the first that it does not have; returns how many."""
        slots = self.host.pin_prefix(self.keys(sequence, digests[: len(blocks)]))
        self.loads += zip(slots, blocks, strict=False)
        self.end_fetch(sequence)
        return len(slots)

    def end_fetch(self, sequence: Sequence) -> None:
        """It was admitted, or has ended."""
        fetch = self.fetches.pop(sequence.request, None)
        if fetch is not None:
            with self.finished:
                fetch.given_up = True
                slots, fetch.slots = fetch.slots, []
            self.host.unpin(slots)

    # --- threads of the stores ----------------------------------------------------------------------------

    def fetch_blocks(self, fetch: Fetch) -> None:
        """One of the threads of a fetch: takes groups, until one is not there as a whole."""
        try:
            while keys := self.next_group(fetch):
                while keys and (count := self.fetch_some(fetch, keys)):
                    keys = keys[count:]
                if keys:  # what follows a block that is missing is of no use
                    fetch.keys.clear()
        except Exception:
            log.exception("blocks could not be fetched")
        finally:
            with self.finished:
                fetch.readers -= 1
                fetch.over = not fetch.readers
                self.finished.notify_all()

    def next_group(self, fetch: Fetch) -> list[bytes]:
        with self.finished:
            return fetch.keys.popleft() if fetch.keys and not fetch.given_up else []

    def fetch_some(self, fetch: Fetch, keys: list[bytes]) -> int:
        """The first of these blocks, from host memory or from one store; returns how many."""
        self.host.wait(keys[0], fetch.deadline - time.monotonic())  # another sequence may be fetching it
        slots = self.host.pin_prefix(keys)
        if slots:
            return self.keep(fetch, slots)
        slots = []
        for key in keys:
            slot = self.host.reserve(key)
            if slot is None:
                break
            slots.append(slot)
        found = 0
        for name, store in fetch.stores:
            if slots and not found:
                found = self.read(name, store, slots)
        self.host.fill(slots[:found])
        self.host.unpin(slots[found:])
        for slot in self.host.pin_prefix([slot.key for slot in slots[:found]]):
            self.write_later(slot)
        return self.keep(fetch, slots[:found])

    def read(self, name: str, store: BlockStore, slots: list[Slot]) -> int:
        try:
            found = store.read([slot.key for slot in slots], [self.host.view(slot) for slot in slots])
        except StoreError as error:
            self.on_error(name, error)
            found = error.read
        for slot in slots[:found]:
            slot.source = name
        return found

    def keep(self, fetch: Fetch, slots: list[Slot]) -> int:
        """Pinned for the sequence, if it still waits."""
        with self.finished:
            given_up = fetch.given_up
            if not given_up:
                fetch.slots += slots
        if given_up:
            self.host.unpin(slots)
        return len(slots)

    def write_later(self, slot: Slot) -> None:
        """The slot is pinned, and unpinned when it has been written. Where too many wait, it is not."""
        with self.finished:
            if self.stores and self.queued_writes < max(1, self.host.num_slots // WRITE_SHARE):
                self.queued_writes += 1
                self.writer(slot.key).queue.put(slot)
                return
        if self.stores:
            self.counts.errors["writes behind"] += 1
        self.host.unpin([slot])

    def writer(self, key: bytes) -> Writer:
        """Always the same one for a block: its writes and deletions stay in order."""
        return self.writers[key[0] % len(self.writers)]

    def write(self, item: Slot | bytes) -> None:
        """A slot, or the key of a block to be deleted."""
        if isinstance(item, bytes):
            for _, store in self.stores:
                store.delete(item)
            return
        if self.host.holds(item):
            self.write_block(item)
        self.host.unpin([item])
        with self.finished:
            self.queued_writes -= 1
            self.finished.notify_all()

    def write_block(self, slot: Slot) -> None:
        block = self.host.view(slot)
        for name, store in self.stores:
            try:
                if slot.source != name and store.write(slot.key, block):
                    self.counts.stored[name] += 1
            except StoreError as error:
                self.on_error(name, error)
            except Exception:
                log.exception("a block could not be written", extra={"tier": name})

    def on_error(self, name: str, error: StoreError) -> None:
        kind = "corrupt" if isinstance(error, CorruptBlock) else "failed"
        self.counts.errors[f"{name} {kind}"] += 1
        if self.counts.errors[f"{name} {kind}"] in (1, 10, 100) or kind == "corrupt":
            log.warning("a tier of the KV cache failed: %s", error, extra={"tier": name, "kind": kind})

    def report(self) -> TierReport:
        used = {"host": len(self.host) * self.host.block_bytes}
        used |= {name: store.used for name, store in self.stores if isinstance(store, DiskStore)}
        sources = [*(name for name, _ in self.stores), *([PEER] if self.peers else [])]
        errors = {f"{name} corrupt": 0 for name in sources} | self.counts.errors  # an alert needs their first increase
        return TierReport(dict(self.counts.hits), dict(self.counts.stored), errors, used)

    # --- other servers ------------------------------------------------------------------------------------

    def add_adapter(self, name: str, digest: bytes) -> None:
        self.adapters[name] = digest

    def listen(self, address: str) -> None:
        """Hand out blocks of host memory and of this server's disk to others."""
        self.listener = backend_of(address).listen(address, TierSource(self), self.host.whole)
        self.listener.start()
        log.info("blocks are handed out", extra={"address": self.listener.address})

    @property
    def address(self) -> str:
        return "" if self.listener is None else self.listener.address

    def connect(self, address: str) -> None:
        self.peers[address] = backend_of(address).connect(address, self.host.whole)

    # --- the end ------------------------------------------------------------------------------------------

    def flush(self, seconds: float) -> bool:
        """Wait until all blocks are written; false if some are not by then."""
        with self.finished:
            return self.finished.wait_for(lambda: not self.copying and not self.queued_writes, seconds)

    def settle(self) -> None:
        self.copies.settle()

    def clear(self) -> None:
        for fetch in self.fetches.values():
            fetch.given_up = True
        for pending in (self.fresh, self.urgent):
            pending.clear()
        self.host.clear()
        self.flush(FETCH_TIMEOUT_S)  # blocks that were dropped are not written
        for _, store in self.stores:
            if isinstance(store, DiskStore):
                store.clear()

    def close(self) -> None:
        if self.listener is not None:
            self.listener.server_close()
        self.copies.close()
        with self.finished:
            self.copying = 0  # what has not arrived by now never will: a rank is gone
        self.readers.shutdown(wait=True, cancel_futures=True)
        if self.stores:
            self.flush(FETCH_TIMEOUT_S)
        for writer in self.writers:
            writer.queue.put(None)
            writer.thread.join(FETCH_TIMEOUT_S)
        for store in (*(store for _, store in self.stores), *self.peers.values()):
            store.close()
        self.host.close()


class Writer:
    """A thread that writes blocks to the stores, in order."""

    def __init__(self, tiers: KVTiers) -> None:
        self.tiers = tiers
        self.queue: queue.SimpleQueue[Slot | bytes | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run, name="kv-write", daemon=True)
        self.thread.start()

    def run(self) -> None:
        while (item := self.queue.get()) is not None:
            self.tiers.write(item)


class TierSource:
    """What other servers read of this one. They write nothing."""

    def __init__(self, tiers: KVTiers) -> None:
        self.tiers = tiers

    def read(self, keys: Many[bytes], into: Many[memoryview]) -> int:
        host = self.tiers.host
        for done, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            host.wait(key, FILL_TIMEOUT_S)  # it may be on its way from the device
            slots = host.pin_prefix([key])
            if slots and len(buffer) == host.block_bytes:
                buffer[:] = host.view(slots[0])
            host.unpin(slots)
            if not slots or len(buffer) != host.block_bytes:
                return done + self.read_disk(keys[done:], into[done:])
        return len(keys)

    def read_disk(self, keys: Many[bytes], into: Many[memoryview]) -> int:
        for _, store in self.tiers.stores:
            if isinstance(store, DiskStore):
                return store.read(keys, into)
        return 0

    def write(self, key: bytes, block: Buffer) -> bool:
        return False

    def delete(self, key: bytes) -> None:
        """Its own are its own matter."""
