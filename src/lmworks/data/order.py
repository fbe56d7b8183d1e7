"""The order of training samples, computed from their number alone: a shuffle and a weighted mixture, neither stored.

So the order of a trillion windows costs no memory, any position can be asked for directly, and a cursor is enough to
resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import SpecError

# A keyed Feistel network is a bijection of [0, 4^b). Applying it again to a result outside range(n), until it falls
# inside, makes it a bijection of range(n) (cycle-walking, Black & Rogaway 2002); b is chosen so that at most 3 in 4
# fall outside.

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


# --- mixture ---------------------------------------------------------------------------------------------

# Weights become whole counts in a pattern of fixed length that repeats, so any prefix that is a multiple of it holds
# the exact proportions.

MAX_PATTERN = 65_536


@dataclass(frozen=True)
class Mixture:
    """Which source the n-th sample comes from."""

    counts: NDArray[np.int64]  # (sources,) samples of each source in one pattern
    source: NDArray[np.int64]  # (length,) which source
    ordinal: NDArray[np.int64]  # (length,) which of that source's samples in this pattern

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Mixture:
        counts = whole_counts(weights)
        source = np.repeat(np.arange(len(counts)), counts)
        ordinal = np.concatenate([np.arange(count) for count in counts])
        # The j-th of c samples is due at (j + 1/2) / c of the way: sorting by that spreads every source evenly.
        order = np.argsort((ordinal + 0.5) / counts[source], kind="stable")
        return cls(counts, source[order], ordinal[order])

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, how many samples of that source came before) for each sample number."""
        rounds, position = np.divmod(samples, len(self.source))
        source = self.source[position]
        return source, rounds * self.counts[source] + self.ordinal[position]


def whole_counts(weights: Mapping[str, float]) -> NDArray[np.int64]:
    """Exact where the weights as written (0.7, 0.3) have a short common denominator; else to 1 in 65,536."""
    exact = [Fraction(repr(weight)) for weight in weights.values()]
    shares = [weight / sum(exact) for weight in exact]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= MAX_PATTERN:
        return np.array([int(share * length) for share in shares])
    for name, share in zip(weights, shares, strict=True):
        if share * MAX_PATTERN < 1:
            raise SpecError(
                f"data.mix: {name!r} has {float(share):.1e} of the weight; at least {1 / MAX_PATTERN:.1e} works"
            )
    counts = [int(share * MAX_PATTERN) for share in shares]
    # Largest remainders get what rounding down left over.
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * MAX_PATTERN)
    for i in by_remainder[: MAX_PATTERN - sum(counts)]:
        counts[i] += 1
    return np.array(counts)
