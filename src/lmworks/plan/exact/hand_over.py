"""What the rollout engine of an online method holds on a rank, and what a hand-over of weights moves there.

The engine has a tensor-parallel shard of every weight over align.engine_tp ranks. Weights whose shards are those of the
trainer, in the same dtype, are the trainer's own tensors. Each of the others is gathered from the trainer's layout:
over the ranks of FSDP2 (rows, padded to ⌈rows/n⌉ a rank), then over those of tensor parallelism, unless the engine's
are the same, and of expert parallelism; then a rank copies its shard. With adapters a hand-over gathers and merges the
layers that have one; the first brings the frozen weights too (`align/rollout_engine.py`). With align.rollout_ranks
nothing is shared: rank 0 broadcasts every weight whole in the engine's dtype (`align/remote_sampler.py`). A quantized
weight is dequantized to fp32 before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...spec import Grid, RunSpec, components
from ...spec.components import Weight, overlap, rows_of_ranks
from ...spec.lora import DEFAULT_ADAPTER, adapter_weights, quantized_parts, target_linears
from ..case import Case
from .shards import FP32, chunk

ABSORBED = "attention.kv_b.weight"  # the engine keeps it in two parts: engine/core/latent_attention.py


@dataclass(frozen=True)
class Transfer:
    """A collective over the ranks of an axis of the trainer's grid."""

    kind: str
    axis: str
    bytes: int  # of the message: what is gathered, padding included; of an all-to-all what this rank sends
    received: int  # from other ranks


