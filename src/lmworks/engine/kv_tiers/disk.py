"""A folder of blocks on a local disk, of one process, with a limit: the least recently used go first.

It outlives the process: the next one finds its files, in the order in which they were last used. Blocks of other
weights stay until their room is needed, as the server may go back to them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...spec import SpecError
from .store import HEADER, SUFFIX, TEMPORARY, Buffer, CorruptBlock, StoreError, block_path, read_file, write_file

PAUSE_S = 10.0  # without writes after one that failed: a full disk does not empty within a step
KEY_BYTES = 16


class DiskStore:
    def __init__(self, root: Path, capacity: int) -> None:
        """`capacity`: bytes of files."""
        self.root, self.capacity = root, capacity
        self.lock = threading.Lock()  # guards what follows
        self.sizes: OrderedDict[bytes, int] = OrderedDict()  # of files by key, least recently used first
        self.used = 0
        self.paused_until = 0.0
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.owner = (root / "lock").open("w")
            fcntl.flock(self.owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(f"{root}: another server keeps its blocks there; each needs its own folder") from None
        except OSError as error:
            raise SpecError(f"{root}: blocks cannot be kept there ({error.strerror})") from None
        self.scan()

    def scan(self) -> None:
        """Find the blocks of earlier processes; remove what one that was killed was writing."""
        found = []
        for path in self.root.glob("??/*"):
            with suppress(OSError, ValueError):
                if path.suffix == TEMPORARY:
                    path.unlink()
                elif path.suffix == SUFFIX and len(key := bytes.fromhex(path.stem)) == KEY_BYTES:
                    status = path.stat()
                    found.append((status.st_mtime_ns, key, status.st_size))
        for _, key, size in sorted(found):
            self.sizes[key] = size
            self.used += size
        self.evict_for(0)

    def may_have(self, key: bytes) -> bool:
        with self.lock:
            return key in self.sizes

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        for done, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if not self.may_have(key):
                return done
            path = block_path(self.root, key)
            try:
                there = read_file(path, key, buffer)
            except CorruptBlock as error:
                self.delete(key)
                raise CorruptBlock(str(error), done) from None
            except OSError as error:
                raise StoreError(f"{path}: {error.strerror}", done) from None
            if not there:  # removed by somebody else
                self.delete(key)
                return done
            with suppress(OSError):
                os.utime(path)
            with self.lock:
                if key in self.sizes:
                    self.sizes.move_to_end(key)
        return len(keys)

    def write(self, key: bytes, block: Buffer) -> bool:
        size = HEADER.size + len(block)
        with self.lock:
            if key in self.sizes:
                self.sizes.move_to_end(key)
                return False
            if size > self.capacity or time.monotonic() < self.paused_until:
                return False
            self.evict_for(size)
            self.used += size  # other threads write, too
        try:
            write_file(block_path(self.root, key), key, block)
        except OSError as error:
            with self.lock:
                self.used -= size
                self.paused_until = time.monotonic() + PAUSE_S
                if error.errno == errno.ENOSPC:  # others fill it, too: stay within what there is
                    self.capacity = min(self.capacity, self.used)
            raise StoreError(f"{self.root}: a block cannot be written ({error.strerror})") from None
        with self.lock:
            self.used -= self.sizes.pop(key, 0)  # another thread may have written it as well
            self.sizes[key] = size
        return True

    def evict_for(self, size: int) -> None:
        while self.sizes and self.used + size > self.capacity:
            key, freed = self.sizes.popitem(last=False)
            self.used -= freed
            with suppress(OSError):
                block_path(self.root, key).unlink()

    def delete(self, key: bytes) -> None:
        with self.lock:
            self.used -= self.sizes.pop(key, 0)
        with suppress(OSError):
            block_path(self.root, key).unlink()

    def clear(self) -> None:
        with self.lock:
            keys = list(self.sizes)
        for key in keys:
            self.delete(key)

    def close(self) -> None:
        self.owner.close()
