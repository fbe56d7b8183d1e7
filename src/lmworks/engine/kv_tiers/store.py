"""What keeps blocks outside the process: a disk, a shared folder, a socket. And the record in which each keeps one.

A record is a header and the bytes of a block. Its key is a hash over the weights, the layout of the cache and the hash
of the block (`fingerprint.block_key`), and its checksum is over the bytes. A record with another key, another length or
a wrong checksum is never used.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ...spec import LMWorksError

Buffer = bytes | bytearray | memoryview
MAGIC = b"LMWKVB1\n"
HEADER = struct.Struct("<8s16sQ16s")  # magic, key, bytes of the block, checksum
SUFFIX = ".kv"
TEMPORARY = ".part"  # being written, or left by a process that was killed while it wrote


class StoreError(LMWorksError):
    """A store cannot be read or written now. The blocks are computed instead."""

    def __init__(self, message: str, read: int = 0) -> None:
        super().__init__(message)
        self.read = read  # blocks that were read before it


class CorruptBlock(StoreError):
    """A record that is not what was written under its key."""


class BlockStore(Protocol):
    """Called by the threads of the tiers, never by the engine's, but for `may_have`."""

    def may_have(self, key: bytes) -> bool:
        """Whether it is worth to ask. Answers at once."""
        ...

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Copy blocks to these buffers, in order, up to the first that is not there; returns how many.

        Every block that is counted is verified. Raises StoreError, with what was read before.
        """
        ...

    def write(self, key: bytes, block: Buffer) -> bool:
        """Keep a block; false if it was there. Raises StoreError."""
        ...

    def delete(self, key: bytes) -> None:
        """Its content is corrupted."""
        ...

    def close(self) -> None: ...


def checksum(block: Buffer) -> bytes:
    return hashlib.blake2b(block, digest_size=16).digest()


def header(key: bytes, block: Buffer) -> bytes:
    return HEADER.pack(MAGIC, key, len(block), checksum(block))


def check_header(found: bytes, key: bytes, size: int, where: str) -> bytes:
    """Raise unless it is the header of this block; returns the checksum."""
    if len(found) != HEADER.size:
        raise CorruptBlock(f"{where}: the header is cut off")
    magic, named, length, digest = HEADER.unpack(found)
    if magic != MAGIC:
        raise CorruptBlock(f"{where}: it does not begin as a block")
    if named != key:
        raise CorruptBlock(f"{where}: it holds another block")
    if length != size:
        raise CorruptBlock(f"{where}: it has {length:,} bytes, and a block has {size:,}")
    return bytes(digest)


def check_content(block: Buffer, digest: bytes, where: str) -> None:
    if checksum(block) != digest:
        raise CorruptBlock(f"{where}: its checksum is wrong")


# --- files ------------------------------------------------------------------------------------------------


def block_path(root: Path, key: bytes) -> Path:
    name = key.hex()
    return root / name[:2] / f"{name}{SUFFIX}"


def read_file(path: Path, key: bytes, into: memoryview) -> bool:
    """False if there is no such file. Raises CorruptBlock, and OSError."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return False
    with file:
        digest = check_header(file.read(HEADER.size) or b"", key, len(into), str(path))
        filled = 0
        while filled < len(into):
            count = file.readinto(into[filled:])
            if not count:
                raise CorruptBlock(f"{path}: it is cut off")
            filled += count
        if file.read(1):
            raise CorruptBlock(f"{path}: it is too long")
    check_content(into, digest, str(path))
    return True


def write_file(path: Path, key: bytes, block: Buffer) -> None:
    """It is there as a whole or not at all, whenever the process is killed. Raises OSError.

    Not synced: what a power failure damages has a wrong checksum.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb", buffering=0) as file:
            for part in (header(key, block), block):
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
