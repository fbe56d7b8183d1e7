"""A pseudo-random permutation of range(n) that is computed, not stored.

A keyed Feistel network is a bijection of [0, 4^b). Walking a result that falls outside range(n) through
it again until it falls inside makes it a bijection of range(n) (cycle-walking, Black & Rogaway 2002);
b is chosen so that at most 3 in 4 fall outside. So the shuffled order of a trillion windows costs no
memory, and position i of epoch e can be asked for directly: that is what makes a cursor enough to resume.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: multiples of it spread evenly


def mix(x: U64) -> U64:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(seed: int, stream: int, epochs: NDArray[np.int64]) -> U64:
    """One key for each element: a stream (a source of a mixture) has another order in every epoch."""
    key = mix(np.full(epochs.shape, seed, np.uint64) + GOLDEN)
    key = mix(key ^ mix(np.full(epochs.shape, stream, np.uint64) * GOLDEN + np.uint64(1)))
    return mix(key ^ (epochs.astype(np.uint64) * GOLDEN + np.uint64(2)))


def permute(positions: NDArray[np.int64], n: int, keys: U64) -> NDArray[np.int64]:
    """Where `positions` (each in range(n)) go under the permutations of their keys."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    result = feistel(positions.astype(np.uint64), half, keys)
    outside = np.flatnonzero(result >= n)
    while outside.size:
        result[outside] = feistel(result[outside], half, keys[outside])
        outside = outside[result[outside] >= n]
    return result.astype(np.int64)


def feistel(x: U64, half: np.uint64, keys: U64) -> U64:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for number in range(1, ROUNDS + 1):
        left, right = right, left ^ (mix(right + keys * np.uint64(2 * number + 1)) & mask)
    return (left << half) | right
