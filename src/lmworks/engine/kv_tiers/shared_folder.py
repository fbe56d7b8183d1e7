"""A folder of blocks that several servers share, on a network file system or on one machine.

Nobody owns it and nobody keeps an index: a block is there if its file is. Who writes looks from time to time whether
the limit is kept, and removes what was not used for longest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...spec import SpecError
from .store import SUFFIX, TEMPORARY, Buffer, CorruptBlock, StoreError, block_path, read_file, write_file

TRIM_EVERY = 256  # writes
STALE_S = 3600.0  # of a temporary file: its writer is gone
TRIM_TO = 0.9  # of the limit, so that not every write finds it exceeded


class SharedFolder:
    def __init__(self, root: Path, capacity: int) -> None:
        """`capacity`: bytes; 0 is no limit."""
        self.root, self.capacity = root, capacity
        self.writes = 0
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"engine.kv_shared = {str(root)!r}: {error.strerror}") from None

    def may_have(self, key: bytes) -> bool:
        return True  # only a look at the folder would tell

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        for done, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            path = block_path(self.root, key)
            try:
                if not read_file(path, key, buffer):
                    return done
                os.utime(path)
            except CorruptBlock as error:
                self.delete(key)
                raise CorruptBlock(str(error), done) from None
            except FileNotFoundError:  # trimmed after it was read, which does not matter
                pass
            except OSError as error:
                raise StoreError(f"{path}: {error.strerror}", done) from None
        return len(keys)

    def write(self, key: bytes, block: Buffer) -> bool:
        path = block_path(self.root, key)
        try:
            if path.exists():
                return False
            write_file(path, key, block)
        except OSError as error:
            raise StoreError(f"{self.root}: a block cannot be written ({error.strerror})") from None
        self.writes += 1
        if self.capacity and self.writes % TRIM_EVERY == 0:
            self.trim()
        return True

    def trim(self) -> None:
        found, now = [], time.time()
        for path in self.root.glob("??/*"):
            with suppress(OSError):
                status = path.stat()
                if path.suffix == SUFFIX:
                    found.append((status.st_mtime, status.st_size, path))
                elif path.suffix == TEMPORARY and now - status.st_mtime > STALE_S:
                    path.unlink()
        used = sum(size for _, size, _ in found)
        if used <= self.capacity:
            return
        for _, size, path in sorted(found):
            if used <= TRIM_TO * self.capacity:
                break
            with suppress(OSError):
                path.unlink()
            used -= size

    def delete(self, key: bytes) -> None:
        with suppress(OSError):
            block_path(self.root, key).unlink()

    def close(self) -> None:
        """Nothing is held."""
