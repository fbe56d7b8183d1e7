"""Which source the n-th sample of a weighted mixture comes from, as a function of n alone.

The weights become whole counts in a pattern of fixed length that repeats for ever, so any prefix that is
a multiple of it holds the exact proportions, and the answer for sample n needs no walk from the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import SpecError

MAX_PATTERN = 65_536


@dataclass(frozen=True)
class Mixture:
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
