"""MinHash signatures and locality-sensitive hashing (Broder 1997; Leskovec, Rajaraman, Ullman, chapter 3).

A signature has bands × rows numbers. Documents whose shingles have the Jaccard similarity s agree in a number with
chance s, and in all rows of at least one band with chance 1 − (1 − sʳ)ᵇ. Only a key of each band is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .shingles import MULTIPLIER, STEP, mixed, pieces, shingles

BATCH = 2**17  # characters hashed at once: the arrays of a pass over them fit the second-level cache
NONE = np.uint32(2**32 - 1)  # no shingle


@dataclass(frozen=True)
class MinHash:
    bands: int
    rows: int
    n: int = 5
    fold: bool = True  # letters to lower case, digits to zero
    seed: int = 1

    def chance(self, similarity: float) -> float:
        """That two documents of this similarity become candidates."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)


PROSE = MinHash(14, 8)
"""FineWeb's: a pair of similarity 0.72 is found with chance 0.64, one of 0.8 with 0.92."""

CODE = MinHash(25, 10, fold=False)
"""BigCode's: the best of 256 hashes for a threshold of 0.7, by the integrals of datasketch."""


@functools.lru_cache(maxsize=8)
def parameters(config: MinHash) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint64]]:
    """Factors and shifts of the hash functions x → a·x + b modulo 2³² (a odd), and factors of a band's key."""
    draws = mixed(
        np.arange(1, 1 + 2 * config.bands * config.rows, dtype=np.uint64) * MULTIPLIER + np.uint64(config.seed)
    )
    factors, shifts = (draws >> np.uint64(32)).astype(np.uint32).reshape(2, -1)
    weights = mixed(np.arange(1, 1 + config.rows, dtype=np.uint64) * STEP) | np.uint64(1)
    return factors | np.uint32(1), shifts, weights


def signatures(texts: Sequence[str], config: MinHash) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """((documents, bands × rows), which documents have any shingle)."""
    if not texts:
        return np.empty((0, config.bands * config.rows), np.uint32), np.empty(0, bool)
    cut = [pieces(text) for text in texts]
    parts = [least_hashes(batch, config) for batch in batches(piece for one in cut for piece in one)]
    least, counts = np.hstack([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    first = np.cumsum([0, *map(len, cut)])[:-1]
    return np.minimum.reduceat(least, first, axis=1).T, np.add.reduceat(counts, first) > 0


def least_hashes(texts: Sequence[str], config: MinHash) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """((bands × rows, texts): the least value of each function; shingles of each text)."""
    found = shingles(texts, config.n, config.fold)
    counts = np.diff(found.starts)
    filled = np.flatnonzero(counts)
    factors, shifts, _ = parameters(config)
    result = np.full((len(factors), len(counts)), NONE, np.uint32)
    begins = found.starts[filled]
    hashed = np.empty_like(found.values)
    if len(filled):
        for row, factor, shift in zip(result, factors, shifts, strict=True):
            np.multiply(found.values, factor, out=hashed)
            np.add(hashed, shift, out=hashed)
            row[filled] = np.minimum.reduceat(hashed, begins)
    return result, counts


def band_keys(signature: NDArray[np.uint32], config: MinHash) -> NDArray[np.uint64]:
    """(documents, bands): 64 bits of each band, with the number of the band in it."""
    weights = parameters(config)[2]
    bands = signature.reshape(-1, config.bands, config.rows).astype(np.uint64)
    return mixed(mixed(bands * weights).sum(axis=2, dtype=np.uint64) + np.arange(config.bands, dtype=np.uint64))


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= BATCH:
            yield held
            held, size = [], 0
    if held:
        yield held
