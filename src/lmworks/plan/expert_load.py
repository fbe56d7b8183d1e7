"""How unevenly tokens fall on experts: what the fullest of them, and the fullest rank, gets. Modelled.

A router that is trained to balance spreads slots about as evenly as chance does. Every layer waits for its fullest
rank, and every expert's rows end in a tile that is filled by half, on average.
"""

from __future__ import annotations

import numpy as np

from .case import Number

TILE = 128  # rows of one tile of a grouped product
EULER = 0.5772


def fullest(slots: Number, bins: Number) -> Number:
    """Slots of the fullest of `bins` over their mean, when `slots` of each fall where chance has it.

    The largest of n normal numbers lies about √(2 ln n) − (ln ln n + ln 4π − 2γ) / √(8 ln n) above their mean.
    """
    log = np.log(np.maximum(bins, 2))
    above = np.sqrt(2 * log) - (np.log(log) + np.log(4 * np.pi) - 2 * EULER) / np.sqrt(8 * log)
    return 1 + np.where(bins > 1, above * np.sqrt((1 - 1 / np.maximum(bins, 2)) / np.maximum(slots, 1)), 0.0)


def padded(rows: Number) -> Number:
    """Rows that a product of one expert pays for: to the end of its last tile."""
    return rows + TILE / 2
