"""Exact Jaccard similarity of candidate pairs: the shingles of each document stay on disk until the pairs are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from .key_files import REPEAT, Groups, part_and_position, write_pairs
from .minhash import MinHash, batches
from .shingles import pieces, shingles

SETS, ENDS = "shingles.bin", "shingle-ends.npy"
VALUE = np.dtype("<u4")


def shingle_sets(texts: Sequence[str], config: MinHash) -> list[NDArray[np.uint32]]:
    """The different shingles of each text, sorted."""
    cut = [pieces(text) for text in texts]
    parts = [
        np.split(found.values, found.starts[1:-1])
        for batch in batches(piece for one in cut for piece in one)
        for found in [shingles(batch, config.n, config.fold)]
    ]
    values = iter([one for part in parts for one in part])
    return [np.unique(np.concatenate([next(values) for _ in one])) for one in cut]


class SetWriter:
    """The sets of a part, one after the other."""

    def __init__(self, into: Path) -> None:
        self.into = into
        self.file: IO[bytes] = open(into / SETS, "wb")  # noqa: SIM115
        self.ends: list[int] = []

    def add(self, texts: Sequence[str], config: MinHash) -> None:
        for values in shingle_sets(texts, config):
            self.file.write(values.astype(VALUE).tobytes())
            self.ends.append((self.ends[-1] if self.ends else 0) + len(values))

    def close(self) -> None:
        self.file.close()
        np.save(self.into / ENDS, np.array([0, *self.ends], np.int64))


def write_similar(sources: Sequence[Path], summaries: Sequence[Path], least: float, into: Path) -> Path:
    """Of the pairs in `sources`, those whose sets have this Jaccard similarity at least: as one file."""
    path = into / "similar.tmp"
    groups = Groups(sources, len(summaries), into)
    write_pairs(path, (similar(groups.take(number), summaries, least) for number in range(groups.count)))
    return path


def similar(pairs: NDArray, summaries: Sequence[Path], least: float) -> NDArray:
    pairs = np.sort(pairs, order=["first", "repeat"])  # a document with many candidates is read once
    kept = np.fromiter((jaccard >= least for jaccard in similarities(pairs, summaries)), bool, len(pairs))
    return np.sort(pairs[kept], order=list(REPEAT.names or ()))


def similarities(pairs: NDArray, summaries: Sequence[Path]) -> Iterator[float]:
    firsts, repeats = part_and_position(pairs["first"]), part_and_position(pairs["repeat"])
    read, first = (-1, -1), np.empty(0, VALUE)
    for at in range(len(pairs)):
        place = int(firsts[0][at]), int(firsts[1][at])
        if place != read:
            read, first = place, read_set(summaries[place[0]], place[1])
        repeat = read_set(summaries[int(repeats[0][at])], int(repeats[1][at]))
        both = len(np.intersect1d(first, repeat, assume_unique=True))
        yield both / (len(first) + len(repeat) - both)


def read_set(summary: Path, position: int) -> NDArray[np.uint32]:
    ends = np.load(summary / ENDS, mmap_mode="r")
    begin, end = int(ends[position]), int(ends[position + 1])
    return np.fromfile(summary / SETS, VALUE, end - begin, offset=begin * VALUE.itemsize)
