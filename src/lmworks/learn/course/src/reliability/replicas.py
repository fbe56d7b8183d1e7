"""Silent corruption: ranks that should hold the same weights, and one that does not."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


def digest(weights: Tensor) -> int:
    """A number that another one stands for if a single bit of the fp32 weights differs, or two of them change places.

    Each 32-bit word times an odd factor of its own, added up modulo 2^64.
    """
    # exercise corrupted_rank.digest(weights)
    words = weights.contiguous().view(torch.int32).flatten().to(torch.int64)
    factors = 2 * torch.arange(len(words)) + 1
    return int((words * factors).sum()) % 2**64
    # end corrupted_rank.digest


def outliers(digests: dict[int, int]) -> list[int]:
    """The ranks whose digest is not that of the majority (more than half); all of them where there is none."""
    # exercise corrupted_rank.outliers(digests)
    [(common, count)] = Counter(digests.values()).most_common(1)
    if 2 * count <= len(digests):
        return list(digests)
    return [rank for rank, found in digests.items() if found != common]
    # end corrupted_rank.outliers
