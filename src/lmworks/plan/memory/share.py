"""What one rank of a pipeline holds of a network, in closed form: layers, weights, micro-batches under way.

Weights are counted as tensor and expert parallelism leave them, before data parallelism cuts them; `residency.py` has
the same to the byte for one run. Numbers may be arrays of candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...spec.components import block_weights
from ...spec.layout import V_SHAPED
from ..case import Case, Number
from ..pipelines.bubble import in_flight
from ..pipelines.stages import head_cost, layer_cost


@dataclass(frozen=True)
class RankShare:
    layers: Number  # of all stages of this rank
    first: Any  # whether it holds the embedding
    last: Any  # whether it holds the final norm and the head
    dense: Number  # weights of one block, experts aside
    experts: Number  # weights of one block's experts on this rank
    stem: Number  # weights before the blocks, if it holds them
    head: Number  # weights after the blocks; a tied head is the embedding, and held with it
    in_flight: Number  # micro-batches whose activations are there at once, in terms of all layers of this rank

    @property
    def block(self) -> Number:
        return self.dense + self.experts

    @property
    def root(self) -> Number:
        return self.stem + self.head


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


def rank_share(case: Case, rank: Number) -> RankShare:
    """Of pipeline rank `rank`, from 0."""
    m, tp = case.model, case.tp
    first = np.equal(rank, 0)
    last = first if case.schedule in V_SHAPED else np.equal(rank, case.pp - 1)
    last = np.where(np.equal(case.pp, 1), True, last)
    dense, experts = block_params(case)
    table = m.vocab * m.hidden // tp
    positions = m.context * m.hidden if m.positions == "learned" else 0
    tied = m.tie_embeddings & first
    return RankShare(
        layers=layers_of(case, first, last),
        first=first,
        last=last,
        dense=dense,
        experts=experts,
        stem=first * (table + positions),
        head=last * (m.norm_params + np.where(tied, 0, table)),
        in_flight=micro_batches_in_flight(case, rank),
    )


def layers_of(case: Case, first: Any, last: Any) -> Number:
    """Our own pipelines give the head's stage fewer layers, as it computes the logits (`stages.py`), and of the rest
    the embedding's none too many; others are taken as even, and the busiest rank is meant."""
    m, v, stages = case.model, case.virtual, case.pp * case.virtual
    if not case.software.name.startswith("lmworks"):
        return np.minimum(m.layers, np.ceil(m.layers / stages) * v)
    head = head_cost(m) / layer_cost(m, case.seq)
    end = np.clip(np.round((m.layers + head) / stages - head), 1, np.maximum(1, m.layers - stages + 1))
    mean = (m.layers - end) / np.maximum(1, stages - 1)
    between = v - np.where(first, 1, 0) - np.where(last, 1, 0)
    found = np.where(first, np.floor(mean), 0) + np.where(last, end, 0) + np.round(between * mean)
    return np.where(np.equal(case.pp, 1), m.layers, found)


def micro_batches_in_flight(case: Case, rank: Number) -> Number:
    """A micro-batch in one of v stages of a rank is 1/v of one."""
    whole = case.recompute != "none"
    count = in_flight(case.schedule, case.pp, case.virtual, case.accumulation, rank, whole) / case.virtual
    return np.where(np.equal(case.pp, 1), 1, count)
