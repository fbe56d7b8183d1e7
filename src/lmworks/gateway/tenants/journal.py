"""The usage journal: what kill -9 cannot take away.

A request writes a line before its server is asked and one when it has ended, each with one system call: from then on
the line is the kernel's, and survives this process. Between them its tokens are counted in a slot of a mapped file, at
the price of a store into memory for each event of a stream. Both are synced to disk every `flush_seconds`: that much a
power failure may lose.

    folder/lock                of the gateway that writes here
    folder/slots               of requests under way: tokens so far, and who answers
    folder/00000001.jsonl      {"open": …}, {"usage": …}, {"void": ID}; the next file begins where this one is long

A line `open` without a line `usage` or `void` is a request that was under way when the gateway was killed.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...spec import LMWorksError
from .usage import UsageRecord

log = logging.getLogger("lmworks.gateway")

SEGMENT_BYTES = 16 * 2**20
SLOT = struct.Struct("<QQQQB3xII64s")  # number of the request; prompt, generated, cached tokens; exact; prices; pool
COUNTS = struct.Struct("<QQQB")  # those of them that change with each event, after the number
SERVER = struct.Struct("<II64s")  # prices, in billionths of a dollar for a token, and the pool
COUNTS_AT, SERVER_AT = 8, SLOT.size - SERVER.size
SLOTS_AT_ONCE = 1024


class JournalDown(LMWorksError):
    """Nothing can be written: the disk is full, or gone."""


class OpenLine(msgspec.Struct):
    """A request before its server is asked."""

    id: str
    number: int  # of this journal
    slot: int
    began: float
    tenant: str
    key: str
    model: str
    path: str


class Line(msgspec.Struct, omit_defaults=True):
    open: OpenLine | None = None
    usage: UsageRecord | None = None
    void: str | None = None  # id of a request that no server was asked for


ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder(Line)


@dataclass(slots=True)
class Counts:
    """What is in a slot."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    exact: bool  # as the server counted them at its end
    price_in: int
    price_out: int
    pool: str


class Slots:
    """A mapped file with a place for each request under way."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        self.count = max(SLOTS_AT_ONCE, os.fstat(self.file).st_size // SLOT.size)
        os.posix_fallocate(self.file, 0, self.count * SLOT.size)  # a full disk must not kill us at a write to memory
        self.memory = mmap.mmap(self.file, self.count * SLOT.size)
        self.free = list(range(self.count))

    def take(self, number: int) -> int:
        if not self.free:
            more = range(self.count, self.count + SLOTS_AT_ONCE)
            os.posix_fallocate(self.file, 0, more.stop * SLOT.size)
            self.memory.resize(more.stop * SLOT.size)
            self.count = more.stop
            self.free = list(more)
        slot = self.free.pop()
        SLOT.pack_into(self.memory, slot * SLOT.size, number, 0, 0, 0, 0, 0, 0, b"")
        return slot

    def count_tokens(self, slot: int, prompt: int, completion: int, cached: int, exact: bool) -> None:
        COUNTS.pack_into(self.memory, slot * SLOT.size + COUNTS_AT, prompt, completion, cached, exact)

    def set_server(self, slot: int, price_in: int, price_out: int, pool: str) -> None:
        SERVER.pack_into(self.memory, slot * SLOT.size + SERVER_AT, price_in, price_out, pool.encode()[:64])

    def read(self, slot: int, number: int) -> Counts | None:
        """None: the slot is another request's by now."""
        if slot >= self.count:
            return None
        found, prompt, completion, cached, exact, price_in, price_out, pool = SLOT.unpack_from(
            self.memory, slot * SLOT.size
        )
        if found != number:
            return None
        name = pool.rstrip(b"\0").decode(errors="replace")
        return Counts(prompt, completion, cached, bool(exact), price_in, price_out, name)

    def close(self) -> None:
        self.memory.close()
        os.close(self.file)


