"""Files with a digest of every chunk, computed by threads while the bytes are written or read.

The digest of a whole file would be limited by one core. Chunks of 16 MiB are hashed by several threads that keep up
with the disk (hashing releases the GIL), can be verified one at a time by partial reads, and locate damage. For a file
of one chunk it is what `sha256sum` (or `xxhsum -H2`) prints.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...spec import CheckpointError

CHUNK = 16 * 2**20
HASHERS = 4  # threads; several, for disks faster than one core
MAX_PENDING = 2 * HASHERS  # chunks waiting to be hashed, in memory
MOST_PARTS = 1000  # of one system call, which takes 1,024

HEX_DIGITS = {"sha256": 64, "xxh3": 32}  # of a digest, by `checkpoint.hash`

Parts = list[memoryview]


def write_file(path: Path, pieces: Iterable[memoryview], algorithm: str) -> dict[str, Any]:
    """Write `pieces` in sequence, with fsync; returns size and digests."""
    size, digests = 0, []
    new = new_hash(algorithm)
    with hash_pool() as pool, path.open("wb", buffering=0) as file:
        for parts in in_chunks(pieces):
            digests.append(pool.submit(digest_of, parts, new))
            write_all(file.fileno(), parts)
            length = sum(len(part) for part in parts)
            begin_writeback(file.fileno(), size, length)
            size += length
            if len(digests) > MAX_PENDING:
                digests[-MAX_PENDING - 1].result()
        os.fsync(file.fileno())
        return {"bytes": size, "digests": [digest.result() for digest in digests]}


def new_hash(algorithm: str) -> Callable[[], Any]:
    """The hash constructor of a `checkpoint.hash`, like `hashlib.sha256`."""
    if algorithm not in HEX_DIGITS:
        raise CheckpointError(f"checkpoint.hash = {algorithm!r} is not known; use {' or '.join(HEX_DIGITS)}")
    if algorithm == "sha256":
        return hashlib.sha256
    try:
        from xxhash import xxh3_128
    except ImportError:
        needed = 'the package xxhash, which is not installed here: pip install "lmworks[xxhash]"'
        raise CheckpointError(f'checkpoints with checkpoint.hash = "xxh3" need {needed}') from None
    return xxh3_128


def begin_writeback(descriptor: int, start: int, length: int) -> None:
    """Start writeback of these bytes: by default Linux waits until a tenth of its memory is dirty.

    POSIX_FADV_DONTNEED starts it without waiting; fsync waits, and reports errors.
    """
    if length and hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def in_chunks(pieces: Iterable[memoryview]) -> Iterator[Parts]:
    """Chunks of exactly CHUNK bytes; only the last has fewer. An empty file has one empty chunk."""
    parts: Parts = []
    space, empty = CHUNK, True
    for piece in pieces:
        while len(piece):
            empty = False
            parts.append(piece[:space])
            space -= len(parts[-1])
            piece = piece[len(parts[-1]) :]
            if not space:
                yield parts
                parts, space = [], CHUNK
    if parts or empty:
        yield parts


def write_all(descriptor: int, parts: Parts) -> None:
    waiting = [part for part in parts if len(part)]
    while waiting:
        written = os.writev(descriptor, waiting[:MOST_PARTS])
        waiting = remaining(waiting, written)


def read_all(descriptor: int, parts: Parts, position: int) -> None:
    """Fill `parts` from `position` on; raises EOFError if the file is too short."""
    waiting = [part for part in parts if len(part)]
    while waiting:
        got = os.preadv(descriptor, waiting[:MOST_PARTS], position)
        if not got:
            raise EOFError
        position += got
        waiting = remaining(waiting, got)


def remaining(parts: Parts, done: int) -> Parts:
    """`parts` without their first `done` bytes."""
    for index, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[index + 1 :]]
        done -= len(part)
    return []


def digest_of(parts: Iterable[memoryview], new: Callable[[], Any]) -> str:
    digest = new()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@contextmanager
def hash_pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(HASHERS, thread_name_prefix="lmworks-hash")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def wrong_chunk(path: Path, size: int, digests: list[str], chunk: int, algorithm: str) -> int | None:
    """Read a whole file with several threads, and return the first chunk with another digest."""
    new = new_hash(algorithm)
    with path.open("rb", buffering=0) as file, hash_pool() as pool:

        def check(index: int) -> bool:
            content = memoryview(bytearray(min(chunk, size - index * chunk)))
            read_all(file.fileno(), [content], index * chunk)
            return digest_of([content], new) == digests[index]

        checks: list[Future[bool]] = [pool.submit(check, index) for index in range(len(digests))]
        return next((index for index, check in enumerate(checks) if not check.result()), None)
