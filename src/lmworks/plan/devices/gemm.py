"""Seconds of a matrix product by its shape: tiles over processors, bytes over bandwidth, and what a launch costs.

A GPU cuts the result into tiles and gives each streaming multiprocessor (SM) one at a time. The last round leaves some
idle, a small product cannot fill them, and a short inner dimension hardly pays for starting a tile. Beside that, the
operands must come from memory, and a long product at full power makes the clock drop. Seven constants say how much of
each; `validation/fit_gemm.py` fits them to measured products and writes `gemm.toml`.

Every number may be a numpy array, one element a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..case import Number

# A large tile and a small one, whole or with the inner dimension cut in four: a library picks the fastest of many, and
# more of them made no measured product cheaper to predict.
TILES = ((256, 128), (64, 64))
SPLITS = (1, 4)
PARTIAL_BYTES = 8  # of one number of a partial sum: fp32, written and read again
HEAT_S = 3e-3  # a product this long shows half of the drop of the clock
ALIGNED = 8  # numbers in the 16 bytes that one load takes
UNALIGNED = 0.25  # rate ∝ (aligned numbers / 8)^this: 0.59 for an odd width, as 50257 for 50304 costs


@dataclass(frozen=True)
class GemmRate:
    """What a GPU does with products of one number format."""

    flops: float  # FLOP/s that the best long product comes near
    bandwidth: float  # bytes/s of memory, from the datasheet
    sms: int
    wave: float  # 1: a round of tiles costs the same whether full or not; 0: an idle SM costs nothing
    ramp: float  # starting and ending a tile, in units of the inner dimension
    tile: float  # how much a small tile loses to a large one
    memory: float  # share of the bandwidth that operands get
    launch_s: float  # of an empty product
    heat: float  # slow-down of a very long product
    sustained: float = 1.0  # of these rates hour after hour, where that was seen
    width: float = 2.0  # bytes of one number of the operands
    result_width: float = 2.0

    @property
    def ceiling(self) -> float:
        """FLOP/s that no product exceeds."""
        return self.flops * self.sustained


def gemm_seconds(m: Number, k: Number, n: Number, rate: GemmRate, batch: Number = 1) -> Number:
    """(m × k)·(k × n), `batch` of them in one launch."""
    operands = rate.width * (m * k + k * n) + rate.result_width * m * n
    flops = rate.flops * alignment(k, n)
    best: Number = np.inf
    for rows, columns in TILES:
        loss = (1 + rate.tile * (1 / rows + 1 / columns)) / (1 + rate.tile * (1 / TILES[0][0] + 1 / TILES[0][1]))
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
        for split in SPLITS:
            rounds = tiles * split / rate.sms
            rounds = rate.wave * np.ceil(rounds) + (1 - rate.wave) * np.maximum(rounds, 1)
            work = 2.0 * rows * columns * (k / split + rate.ramp) * rate.sms
            compute = rounds * work * loss / flops
            partial = PARTIAL_BYTES * split * m * n if split > 1 else 0
            memory = batch * (operands + partial) / (rate.bandwidth * rate.memory)
            best = np.minimum(best, compute * compute * compute + memory * memory * memory)
    best = np.cbrt(best)  # the longer of the two, and a little of the other
    each = best / batch
    return (best * (1 + rate.heat * each / (each + HEAT_S)) + rate.launch_s) / rate.sustained


def alignment(k: Number, n: Number) -> Number:
    """Rows that do not start at a multiple of 16 bytes are loaded in smaller pieces. Modelled, not fitted.

    m is left out: it is mostly a number of tokens, and tokens lie one after another whatever their number.
    """
    shortest = np.minimum(np.gcd(round_up(k), ALIGNED), np.gcd(round_up(n), ALIGNED))
    return (shortest / ALIGNED) ** UNALIGNED


def round_up(size: Number) -> NDArray[np.int64]:
    return np.asarray(size).astype(np.int64)