class Journal:
    """One gateway's. `recovered` is what the one before it left behind: usage that may not be in the store yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.slots = Slots(folder / "slots")
        except BlockingIOError:
            raise LMWorksError(f"tenants.journal: another gateway writes into {folder}: give each its own") from None
        except OSError as error:
            raise LMWorksError(f"tenants.journal: {folder}: {error.strerror}") from None
        self.open: dict[str, OpenLine] = {}
        self.number = 0
        self.torn = False  # the last line was not written whole
        self.old = sorted(folder.glob("*.jsonl"))  # files whose usage is not known to be in the store
        self.recovered = self.recover()
        self.file = -1
        self.size = 0
        self.next_file()

    # --- writing ------------------------------------------------------------------------------------------

    def begin(self, id: str, began: float, tenant: str, key: str, model: str, path: str) -> OpenLine:
        """Before a server is asked; raises JournalDown."""
        self.number += 1
        try:
            slot = self.slots.take(self.number)
        except OSError as error:
            raise JournalDown(f"the usage journal cannot be written: {error.strerror}") from None
        line = OpenLine(id, self.number, slot, began, tenant, key, model, path)
        try:
            self.write(Line(open=line))
        except JournalDown:
            self.slots.free.append(slot)
            raise
        self.open[id] = line
        return line

    def end(self, line: OpenLine, record: UsageRecord | None) -> None:
        """After its answer: what was used, or that no server was asked. Raises JournalDown."""
        del self.open[line.id]
        self.slots.free.append(line.slot)
        self.write(Line(usage=record) if record is not None else Line(void=line.id))

    def write(self, line: Line) -> None:
        data = ENCODER.encode(line) + b"\n"
        if self.torn:
            data = b"\n" + data
        try:
            written = os.write(self.file, data)
        except OSError as error:
            raise JournalDown(f"the usage journal cannot be written: {error.strerror}") from None
        self.size += written
        self.torn = written < len(data)
        if self.torn:
            raise JournalDown("the usage journal cannot be written: the disk is full")

    # --- files --------------------------------------------------------------------------------------------

    def next_file(self) -> None:
        """A new file, which begins with the requests that are under way."""
        number = int(self.old[-1].stem) + 1 if self.old else 1
        path = self.folder / f"{number:08d}.jsonl"
        new = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
        os.write(new, b"".join(ENCODER.encode(Line(open=line)) + b"\n" for line in self.open.values()))
        before, self.file, self.size = self.file, new, os.fstat(new).st_size
        if before >= 0:
            os.fsync(before)
            os.close(before)
        self.path = path

    def turn_over(self) -> list[Path]:
        """Starts a new file where this one is long. Files that may go once all usage so far is in the store."""
        if self.size >= SEGMENT_BYTES:
            self.old.append(self.path)
            self.next_file()
        return list(self.old)

    def forget(self, files: list[Path]) -> None:
        """Their usage is in the store."""
        for path in files:
            path.unlink(missing_ok=True)
            self.old.remove(path)

    def sync(self) -> None:
        """To disk; in any thread, while `turn_over` is not called. Covers what was written into memory too."""
        os.fsync(self.slots.file)
        os.fsync(self.file)

    def close(self) -> None:
        self.slots.close()
        os.close(self.file)
        os.close(self.lock)

    # --- recovery -----------------------------------------------------------------------------------------

    def recover(self) -> list[UsageRecord]:
        opened: dict[str, OpenLine] = {}
        usage: dict[str, UsageRecord] = {}
        broken = 0
        for path in self.old:
            for text in path.read_bytes().split(b"\n"):
                try:
                    line = DECODER.decode(text) if text else Line()
                except msgspec.MsgspecError:
                    broken += 1  # the last line of a gateway that was killed, or what a full disk left
                    continue
                if line.open is not None:
                    opened[line.open.id] = line.open
                elif line.usage is not None:
                    usage[line.usage.id] = line.usage
                elif line.void is not None:
                    opened.pop(line.void, None)
        under_way = [line for line in opened.values() if line.id not in usage]
        found = [*usage.values(), *filter(None, map(self.interrupted, under_way))]
        self.number = max((line.number for line in opened.values()), default=0)
        if under_way or broken:
            fields = {"requests": len(under_way), "broken_lines": broken, "folder": str(self.folder)}
            log.warning("requests were under way when the gateway was killed: they are counted", extra=fields)
        return found

    def interrupted(self, line: OpenLine) -> UsageRecord | None:
        """What its server had generated, and the gateway had read, until the kill."""
        counts = self.slots.read(line.slot, line.number)
        if counts is None or not counts.pool:
            return None  # no server had answered
        cost = counts.prompt_tokens * counts.price_in + counts.completion_tokens * counts.price_out
        return UsageRecord(
            line.id, line.began, line.began, line.tenant, line.key, line.model, counts.pool, line.path,
            counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens, cost, "interrupted", not counts.exact,
        )  # fmt: skip
