"""Communication of a step, in seconds on idle links: collectives of the layers, and of data parallelism.

Ranks are ordered as in `spec/grid.py`: tp at stride 1, then cp, dp_shard, dp_replicate, and the pipeline outermost.
Numbers may be arrays of candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from ...spec import components
from ...spec.lora import quantized_bytes
from ..case import Case, Number
from ..devices.links import Fabric
from ..devices.profile import profile_for
from ..ops import fullest

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
    """Collectives over the process groups of a layout; `groups`: ranks of each axis, and their stride."""

    fabric: Fabric
    groups: Mapping[str, tuple[Number, Number]]

    @classmethod
    def of(cls, case: Case) -> Self:
        cluster, tp, shard = case.cluster, case.tp, case.dp_shard * case.cp
        nodes = int(np.max(np.ceil(case.world / cluster.gpus_per_node)))
        profile = profile_for(case.gpu, cluster.profile, cluster.catalogue) if cluster.profile else None
        inside, between = (profile.curve, profile.between) if profile else (None, None)
        slower = profile.link_factors if profile else (1.0, 1.0)
        groups = {
            "tp": (tp, 1),
            "cp": (case.cp, tp),
            "ep": (case.ep, case.expert_tp),
            "shard": (shard, tp),  # ranks that shard one copy of the weights
            "dp_cp": (case.dp * case.cp, tp),
            "dp_replicate": (case.dp_replicate, tp * shard),
            "edp": (case.expert_copies, case.expert_tp * case.ep),  # ranks that hold the same experts
            "pp": (case.pp, tp * case.cp * case.dp),
        }
        return cls(Fabric.of(cluster, case.gpu, inside, nodes, between, slower), groups)

    def seconds(self, axis: str, kind: str, nbytes: Number) -> CommSeconds:
        """Of one collective, or of a send to the next rank of an axis; 0 where the axis has one rank."""
        ranks, stride = self.groups[axis]
        if np.all(np.equal(ranks, 1)):
            return CommSeconds()
        several = np.greater(ranks, 1)
        if kind == "send":
            ranks = np.where(several, 2, 1)
        seconds = np.where(several, self.fabric.seconds(kind, nbytes, ranks, stride), 0.0)
        near = self.fabric.inside(ranks, stride)
        return CommSeconds(np.where(near, seconds, 0.0), np.where(near, 0.0, seconds))

    def dispatch(self, nbytes: Number, across: Number) -> CommSeconds:
        """Of tokens that travel once: `nbytes` to ranks that hold some of their experts, `across` to machines."""
        ranks, stride = self.groups["ep"]
        seconds = self.fabric.dispatch(nbytes, across, ranks, stride)
        near = self.fabric.inside(ranks, stride)
        return CommSeconds(np.where(near, seconds, 0.0), np.where(near, 0.0, seconds))


@dataclass(frozen=True)
class StepComm:
    """Per micro-batch and block unless noted."""

    tp: tuple[CommSeconds, CommSeconds]  # forward, backward
    vocab: CommSeconds  # embedding or head with vocabulary parallelism, one direction
    cp: tuple[CommSeconds, CommSeconds]  # forward, backward: one hop of the ring
    ep: CommSeconds  # one direction
    send: CommSeconds  # to the next stage
    reductions: Number  # ZeRO-3: reduce-scatters of a block
    all_gather: CommSeconds = CommSeconds()  # ZeRO-3 and FSDP: weights of a block
    reduce_scatter: CommSeconds = CommSeconds()  # ZeRO-3: its gradients
    all_gather_root: CommSeconds = CommSeconds()  # ZeRO-3: embedding and head
    reduce_scatter_root: CommSeconds = CommSeconds()
    gradients: CommSeconds = CommSeconds()  # ZeRO 0 to 2: of a whole rank
    weight_all_gather: CommSeconds = CommSeconds()  # ZeRO 1 and 2

    def scaled(self, intra_node: float, inter_node: float) -> Self:
        """With factors on the seconds inside a node and between nodes."""

        def slower(found: Any) -> Any:
            if isinstance(found, tuple):
                return tuple(map(slower, found))
            if isinstance(found, CommSeconds):
                return CommSeconds(found.intra_node * intra_node, found.inter_node * inter_node)
            return found

        return replace(self, **{one.name: slower(getattr(self, one.name)) for one in fields(self)})

    @classmethod
    def of(cls, case: Case, weights: Weights) -> Self:
        links, width = Links.of(case), 4 if case.dtype == "fp32" else 2
        stream = case.tokens * case.model.hidden * width
        if case.sp:
            tensor = links.seconds("tp", "all-gather", stream) + links.seconds("tp", "reduce-scatter", stream)
        else:
            tensor = links.seconds("tp", "all-reduce", stream)
        backward = tensor.scaled(2)
        if case.sp and case.software.name.startswith("megatron"):  # saves sharded inputs, and gathers them again
            backward += links.seconds("tp", "all-gather", stream).scaled(2)
        # Layers with whole experts leave their tokens where sequence parallelism has them.
        routed = case.model.experts and case.software.whole_experts and case.sp
        apart = case.model.expert_layers / case.model.layers if routed else 0.0
        own = stream / case.tp if case.sp else stream  # with sequence parallelism each rank sends its own positions
        return cls(
            tp=(tensor.scaled(2 - apart), backward.scaled(1 - apart / 2)),
            vocab=tensor.scaled(0.5) + links.seconds("tp", "all-reduce", 4.0 * case.tokens).scaled(0.75),
            cp=cp_collectives(case, links, width) if np.any(case.cp > 1) else (CommSeconds(), CommSeconds()),
            ep=expert_dispatch(case, links, width).scaled(2) if case.model.experts else CommSeconds(),
            send=links.seconds("pp", "send", own),
            reductions=1 / case.accumulation if case.software.delayed_reduction and not case.sync_each_pass else 1.0,
            **(zero_3(case, links, weights) if case.zero == 3 else zero_0_to_2(case, links, weights)),
        )


def expert_dispatch(case: Case, links: Links, width: int) -> CommSeconds:
    """Of a rank's tokens to the experts they chose, or of the results back. All ranks wait for the most loaded one."""
    model = case.model
    slots = case.routed_tokens * model.top_k
    token = case.routed_tokens * model.hidden * width * fullest(slots, case.ep)
    if not case.software.dispatch_once:
        return links.seconds("ep", "all-to-all", model.top_k * token)
    machines = case.ep / links.fabric.members(case.ep, case.expert_tp)
    chosen = [distinct_bins(bins, model.experts, model.top_k) for bins in (case.ep, machines)]
    return links.dispatch(chosen[0] * token, chosen[1] * token)


