"""How flash attention is cut up for a GPU: every number of its kernels that is tuned, in one place.

A program holds ROWS queries and walks over the keys KEYS at a time (the pass for dK and dV: the other way round).
Groups of 4 warps feed Hopper's tensor cores 64 rows at a time; a fourth number says how many tiles of the walk are
under way at once. What bounds each choice:

    registers   a thread has 255: accumulators take rows · width / threads of them, scores rows · keys / threads
    shared      227 KiB of a multiprocessor: what its programs hold, and `stages` of each tile that they walk over
    L2          every program reads all that it walks over: the fewer rows it holds, the more is read

`benchmarks/flash_tune.py` tries others. Those for heads of 64 and 128 were the fastest on an H200, at 8192 positions
(benchmarks/results/flash_tune.json, Triton 3.6). Heads of 32 take those of 64, and 256 was chosen by compiling for
Hopper: neither was timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tiles:
    """Of one pass."""

    rows: int  # queries in a tile
    keys: int  # keys in a tile
    warps: int
    stages: int  # tiles of the walk under way at once
    registers: int | None = None  # at most so many a thread, so that two programs fit on a multiprocessor

    def options(self) -> dict[str, Any]:
        """Of a launch."""
        common = {"ROWS": self.rows, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}
        return common if self.registers is None else common | {"maxnreg": self.registers}


PASSES = ("forward", "queries", "keys")  # the two of the backward pass: dQ; dK and dV

# By pass and by width of a head (its dimension, filled up to a power of two), for 16-bit numbers.
HALF: dict[str, dict[int, Tiles]] = {
    "forward": {
        32: Tiles(128, 64, 4, 3),
        64: Tiles(128, 64, 4, 3),
        128: Tiles(128, 128, 8, 3),
        256: Tiles(128, 64, 8, 2),
    },
    "queries": {
        32: Tiles(128, 64, 8, 3),
        64: Tiles(128, 64, 8, 3),
        128: Tiles(128, 64, 8, 3),
        256: Tiles(64, 32, 8, 2),
    },
    "keys": {
        32: Tiles(64, 64, 4, 3),
        64: Tiles(64, 64, 4, 3),
        128: Tiles(64, 64, 4, 2),
        256: Tiles(32, 64, 8, 2),
    },
}
# fp32 has no tensor cores here (its products are exact): it is for checking, and small tiles keep it in registers.
FULL = Tiles(32, 32, 4, 1)


def choose_tiles(name: str, width: int, dtype: torch.dtype) -> Tiles:
    """Of the named pass; narrow heads go with those of 32."""
    return FULL if dtype == torch.float32 else HALF[name][max(width, min(HALF[name]))]
