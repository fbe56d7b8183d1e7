"""Finished parts → the shards of each split: duplicates dropped, held-out documents set apart."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..spec.files import sync_folder
from .encode import Encoded, Job
from .index import OFFSET_DTYPE, Shard
from .progress import Progress


def first_occurrences(digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """True for the first document of every content, in the order of the sources."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal digests stay in order
    ordered = digests[order]
    first = np.ones(len(digests), np.bool_)
    first[order[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return first


def held_out(digests: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """True for the documents of the validation split.

    A document is held out when its digest, read as a number in [0, 1), is below `fraction`: adding documents
    later moves none from one split to the other. Where that leaves a split without any document, the one
    with the nearest digest goes there.
    """
    chosen: NDArray[np.bool_] = digests[:, 0] < np.uint64(min(int(fraction * 2**64), 2**64 - 1))
    if fraction > 0 and len(chosen) > 1:
        if not chosen.any():
            chosen[np.argmin(digests[:, 0])] = True
        elif chosen.all():
            chosen[np.argmax(digests[:, 0])] = False
    return chosen


def assemble(
    jobs: list[Job],
    encoded: list[Encoded],
    out: Path,
    dtype: np.dtype[Any],
    val_fraction: float,
    shard_tokens: int,
    progress: Progress,
) -> dict[str, tuple[Shard, ...]]:
    digests = np.concatenate([part.digests for part in encoded])
    kept = first_occurrences(digests)
    val = np.zeros(len(kept), np.bool_)
    val[kept] = held_out(digests[kept], val_fraction)
    writers = {"train": ShardWriter(out, "train", shard_tokens), "val": ShardWriter(out, "val", shard_tokens)}
    chosen = {"train": kept & ~val, "val": val}
    base = 0
    for number, (job, part) in enumerate(zip(jobs, encoded, strict=True)):
        progress("write shards", number, len(jobs))
        count = len(part.tokens)
        if count:
            tokens = np.memmap(job.bin, dtype, mode="r")
            ends = np.cumsum(part.tokens)
            for split, writer in writers.items():
                for first, last in runs(chosen[split][base : base + count]):
                    begin = ends[first] - part.tokens[first]
                    writer.add(tokens[begin : ends[last - 1]], part.tokens[first:last], part.text_bytes[first:last])
        base += count
    progress("write shards", len(jobs), len(jobs))
    shards = {split: writer.close() for split, writer in writers.items()}
    sync_folder(out)
    return {split: done for split, done in shards.items() if done}


def runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """[first, last) of every stretch of True: neighbours are copied together."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    for first, last in edges.reshape(-1, 2):
        yield int(first), int(last)


class ShardWriter:
    """Writes documents, begins a new shard rather than cut one, and hashes what it writes on the way."""

    def __init__(self, folder: Path, split: str, limit: int) -> None:
        self.folder, self.split, self.limit = folder, split, limit
        self.done: list[Shard] = []
        self.file: BinaryIO | None = None
        self.lengths: list[NDArray[np.int64]] = []
        self.tokens = self.text_bytes = self.bytes = 0
        self.hash = hashlib.sha256()

    @property
    def name(self) -> str:
        return f"{self.split}-{len(self.done):05d}"

    def add(self, tokens: NDArray[Any], lengths: NDArray[np.int64], text_bytes: NDArray[np.int64]) -> None:
        while len(lengths):
            fitting = int(np.searchsorted(np.cumsum(lengths), self.limit - self.tokens, side="right"))
            if not fitting and self.tokens:
                self.finish()
                continue
            count = max(1, fitting)  # a document longer than a shard has one to itself
            size = int(lengths[:count].sum())
            self.write(tokens[:size].tobytes())
            self.tokens += size
            self.text_bytes += int(text_bytes[:count].sum())
            self.lengths.append(lengths[:count])
            tokens, lengths, text_bytes = tokens[size:], lengths[count:], text_bytes[count:]

    def write(self, raw: bytes) -> None:
        if self.file is None:
            self.file = open(self.folder / f"{self.name}.bin", "wb")  # noqa: SIM115 - closed in finish
        self.file.write(raw)
        self.hash.update(raw)
        self.bytes += len(raw)

    def finish(self) -> None:
        if self.file is None:
            return
        close_synced(self.file)
        offsets = np.cumsum(np.concatenate([[0], *self.lengths])).astype(OFFSET_DTYPE).tobytes()
        with open(self.folder / f"{self.name}.idx", "wb") as file:
            file.write(offsets)
            close_synced(file)
        self.done.append(
            Shard(
                name=self.name,
                tokens=self.tokens,
                documents=len(offsets) // 8 - 1,
                text_bytes=self.text_bytes,
                bytes=self.bytes,
                sha256=self.hash.hexdigest(),
                offsets_sha256=hashlib.sha256(offsets).hexdigest(),
            )
        )
        self.file, self.lengths, self.hash = None, [], hashlib.sha256()
        self.tokens = self.text_bytes = self.bytes = 0

    def close(self) -> tuple[Shard, ...]:
        self.finish()
        return tuple(self.done)


def close_synced(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
