"""How flash attention is cut up for a GPU: every number of its kernels that is tuned, in one place.

A program holds ROWS queries and walks over the keys KEYS at a time (the pass for dK and dV: the other way round). Two
warp groups of 4 warps with 64 rows each feed Hopper's tensor cores; a third number says how many tiles of the walk are
under way at once. What bounds each choice:

    registers   a thread of 2 · 128 has 255: accumulators take rows · width / 256 of them, scores rows · keys / 256
    shared      227 KiB of a multiprocessor: what the program holds, and `stages` of each tile that it walks over
    L2          every program reads all that it walks over: fewer than 128 rows, and it is L2 that sets the pace

`benchmarks/flash_tune.py` tries others. Those below were chosen by compiling for Hopper (no spills, shared memory
fits); none was timed yet.
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
    late: bool = False  # forward: values are mixed a tile later, so that the next exponentials need not wait for it
    registers: int | None = None  # at most so many a thread, so that two programs fit on a multiprocessor

    def options(self) -> dict[str, Any]:
        """Of a launch."""
        common = {"ROWS": self.rows, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}
        return common if self.registers is None else common | {"maxnreg": self.registers}


PASSES = ("forward", "queries", "keys")  # the two of the backward pass: dQ; dK and dV

# By pass and by width of a head (its dimension, filled up to a power of two), for 16-bit numbers.
HALF: dict[str, dict[int, Tiles]] = {
    "forward": {
        32: Tiles(128, 128, 8, 3, late=True),
        64: Tiles(128, 64, 8, 3, late=True),
        128: Tiles(128, 128, 8, 2, late=True),
        256: Tiles(128, 64, 8, 2),
    },
    "queries": {
        32: Tiles(128, 64, 8, 3),
        64: Tiles(128, 64, 8, 3),
        128: Tiles(128, 64, 8, 2),
        256: Tiles(64, 32, 8, 2),
    },
    "keys": {
        32: Tiles(64, 128, 8, 3),
        64: Tiles(64, 128, 8, 3),
        128: Tiles(64, 128, 8, 2),
        256: Tiles(32, 64, 8, 2),
    },
}
# fp32 has no tensor cores here (its products are exact): it is for checking, and small tiles keep it in registers.
FULL = Tiles(32, 32, 4, 1)


def choose_tiles(name: str, width: int, dtype: torch.dtype) -> Tiles:
    """Of the named pass; narrow heads go with those of 32."""
    return FULL if dtype == torch.float32 else HALF[name][max(width, min(HALF[name]))]