def all_gather(axis: str, ranks: int, nbytes: int) -> Transfer:
    return Transfer("all-gather", axis, nbytes, nbytes // ranks * (ranks - 1))


@dataclass(frozen=True)
class EngineWeight:
    """On one rank."""

    name: str
    bytes: int  # on all ranks as many
    shared: bool = False  # the trainer's own tensor
    changes: bool = True  # between hand-overs; frozen weights without an adapter do not
    transfers: tuple[Transfer, ...] = ()
    whole: int = 0  # bytes of the whole weight in the engine's dtype


@dataclass(frozen=True)
class HandOverBytes:
    """On one rank."""

    received: int  # from other ranks
    copied: int  # written to the engine's weights
    broadcast: int = 0  # to rollout ranks


def engine_width(spec: RunSpec) -> int:
    """Bytes of a number in the engine's weights and KV cache."""
    return 4 if spec.precision.dtype == "fp32" else 2


def hand_over_bytes(spec: RunSpec, rank: int = 0, first: bool = False) -> HandOverBytes:
    """Of every hand-over, or of the first."""
    moved = moved_weights(spec, rank, first)
    received = sum(transfer.received for weight in moved for transfer in weight.transfers)
    sent = sum(weight.whole for weight in moved) if spec.align.rollout_ranks else 0
    return HandOverBytes(received, sum(weight.bytes for weight in moved), sent)


def moved_weights(spec: RunSpec, rank: int = 0, first: bool = False) -> list[EngineWeight]:
    return [weight for weight in engine_weights(spec, rank) if not weight.shared and (weight.changes or first)]


def hand_over_working(spec: RunSpec, rank: int = 0) -> int:
    """Most bytes of one weight on its way: its messages; of layers with adapters also the product, in fp32; for rollout
    ranks what is broadcast."""
    merged, apart = 4 // engine_width(spec) if spec.lora.rank else 0, spec.align.rollout_ranks > 0

    def working(weight: EngineWeight) -> int:
        made = (merged + 1) * weight.whole if apart else merged * weight.bytes
        return sum(one.bytes for one in weight.transfers) + made

    return max(map(working, moved_weights(spec, rank, first=True)), default=0)


def engine_weights(spec: RunSpec, rank: int = 0) -> list[EngineWeight]:
    layout, case, width = spec.parallel, Case.of(spec), engine_width(spec)
    tp = spec.align.engine_tp
    shares = layout.tp == tp and case.sharding in ("alone", "ddp") and layout.offload == "none"
    shares = shares and case.software.weights == width and not spec.align.rollout_ranks
    adapted = {linear.name: linear for linear in target_linears(spec.model, spec.lora)} if spec.lora.rank else {}
    quantized = {f"{linear.name}.weight" for linear in components.linears(spec.model)} if spec.lora.base else set()

    @functools.cache  # blocks are alike
    def described(inside: str) -> EngineWeight:
        weight = components.by_inside_name(spec.model)[inside]
        linear = adapted.get(inside.removesuffix(".weight"))
        adapters = [] if linear is None else list(adapter_weights(linear, spec.lora, DEFAULT_ADAPTER))
        own = math.prod(map(len, weight.inference_part(tp, 0)))
        same_shape = own == math.prod(tp_part(weight, layout.tp)) and inside not in (ABSORBED, *quantized)
        return EngineWeight(
            inside,
            width * own,
            shares and same_shape and linear is None,
            not spec.lora.rank or linear is not None,
            (
                *transfers(spec, case, weight, rank, inside in quantized),
                *(one for each in adapters for one in transfers(spec, case, each, rank)),
            ),
            width * weight.size,
        )

    found = []
    for weight in components.weights(spec.model):
        inside = weight.name if weight.layer < 0 else weight.name.split(".", 2)[2]
        found.append(replace(described(inside), name=weight.name))
    return [*found, *choice_biases(spec)]


def tp_part(weight: Weight, tp: int) -> tuple[int, ...]:
    dim = weight.sharded(tp)
    return tuple(size // tp if index == dim else size for index, size in enumerate(weight.shape))


def transfers(spec: RunSpec, case: Case, weight: Weight, rank: int, quantized: bool = False) -> Iterator[Transfer]:
    """Of one weight; groups of one rank send nothing. A quantized one is dequantized to fp32 once it is gathered from
    FSDP2's shards."""
    width = FP32 if quantized else case.software.weights
    grid, tp = case.grid, case.grid.tp
    expert, engine_tp = case.ep > 1 and weight.experts > 0, spec.align.engine_tp
    axis = "edp" if expert else "shard"
    local = tp_part(replace(weight, shape=(weight.shape[0] // grid.ep, *weight.shape[1:])) if expert else weight, tp)
    ranks = grid.size(axis) if case.sharding == "fsdp2" else 1
    # Of other weights, and for DoRA's norms of whole rows, the whole is made first.
    direct = ranks > 1 and engine_tp > 1 and tp == 1 and not (expert or quantized or spec.lora.dora)
    direct = direct and not spec.align.rollout_ranks  # which get all of them
    if direct and (found := resharded(weight, width, engine_tp, grid, rank)) is not None:
        yield from [found] if found.bytes or found.received else []
        return
    if ranks > 1 and quantized:
        parts = quantized_parts(weight, local, spec.lora.base)
        yield from (all_gather(axis, ranks, each * ranks * chunk(count, ranks)) for count, each in parts)
    elif ranks > 1:
        yield all_gather(axis, ranks, width * ranks * chunk(local[0], ranks) * math.prod(local[1:]))
    size = width * math.prod(local)
    same_parts = tp == engine_tp and not spec.lora.dora and not spec.align.rollout_ranks
    if weight.sharded(tp) is not None and not same_parts:
        size *= tp
        yield all_gather("tp", tp, size)
    if expert:
        yield all_gather("ep", grid.ep, size * grid.ep)


def resharded(weight: Weight, width: int, tp: int, grid: Grid, rank: int) -> Transfer | None:
    """From FSDP2's rows to the shards of `tp` inference ranks; None of a weight that all of them hold whole."""
    members = grid.group("shard", rank)
    wanted = [weight.inference_part(tp, member % tp) for member in members]
    if all(part == wanted[0] for part in wanted):
        return None
    held, me = rows_of_ranks(weight.shape[0], len(members)), members.index(rank)
    own = common(held[me], wanted[me])
    sent = sum(common(held[me], part) for part in wanted) - own
    received = sum(common(rows, wanted[me]) for rows in held) - own
    return Transfer("all-to-all", "shard", width * (sent + own if sent or received else 0), width * received)


def common(rows: range, part: tuple[range, ...]) -> int:
    """Numbers of a part that are in these rows."""
    return len(overlap(rows, part[0])) * math.prod(map(len, part[1:]))


def choice_biases(spec: RunSpec) -> Iterable[EngineWeight]:
    """Buffers of fp32, whole on every rank."""
    model = spec.model
    layers = [layer for layer in range(model.layers) if model.balance_bias and model.has_experts(layer)]
    size = 4 * spec.model.experts
    return (EngineWeight(f"blocks.{layer}.mlp.choice_bias", size, whole=size) for layer in layers)
