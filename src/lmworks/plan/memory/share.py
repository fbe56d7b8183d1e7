"""Weights of a block as tensor and expert parallelism leave them, and how many ranks share them: for the step time.

The memory of a rank has the same by weight (`rank_weights.py`). Numbers may be arrays of candidates.
"""

from __future__ import annotations

import numpy as np

from ...spec.components import block_weights
from ..case import Case, Number


def block_params(case: Case) -> tuple[Number, Number]:
    """Weights of one block as tensor and expert parallelism leave them: without its experts, and these."""
    dense: Number = 0.0
    experts: Number = 0.0
    for weight in block_weights(case.model):
        shared = np.where(weight.kv_heads % case.tp == 0, case.tp, 1) if weight.tp_dim is not None else 1
        if weight.experts:
            experts = experts + weight.size // case.ep // shared
        else:
            dense = dense + weight.size // shared
    return dense, experts


def shard_degrees(case: Case) -> tuple[Number, Number]:
    """Ranks that share a dense weight under ZeRO, and an expert's.

    Our trainer deals whole experts: of two over four ranks the first has one, not half of one.
    """
    whole = np.where(np.equal(case.dp_shard, 1), case.dp, case.dp_shard) * case.cp
    over = np.maximum(1, whole // case.ep)
    if case.model.experts and case.software.name.startswith("lmworks"):
        mine = case.model.experts // case.ep
        over = mine / np.ceil(mine / over)
    return case.dp_shard * case.cp, over
