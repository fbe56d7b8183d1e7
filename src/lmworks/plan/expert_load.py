"""Expert load imbalance: tokens of the most loaded expert, and of the most loaded rank. Modelled.

A router trained with a balance loss spreads slots about as evenly as chance does. Every layer waits for its most loaded
rank, and the last tile of an expert's rows is half full on average.
"""

from __future__ import annotations

import numpy as np

from .case import Number

TILE = 128  # rows of one tile of a grouped GEMM; modelled
EULER = 0.5772  # Euler–Mascheroni constant


def fullest(slots: Number, bins: Number) -> Number:
    """Largest load of `bins` over their mean, with `slots` of each placed at random.

    The expected maximum of n normal numbers lies about √(2 ln n) − (ln ln n + ln 4π − 2γ) / √(8 ln n) above their mean.
    """
    log = np.log(np.maximum(bins, 2))
    above = np.sqrt(2 * log) - (np.log(log) + np.log(4 * np.pi) - 2 * EULER) / np.sqrt(8 * log)
    return 1 + np.where(bins > 1, above * np.sqrt((1 - 1 / np.maximum(bins, 2)) / np.maximum(slots, 1)), 0.0)


def padded(rows: Number) -> Number:
    """Rows that the GEMM of one expert computes: to the end of its last tile."""
    return rows + TILE / 2
