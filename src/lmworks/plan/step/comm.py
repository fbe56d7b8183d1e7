"""Communication of a step, in seconds on idle links: collectives of the layers, and of data parallelism.

Ranks are ordered as in `spec/grid.py`: tp at stride 1, then cp, dp_shard, dp_replicate, and the pipeline outermost.
Numbers may be arrays of candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from ...spec.components import attention_core, block_weights
from ..case import Case, Number
from ..devices.links import Fabric
from ..devices.profile import profile_for
from ..ops import fullest


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


# --- collectives of the layers ---------------------------------------------------------------------------


SHARDED_TENSORS = 4  # of a block, large enough to be sharded one by one: two of attention, two of the MLP


@dataclass(frozen=True)
class CommSeconds:
    """Seconds on the links inside a node and on the network between nodes."""

    intra_node: Number = 0.0
    inter_node: Number = 0.0

    def __add__(self, other: CommSeconds) -> CommSeconds:
        return CommSeconds(self.intra_node + other.intra_node, self.inter_node + other.inter_node)

    def scaled(self, count: Number) -> CommSeconds:
        return CommSeconds(self.intra_node * count, self.inter_node * count)


@dataclass(frozen=True, eq=False)
class Links:
    """Collectives over the process groups of a case's layout."""

    case: Case
    fabric: Fabric

    @classmethod
    def of(cls, case: Case) -> Self:
        nodes = int(np.max(np.ceil(case.world / case.cluster.gpus_per_node)))
        cluster = case.cluster.replace(nodes=nodes)
        measured = profile_for(case.gpu, cluster.profile, cluster.catalogue).curve if cluster.profile else None
        return cls(case, Fabric.of(cluster, case.gpu, measured))

    def seconds(self, kind: str, nbytes: Number, ranks: Number, stride: Number) -> CommSeconds:
        if np.all(ranks == 1):
            return CommSeconds()
        seconds, near = self.fabric.seconds(kind, nbytes, ranks, stride), self.fabric.inside(ranks, stride)
        return CommSeconds(np.where(near, seconds, 0.0), np.where(near, 0.0, seconds))

    def tensor(self, kind: str, nbytes: Number) -> CommSeconds:
        return self.seconds(kind, nbytes, self.case.tp, 1)

    def shard(self, kind: str, nbytes: Number) -> CommSeconds:
        """Over the ranks that shard one copy of the weights: dp_shard × cp."""
        return self.seconds(kind, nbytes, self.case.dp_shard * self.case.cp, self.case.tp)

    def replicate(self, kind: str, nbytes: Number) -> CommSeconds:
        case = self.case
        return self.seconds(kind, nbytes, case.dp_replicate, case.tp * case.cp * case.dp_shard)

    def data_parallel(self, kind: str, nbytes: Number) -> CommSeconds:
        return self.seconds(kind, nbytes, self.case.dp * self.case.cp, self.case.tp)

    def expert(self, kind: str, nbytes: Number) -> CommSeconds:
        return self.seconds(kind, nbytes, self.case.ep, self.case.tp)

    def expert_copies(self, kind: str, nbytes: Number, ranks: Number) -> CommSeconds:
        """Over the ranks that hold the same experts: every ep-th of `ranks`."""
        case = self.case
        if not case.model.experts:
            return CommSeconds()
        return self.seconds(kind, nbytes, np.maximum(1, ranks // case.ep), case.tp * case.ep)

    def to_neighbour(self, nbytes: Number, ranks: Number, stride: Number) -> CommSeconds:
        """Send to the next rank of an axis; 0 where the axis has one rank."""
        if np.all(ranks == 1):
            return CommSeconds()
        return self.seconds("send", nbytes, 2, stride).scaled(np.where(ranks > 1, 1.0, 0.0))


@dataclass(frozen=True)
class StepComm:
    """Per micro-batch and block unless noted."""

    tp: tuple[CommSeconds, CommSeconds]  # forward, backward
    vocab: CommSeconds  # embedding or head with vocabulary parallelism, one direction
    cp: tuple[CommSeconds, CommSeconds]  # forward, backward: one hop of the ring
    ep: CommSeconds  # one direction
    send: CommSeconds  # to the next stage
    all_gather: CommSeconds  # ZeRO-3 and FSDP: weights of a block
    reduce_scatter: CommSeconds  # ZeRO-3: its gradients
    all_gather_root: CommSeconds  # ZeRO-3: embedding and head
    reduce_scatter_root: CommSeconds
    gradients: CommSeconds  # ZeRO 0 to 2: of a whole rank
    weight_all_gather: CommSeconds  # ZeRO 1 and 2

    @classmethod
    def of(cls, case: Case) -> Self:
        links, weights, width = Links.of(case), Weights.of(case), 4 if case.dtype == "fp32" else 2
        stream = case.tokens * case.model.hidden * width
        tensor = tp_collectives(case, links, stream)
        rows = CommSeconds()
        if case.model.experts:  # all ranks wait for the most loaded one
            most = fullest(case.tokens * case.model.top_k, case.ep)
            rows = links.expert("all-to-all", case.model.top_k * stream * most)
        own = stream / case.tp if case.sp else stream  # with sequence parallelism each rank sends its own positions
        return cls(
            tp=(tensor.scaled(2), tensor.scaled(2) + megatron_regather(case, links, stream)),
            vocab=tensor.scaled(0.5) + links.tensor("all-reduce", 4.0 * case.tokens).scaled(0.75),
            cp=cp_collectives(case, links, width),
            ep=rows.scaled(2),
            send=links.to_neighbour(own, case.pp, case.tp * case.cp * case.dp),
            **(zero_3(case, links, weights) if case.zero == 3 else zero_0_to_2(case, links, weights)),
        )


def cp_collectives(case: Case, links: Links, width: int) -> tuple[CommSeconds, CommSeconds]:
    """One hop of ring attention (keys, values; backward their gradients too), or all all-to-alls of Ulysses."""
    core = attention_core(case.model)
    q, out = (case.tokens * each / case.tp * width for each in (core.q_width, core.out_width))
    heads = np.maximum(core.kv_heads / case.tp, 1)
    kv = case.tokens * heads * (core.qk_dim + core.v_dim) * width
    ring = 2 * case.tokens * heads * core.qk_dim * width  # values travel as wide as keys
    if case.cp_method == "ulysses":
        there = links.seconds("all-to-all", q + kv, case.cp, case.tp) + links.seconds(
            "all-to-all", out, case.cp, case.tp
        )
        return there, there
    return links.to_neighbour(ring, case.cp, case.tp), links.to_neighbour(2 * ring, case.cp, case.tp)


def tp_collectives(case: Case, links: Links, size: Number) -> CommSeconds:
    """All-reduce, or reduce-scatter and all-gather with sequence parallelism."""
    if case.sp:
        return links.tensor("all-gather", size) + links.tensor("reduce-scatter", size)
    return links.tensor("all-reduce", size)


def megatron_regather(case: Case, links: Links, size: Number) -> CommSeconds:
    """Megatron saves sequence-parallel inputs sharded, and gathers them again in the backward pass."""
    if case.sp and case.software.name.startswith("megatron"):
        return links.tensor("all-gather", size).scaled(2)
    return CommSeconds()


# --- data parallelism -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Parameters of a tensor-parallel rank: of one block, and of embedding and head together."""

    dense: Number
    experts: Number
    root: Number

    @classmethod
    def of(cls, case: Case) -> Self:
        root = (case.model.params - case.model.layers * case.model.block_params) / case.tp
        return cls(*block_params(case), root)

    @property
    def block(self) -> Number:
        return self.dense + self.experts


def zero_3(case: Case, links: Links, weights: Weights) -> dict[str, CommSeconds]:
    """ZeRO-3, which FSDP1 and FSDP2 are: all-gather weights before use, reduce-scatter gradients.

    HSDP: all-reduce these over replicas.
    """
    gather, reduce, ranks = case.software.gather or case.width, case.software.reduce, case.dp_shard * case.cp
    copies = links.replicate("all-reduce", reduce * weights.block / ranks)
    pieces = SHARDED_TENSORS if case.software.per_tensor_gather else 1
    return {
        "all_gather": links.shard("all-gather", gather * weights.dense / pieces).scaled(pieces)
        + links.expert_copies("all-gather", gather * weights.experts, ranks),
        "reduce_scatter": links.shard("reduce-scatter", reduce * weights.dense)
        + links.expert_copies("reduce-scatter", reduce * weights.experts, ranks)
        + copies,
        "all_gather_root": links.shard("all-gather", gather * weights.root),
        "reduce_scatter_root": links.shard("reduce-scatter", reduce * weights.root)
        + links.replicate("all-reduce", reduce * weights.root / ranks),
        "gradients": CommSeconds(),
        "weight_all_gather": CommSeconds(),
    }


def zero_0_to_2(case: Case, links: Links, weights: Weights) -> dict[str, CommSeconds]:
    """ZeRO 0 to 2: gradients of a rank once a step; with sharded optimizer states reduce-scatter, then all-gather."""
    dense = case.layers * weights.dense + weights.root / np.minimum(case.pp, 2)
    experts, ranks = case.layers * weights.experts, case.dp * case.cp
    kind, width = "reduce-scatter" if case.zero else "all-reduce", case.software.reduce
    spread = CommSeconds()
    if case.zero:
        spread = links.data_parallel("all-gather", case.software.weights * dense)
        spread += links.expert_copies("all-gather", case.software.weights * experts, ranks)
    return {
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_gather_root", "reduce_scatter_root"), CommSeconds()),
        "gradients": links.data_parallel(kind, width * dense) + links.expert_copies(kind, width * experts, ranks),
        "weight_all_gather": spread,
    }