def distinct_bins(bins: Number, experts: int, top_k: int) -> Number:
    """In how many of `bins`, which share the experts evenly, the `top_k` different experts of a token lie, expected."""
    empty: Number = 1.0  # the chance that a bin holds none of them
    for chosen in range(top_k):
        empty = empty * np.maximum(0, 1 - experts / bins / (experts - chosen))
    return bins * (1 - empty)


def cp_collectives(case: Case, links: Links, width: int) -> tuple[CommSeconds, CommSeconds]:
    """One hop of ring attention (keys, values; backward their gradients too), or all all-to-alls of Ulysses."""
    core = components.attention_core(case.model)
    heads = np.maximum(core.kv_heads / case.tp, 1)
    if case.cp_method == "ulysses":
        q, out = (case.tokens * core.heads * dim / case.tp * width for dim in (core.qk_dim, core.v_dim))
        kv = case.tokens * heads * (core.qk_dim + core.v_dim) * width
        there = links.seconds("cp", "all-to-all", q + kv) + links.seconds("cp", "all-to-all", out)
        return there, there
    ring = 2 * case.tokens * heads * core.qk_dim * width  # values travel as wide as keys
    return links.seconds("cp", "send", ring), links.seconds("cp", "send", 2 * ring)


# --- data parallelism -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Parameters as tensor and expert parallelism leave them: of one block, and of embedding and head together."""

    dense: Number  # of a block, without its experts
    experts: Number
    block: Number  # both
    root: Number
    gather: int  # bytes of one of them in an all-gather
    # Those with gradients: all, or adapters.
    trained_dense: Number
    trained_experts: Number
    trained_root: Number
    gathered_dense: Number  # bytes of the dense weights of a block in an all-gather: adapters and quantized ones too

    @property
    def trained_block(self) -> Number:
        return self.trained_dense + self.trained_experts

    @classmethod
    def of(cls, case: Case) -> Self:
        gather = case.software.gather or {"fp32": 4, "fp8": 1}.get(case.dtype, 2)
        dense: Number = 0.0
        experts: Number = 0.0
        for kind, count in case.model.kinds:
            share = count / case.model.layers if len(case.model.kinds) > 1 else 1
            for weight in components.block_weights(kind):
                shared = shards(weight, case.tp)
                if weight.experts:
                    experts = experts + share * (weight.size // case.ep // np.minimum(shared, case.expert_tp))
                else:
                    dense = dense + share * (weight.size // shared)
        root = sum(weight.size for weight in components.root_weights(case.model)) / case.tp
        trained = (dense, experts, root)
        gathered = gather * dense
        if case.adapters:
            adapters = sum(weight.size // shards(weight, case.tp) for weight in case.adapters)
            head = case.model.hidden if case.model.scalar_head else 0
            trained = (adapters, 0.0, head)
            gathered = gathered + gather * adapters - quantized_savings(case, gather)
        return cls(dense, experts, dense + experts, root, gather, *trained, gathered)


def shards(weight: components.Weight, tp: Number) -> Any:
    """Parts in which tensor parallelism cuts a weight."""
    return np.where(weight.kv_heads % tp == 0, tp, 1) if weight.tp_dim is not None else 1


def quantized_savings(case: Case, gather: int) -> Number:
    """Bytes of a block that an all-gather does not send, as frozen weights travel in 8 or 4 bits."""
    if not case.frozen_base:
        return 0.0
    linears = {f"{linear.name}.weight" for linear in components.linears(case.model)}
    found: Number = 0.0
    for weight in components.block_weights(case.model):
        if weight.name in linears:
            saved = gather * weight.size - quantized_bytes(weight, weight.shape, case.frozen_base)
            found = found + saved / shards(weight, case.tp)
    return found


def zero_3(case: Case, links: Links, weights: Weights) -> dict[str, CommSeconds]:
    """ZeRO-3, which FSDP1 and FSDP2 are: all-gather weights before use, reduce-scatter gradients.

    HSDP: all-reduce these over replicas.
    """
    gather, reduce, ranks = weights.gather, case.software.reduce, case.dp_shard * case.cp
    pieces = SHARDED_TENSORS if case.software.per_tensor_gather else 1
    return {
        "all_gather": links.seconds("shard", "all-gather", weights.gathered_dense / pieces).scaled(pieces)
        + links.seconds("edp", "all-gather", gather * weights.experts),
        "reduce_scatter": links.seconds("shard", "reduce-scatter", reduce * weights.trained_dense)
        + links.seconds("edp", "reduce-scatter", reduce * weights.trained_experts)
        + links.seconds("dp_replicate", "all-reduce", reduce * weights.trained_block / ranks),
        "all_gather_root": links.seconds("shard", "all-gather", gather * weights.root),
        "reduce_scatter_root": links.seconds("shard", "reduce-scatter", reduce * weights.trained_root)
        + links.seconds("dp_replicate", "all-reduce", reduce * weights.trained_root / ranks),
    }


def zero_0_to_2(case: Case, links: Links, weights: Weights) -> dict[str, CommSeconds]:
    """ZeRO 0 to 2: gradients of a rank once a step; with sharded optimizer states reduce-scatter, then all-gather."""
    dense = case.layers * weights.trained_dense + weights.trained_root / np.minimum(case.pp, 2)
    experts, width = case.layers * weights.trained_experts, case.software.reduce
    kind = "reduce-scatter" if case.zero else "all-reduce"
    found = {"gradients": links.seconds("dp_cp", kind, width * dense) + links.seconds("edp", kind, width * experts)}
    if case.zero:
        found["weight_all_gather"] = links.seconds(
            "dp_cp", "all-gather", case.software.weights * dense
        ) + links.seconds("edp", "all-gather", case.software.weights * experts)
    return found
