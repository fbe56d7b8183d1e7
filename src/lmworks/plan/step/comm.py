"""Traffic of a step, in seconds: what layers exchange while a micro-batch passes, and what data parallelism moves.

Groups lie as `spec/grid.py` lays them: tp at stride 1, then cp, dp_shard, dp_replicate, and the pipeline outermost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from ..case import Case, Number
from ..devices.links import Fabric
from ..devices.profile import profile_for
from ..expert_load import fullest
from ..memory.share import of_block

TENSORS = 4  # of a block that are large enough to be sharded: the four products of attention and MLP


@dataclass(frozen=True)
class Wire:
    """Seconds on the links inside a node and on the network between nodes."""

    near: Number = 0.0
    far: Number = 0.0

    def __add__(self, other: Wire) -> Wire:
        return Wire(self.near + other.near, self.far + other.far)

    def times(self, count: Number) -> Wire:
        return Wire(self.near * count, self.far * count)


@dataclass(frozen=True, eq=False)
class Links:
    """A case's cluster, by the groups of its layout."""

    case: Case
    fabric: Fabric

    @classmethod
    def of(cls, case: Case) -> Self:
        nodes = int(np.max(np.ceil(case.world / case.cluster.gpus_per_node)))
        cluster = case.cluster.replace(nodes=nodes)
        measured = profile_for(case.gpu, cluster.profile, cluster.catalogue).curve if cluster.profile else None
        return cls(case, Fabric.of(cluster, case.gpu, measured))

    def wire(self, kind: str, nbytes: Number, ranks: Number, stride: Number) -> Wire:
        if np.all(ranks == 1):
            return Wire()
        seconds, near = self.fabric.seconds(kind, nbytes, ranks, stride), self.fabric.inside(ranks, stride)
        return Wire(np.where(near, seconds, 0.0), np.where(near, 0.0, seconds))

    def tensor(self, kind: str, nbytes: Number) -> Wire:
        return self.wire(kind, nbytes, self.case.tp, 1)

    def shard(self, kind: str, nbytes: Number) -> Wire:
        """Ranks that hold other parts of one model's weights: dp_shard × cp."""
        return self.wire(kind, nbytes, self.case.dp_shard * self.case.cp, self.case.tp)

    def replicate(self, kind: str, nbytes: Number) -> Wire:
        case = self.case
        return self.wire(kind, nbytes, case.dp_replicate, case.tp * case.cp * case.dp_shard)

    def all_data(self, kind: str, nbytes: Number) -> Wire:
        return self.wire(kind, nbytes, self.case.dp * self.case.cp, self.case.tp)

    def expert(self, kind: str, nbytes: Number) -> Wire:
        return self.wire(kind, nbytes, self.case.ep, self.case.tp)

    def expert_copies(self, kind: str, nbytes: Number, ranks: Number) -> Wire:
        """Ranks that share the weights of the same experts: every ep-th of `ranks`."""
        case = self.case
        if not case.model.experts:
            return Wire()
        return self.wire(kind, nbytes, np.maximum(1, ranks // case.ep), case.tp * case.ep)

    def next_rank(self, nbytes: Number, ranks: Number, stride: Number) -> Wire:
        """To the neighbour on an axis, where there is one."""
        if np.all(ranks == 1):
            return Wire()
        return self.wire("send", nbytes, 2, stride).times(np.where(ranks > 1, 1.0, 0.0))


@dataclass(frozen=True)
class Exchanges:
    """Of one micro-batch and one block where nothing else is said."""

    tensor: tuple[Wire, Wire]  # forward, backward
    ends: Wire  # of embedding or head, one way, over a split vocabulary
    context: tuple[Wire, Wire]  # one step of the ring
    expert: Wire  # one way
    send: Wire  # to the next stage
    gather: Wire  # ZeRO-3: weights of a block
    reduce: Wire  # ZeRO-3: its gradients
    gather_root: Wire  # ZeRO-3: embedding and head
    reduce_root: Wire
    gradients: Wire  # ZeRO 0 to 2: of a whole rank
    new_weights: Wire  # ZeRO 1 and 2

    @classmethod
    def of(cls, case: Case) -> Self:
        links, weights, width = Links.of(case), Weights.of(case), 4 if case.dtype == "fp32" else 2
        stream = case.tokens * case.model.hidden * width
        tensor = exchange(case, links, stream)
        rows = Wire()
        if case.model.experts:  # all wait for the rank that gets most
            most = fullest(case.tokens * case.model.top_k, case.ep)
            rows = links.expert("all-to-all", case.model.top_k * stream * most)
        own = stream / case.tp if case.sp else stream  # with sequence parallelism each rank sends its own positions
        return cls(
            tensor=(tensor.times(2), tensor.times(2) + regathered(case, links, stream)),
            ends=tensor.times(0.5) + links.tensor("all-reduce", 4.0 * case.tokens).times(0.75),
            context=context(case, links, width),
            expert=rows.times(2),
            send=links.next_rank(own, case.pp, case.tp * case.cp * case.dp),
            **(sharded(case, links, weights) if case.zero == 3 else whole(case, links, weights)),
        )


def context(case: Case, links: Links, width: int) -> tuple[Wire, Wire]:
    """One turn of the ring, forward (keys and values) and back (their gradients too); or all of Ulysses' exchanges."""
    q = case.tokens * case.model.q_dim / case.tp * width
    kv = 2 * case.tokens * np.maximum(case.model.kv_dim / case.tp, case.model.head_dim) * width
    if case.cp_method == "ulysses":
        there = links.wire("all-to-all", q + kv, case.cp, case.tp) + links.wire("all-to-all", q, case.cp, case.tp)
        return there, there
    return links.next_rank(kv, case.cp, case.tp), links.next_rank(2 * kv, case.cp, case.tp)


def exchange(case: Case, links: Links, size: Number) -> Wire:
    """A sum over tensor-parallel ranks, or the scatter and the gather that sequence parallelism makes of it."""
    if case.sp:
        return links.tensor("all-gather", size) + links.tensor("reduce-scatter", size)
    return links.tensor("all-reduce", size)


def regathered(case: Case, links: Links, size: Number) -> Wire:
    """Megatron keeps its own positions of each region's input only, and gathers them again in the backward pass."""
    if case.sp and case.software.name.startswith("megatron"):
        return links.tensor("all-gather", size).times(2)
    return Wire()


# --- data parallelism -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Numbers that a tensor-parallel rank has of one block, and of embedding and head together."""

    dense: Number
    experts: Number
    root: Number

    @classmethod
    def of(cls, case: Case) -> Self:
        root = (case.model.params - case.model.layers * case.model.block_params) / case.tp
        return cls(*of_block(case), root)

    @property
    def block(self) -> Number:
        return self.dense + self.experts


def sharded(case: Case, links: Links, weights: Weights) -> dict[str, Wire]:
    """ZeRO-3: weights are gathered where they are used, gradients go to their owners, and there to other copies."""
    gather, reduce, ranks = case.software.gather or case.width, case.software.reduce, case.dp_shard * case.cp
    copies = links.replicate("all-reduce", reduce * weights.block / ranks)
    pieces = TENSORS if case.software.piecewise else 1
    return {
        "gather": links.shard("all-gather", gather * weights.dense / pieces).times(pieces)
        + links.expert_copies("all-gather", gather * weights.experts, ranks),
        "reduce": links.shard("reduce-scatter", reduce * weights.dense)
        + links.expert_copies("reduce-scatter", reduce * weights.experts, ranks)
        + copies,
        "gather_root": links.shard("all-gather", gather * weights.root),
        "reduce_root": links.shard("reduce-scatter", reduce * weights.root)
        + links.replicate("all-reduce", reduce * weights.root / ranks),
        "gradients": Wire(),
        "new_weights": Wire(),
    }


def whole(case: Case, links: Links, weights: Weights) -> dict[str, Wire]:
    """ZeRO 0 to 2: all gradients of a rank once a step; where states are sharded, only to their owners, and back."""
    dense = case.layers * weights.dense + weights.root / np.minimum(case.pp, 2)
    experts, ranks = case.layers * weights.experts, case.dp * case.cp
    kind, width = "reduce-scatter" if case.zero else "all-reduce", case.software.reduce
    spread = Wire()
    if case.zero:
        spread = links.all_data("all-gather", case.software.weights * dense)
        spread += links.expert_copies("all-gather", case.software.weights * experts, ranks)
    return {
        **dict.fromkeys(("gather", "reduce", "gather_root", "reduce_root"), Wire()),
        "gradients": links.all_data(kind, width * dense) + links.expert_copies(kind, width * experts, ranks),
        "new_weights": spread,
    }
