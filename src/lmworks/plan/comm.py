"""Traffic of a step, in seconds: what layers exchange while a micro-batch passes, and what data parallelism moves.

Groups lie as `spec/grid.py` lays them: tp at stride 1, then cp, dp_shard, dp_replicate, and the pipeline outermost.
Each exchange has its seconds on the links and the work it may hide behind; `hide` says how much of it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..spec import Cluster
from .case import Case, Number
from .constants import Constants
from .links import Fabric


@dataclass(frozen=True)
class Traffic:
    """Seconds that lengthen the step, and seconds that pass unseen."""

    exposed: Number = 0.0
    hidden: Number = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.exposed + other.exposed, self.hidden + other.hidden)

    def times(self, count: Number) -> Traffic:
        return Traffic(self.exposed * count, self.hidden * count)


def hide(comm: Number, behind: Number, contention: float) -> Traffic:
    """What exceeds the work it runs beside is exposed; what does not still slows that work down a little."""
    hidden = np.minimum(comm, behind)
    return Traffic(comm - hidden + contention * hidden, hidden)


@dataclass(frozen=True, eq=False)
class Links:
    """A case's cluster, with what runs have shown to be slower than benchmarks of single collectives."""

    case: Case
    fabric: Fabric
    given: Constants

    @classmethod
    def of(cls, case: Case, given: Constants) -> Self:
        nodes = int(np.max(np.ceil(case.world / case.gpus_per_node)))
        cluster = Cluster(nodes=nodes, gpus_per_node=case.gpus_per_node, nic_gbs=case.nic_gbs)
        return cls(case, Fabric.of(cluster, case.gpu), given)

    def seconds(self, kind: str, nbytes: Number, ranks: Number, stride: Number) -> Any:
        if np.all(ranks == 1):
            return 0.0
        near = self.fabric.inside(ranks, stride)
        return self.fabric.seconds(kind, nbytes, ranks, stride) * np.where(near, self.given.links, self.given.network)

    # --- groups -------------------------------------------------------------------------------------------

    def tensor(self, kind: str, nbytes: Number) -> Any:
        return self.seconds(kind, nbytes, self.case.tp, 1)

    def shard(self, kind: str, nbytes: Number) -> Any:
        """Ranks that hold other parts of one model's weights: dp_shard × cp."""
        return self.seconds(kind, nbytes, self.case.dp_shard * self.case.cp, self.case.tp)

    def replicate(self, kind: str, nbytes: Number) -> Any:
        case = self.case
        return self.seconds(kind, nbytes, case.dp_replicate, case.tp * case.cp * case.dp_shard)

    def all_data(self, kind: str, nbytes: Number) -> Any:
        return self.seconds(kind, nbytes, self.case.dp * self.case.cp, self.case.tp)

    def expert(self, kind: str, nbytes: Number) -> Any:
        return self.seconds(kind, nbytes, self.case.ep, self.case.tp)

    def expert_copies(self, kind: str, nbytes: Number, ranks: Number) -> Any:
        """Ranks that share the weights of the same experts: every ep-th of `ranks`."""
        case = self.case
        return self.seconds(kind, nbytes, np.maximum(1, ranks // case.ep), case.tp * case.ep)

    def next_stage(self, nbytes: Number) -> Any:
        case = self.case
        stride = case.tp * case.cp * case.dp
        return np.where(case.pp > 1, self.seconds("send", nbytes, 2, stride), 0.0)


# --- inside a layer ---------------------------------------------------------------------------------------


def tensor_parallel(case: Case, links: Links) -> tuple[Number, Number]:
    """Seconds of one block, forward and backward: two sums each way, whole or as a scatter and a gather.

    Megatron keeps only its own positions of each region's input and gathers them again in the backward pass.
    """
    if np.all(case.tp == 1):
        return 0.0, 0.0
    size = case.tokens * case.model.hidden * activation_bytes(case)
    once = exchange(case, links, size)
    again = 2 * links.tensor("all-gather", size) if case.sp and case.software.name.startswith("megatron") else 0.0
    return 2 * once, 2 * once + again


def exchange(case: Case, links: Links, size: Number) -> Number:
    if case.sp:
        return links.tensor("all-gather", size) + links.tensor("reduce-scatter", size)
    return links.tensor("all-reduce", size)


def vocabulary_parallel(case: Case, links: Links) -> Number:
    """Embedding and loss over a split vocabulary: one exchange each, and three sums of a number for each token."""
    if np.all(case.tp == 1):
        return 0.0
    size = case.tokens * case.model.hidden * activation_bytes(case)
    return 2 * exchange(case, links, size) + 3 * links.tensor("all-reduce", 4 * case.tokens)


def context_parallel(case: Case, links: Links, forward: Number, backward: Number) -> tuple[Traffic, Traffic]:
    """Keys and values go round a ring, in the backward pass with their gradients, behind each piece of attention."""
    if np.all(case.cp == 1):
        return Traffic(), Traffic()
    kv = np.maximum(case.model.kv_dim / case.tp, case.model.head_dim)
    message = 2 * case.tokens * kv * activation_bytes(case)
    hops, c = case.cp - 1, links.given.contention
    there = np.where(case.cp > 1, links.seconds("send", message, 2, case.tp), 0.0)
    back = np.where(case.cp > 1, links.seconds("send", 2 * message, 2, case.tp), 0.0)
    return hide(there, forward / case.cp, c).times(hops), hide(back, backward / case.cp, c).times(hops)


def expert_parallel(case: Case, links: Links) -> Number:
    """Seconds of one block in one direction: rows go to their experts and come back."""
    if not case.model.experts or np.all(case.ep == 1):
        return 0.0
    moved = case.tokens * case.model.top_k * case.model.hidden * activation_bytes(case)
    return 2 * links.expert("all-to-all", moved)


def pipeline_send(case: Case, links: Links) -> Number:
    """Seconds from one stage to the next, one way; with sequence parallelism each rank sends its own positions."""
    if np.all(case.pp == 1):
        return 0.0
    size = case.tokens * case.model.hidden * activation_bytes(case)
    return links.next_stage(size / case.tp if case.sp else size)


def activation_bytes(case: Case) -> int:
    return 4 if case.dtype == "fp32" else 2


# --- data parallelism -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Numbers that a tensor-parallel rank has of one block, and of embedding and head together."""

    dense: Number
    experts: Number
    root: Number

    @classmethod
    def of(cls, case: Case) -> Self:
        model = case.model
        inside = model.experts * model.mlp_matrix(model.expert_ffn) if model.experts else 0
        blocks = model.layers * model.block_params
        root = (model.params - blocks) / case.tp
        return cls((model.block_params - inside) / case.tp, inside / (case.tp * case.ep), root)

    @property
    def block(self) -> Number:
        return self.dense + self.experts


def gather_block(case: Case, links: Links, weights: Weights) -> Number:
    """ZeRO-3: the weights of one block, whole."""
    width = case.software.gather or case.width
    dense = links.shard("all-gather", width * weights.dense)
    return dense + links.expert_copies("all-gather", width * weights.experts, case.dp_shard * case.cp)


def reduce_block(case: Case, links: Links, weights: Weights) -> Number:
    """ZeRO-3: the gradients of one block to their owners, and there with those of other copies."""
    width, ranks = case.software.reduce, case.dp_shard * case.cp
    dense = links.shard("reduce-scatter", width * weights.dense)
    experts = links.expert_copies("reduce-scatter", width * weights.experts, ranks)
    return dense + experts + links.replicate("all-reduce", width * weights.block / ranks)


def gather_root(case: Case, links: Links, weights: Weights) -> Number:
    return links.shard("all-gather", (case.software.gather or case.width) * weights.root)


def reduce_root(case: Case, links: Links, weights: Weights) -> Number:
    width, ranks = case.software.reduce, case.dp_shard * case.cp
    own = links.replicate("all-reduce", width * weights.root / ranks)
    return links.shard("reduce-scatter", width * weights.root) + own


def sum_gradients(case: Case, links: Links, dense: Number, experts: Number) -> Number:
    """ZeRO 0 to 2: all gradients of a rank, once a step; sharded states need only their own part."""
    kind = "reduce-scatter" if case.zero else "all-reduce"
    width, ranks = case.software.reduce, case.dp * case.cp
    return links.all_data(kind, width * dense) + links.expert_copies(kind, width * experts, ranks)


def spread_weights(case: Case, links: Links, dense: Number, experts: Number) -> Number:
    """ZeRO 1 and 2: new weights from their owners to all."""
    if not case.zero:
        return 0.0
    width, ranks = case.software.weights, case.dp * case.cp
    return links.all_data("all-gather", width * dense) + links.expert_copies("all-gather", width * experts, ranks)
