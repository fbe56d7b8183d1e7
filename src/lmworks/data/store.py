"""Prepared tokens, memory-mapped: one long sequence of ids over all shards, and where its documents start."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import DataError
from .index import OFFSET_DTYPE, TOKENIZER_FILE, Index, Shard, read_index

PREPARE_AGAIN = "prepare the folder again (the same `lmworks data prepare` repairs it) or copy it anew"


class TokenData:
    """One split of a prepared folder."""

    def __init__(self, folder: Path, split: str, index: Index) -> None:
        self.folder = folder
        self.split = split
        self.index = index
        self.shards = index.splits[split]
        self._tokens = [np.memmap(folder / s.bin, index.token_dtype, mode="r") for s in self.shards]
        self._offsets = [np.memmap(folder / s.idx, OFFSET_DTYPE, mode="r") for s in self.shards]
        self._starts = np.cumsum([0] + [shard.tokens for shard in self.shards])

    @classmethod
    def open(cls, path: str | Path, split: str = "train", verify: bool = True) -> TokenData:
        """Sizes are always compared with the index, contents (SHA-256) when `verify`."""
        folder = Path(path)
        index = read_index(folder)
        shards = index.splits.get(split, ())
        if not shards:
            raise DataError(
                f"{folder} has no split '{split}', only {', '.join(index.splits)}; prepare it with --val-fraction"
            )
        for shard in shards:
            check_sizes(folder, shard, index)
        data = cls(folder, split, index)
        if verify:
            data.verify()
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory map pickles as a copy of its contents; a worker process opens the files itself instead.
        return TokenData, (self.folder, self.split, self.index)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Compare with the checksums; with several ranks each takes its part of the shards."""
        sums = [(s.bin, s.sha256) for s in self.shards] + [(s.idx, s.offsets_sha256) for s in self.shards]
        mine = sums[rank::world]
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            found = pool.map(sha256_of, [self.folder / name for name, _ in mine])
            for (name, expected), actual in zip(mine, found, strict=True):
                if actual != expected:
                    raise DataError(f"{self.folder / name} is damaged: its SHA-256 is not the index's; {PREPARE_AGAIN}")

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), over shard boundaries; a view of the file if they are in one shard."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            base, end = int(self._starts[first]), min(stop, int(self._starts[first + 1]))
            self.check_not_truncated(self._tokens[first], self.shards[first].bin)
            pieces.append(self._tokens[first][start - base : end - base])
            start, first = end, first + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [self._tokens[0][:0]])

    def check_not_truncated(self, mapped: np.memmap[Any, Any], name: str) -> None:
        """A file that is cut short while it is mapped: to read beyond its end would end this process (SIGBUS)."""
        found = mapped._mmap.size()  # type: ignore[attr-defined]  # of the file that is mapped, whatever has its name now
        if found < mapped.nbytes:
            raise DataError(
                f"{self.folder / name} was truncated while it is in use: {found:,} bytes of {mapped.nbytes:,}; "
                f"{PREPARE_AGAIN}"
            )

    def place(self, position: int) -> str:
        """The file of a token, and where in it."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return f"{self.folder / self.shards[number].bin} at token {position - int(self._starts[number]):,}"

    def verify_tokenizer(self) -> None:
        """That ids still mean what they meant when the text was encoded."""
        path = self.folder / TOKENIZER_FILE
        if self.index.tokenizer != "bytes" and sha256_of(path) != self.index.tokenizer_sha256:
            raise DataError(f"{path} is not the tokenizer that the tokens were made with; {PREPARE_AGAIN}")

    def document_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Positions in [start, stop) at which a document begins."""
        found = []
        for number in range(int(np.searchsorted(self._starts, start, side="right")) - 1, len(self.shards)):
            base = int(self._starts[number])
            if base >= stop:
                break
            self.check_not_truncated(self._offsets[number], self.shards[number].idx)
            offsets = self._offsets[number][:-1]  # the last entry is the length
            low, high = np.searchsorted(offsets, [start - base, stop - base])
            found.append(np.asarray(offsets[low:high]) + base)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def document_at(self, position: int) -> int:
        """The document of a position, counted from 0 over all shards."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        before = sum(shard.documents for shard in self.shards[:number])
        offsets = self._offsets[number]
        return before + int(np.searchsorted(offsets, position - int(self._starts[number]), side="right")) - 1

    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, its end-of-text included."""
        return np.concatenate([np.diff(offsets) for offsets in self._offsets])

    def chunks(self, size: int = 1 << 22) -> Iterator[NDArray[Any]]:
        """Everything in order, a bounded piece at a time."""
        for start in range(0, len(self), size):
            yield self.read(start, min(start + size, len(self)))


def check_sizes(folder: Path, shard: Shard, index: Index) -> None:
    sizes = {shard.bin: shard.tokens * index.token_dtype.itemsize, shard.idx: (shard.documents + 1) * 8}
    for name, expected in sizes.items():
        path = folder / name
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise DataError(f"{path} is missing; {PREPARE_AGAIN}") from None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        if found != expected:
            word = "truncated" if found < expected else "too long"
            raise DataError(f"{path} is {word}: {found:,} bytes, the index says {expected:,}; {PREPARE_AGAIN}")


def sha256_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
