"""What the rollout engine of an online method holds on a rank, and what a hand-over of weights moves there.

The engine has a tensor-parallel shard of every weight over align.engine_tp ranks. Weights whose shards are those of the
trainer, in the same dtype, are the trainer's own tensors. Each of the others is gathered from the trainer's layout:
over the ranks of FSDP2 (rows, padded to ⌈rows/n⌉ a rank), then over those of tensor parallelism, unless the engine's
are the same, and of expert parallelism; then a rank copies its shard. With adapters a hand-over gathers and merges the
layers that have one; the first brings the frozen weights too (`align/rollout_engine.py`). A quantized weight travels
dequantized, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...spec import RunSpec, components
from ...spec.components import Weight
from ...spec.lora import DEFAULT_ADAPTER, adapter_weights, quantized_parts, target_linears
from ..case import Case
from .shards import FP32, chunk

ABSORBED = "attention.kv_b.weight"  # the engine keeps it in two parts: engine/core/latent_attention.py


@dataclass(frozen=True)
class Gather:
    """An all-gather over the ranks of an axis of the trainer's grid."""

    axis: str
    ranks: int
    bytes: int  # of what is gathered, padding included

    @property
    def received(self) -> int:
        return self.bytes // self.ranks * (self.ranks - 1)


@dataclass(frozen=True)
class EngineWeight:
    """On one rank; all ranks have as many bytes."""

    name: str
    bytes: int
    shared: bool = False  # the trainer's own tensor
    changes: bool = True  # between hand-overs; frozen weights without an adapter do not
    gathers: tuple[Gather, ...] = ()


@dataclass(frozen=True)
class HandOverBytes:
    """On one rank."""

    received: int  # from other ranks
    copied: int  # written to the engine's weights


def engine_width(spec: RunSpec) -> int:
    """Bytes of a number in the engine's weights and KV cache."""
    return 4 if spec.precision.dtype == "fp32" else 2


def hand_over_bytes(spec: RunSpec, first: bool = False) -> HandOverBytes:
    """Of every hand-over, or of the first."""
    moved = moved_weights(spec, first)
    return HandOverBytes(sum(g.received for w in moved for g in w.gathers), sum(weight.bytes for weight in moved))


def moved_weights(spec: RunSpec, first: bool = False) -> list[EngineWeight]:
    return [weight for weight in engine_weights(spec) if not weight.shared and (weight.changes or first)]


def hand_over_working(spec: RunSpec) -> int:
    """Most bytes of one weight on its way: what is gathered; of layers with adapters also the product, in fp32."""
    merged = 4 * spec.align.engine_tp // engine_width(spec) if spec.lora.rank else 0
    moved = moved_weights(spec, first=True)
    return max((sum(g.bytes for g in weight.gathers) + merged * weight.bytes for weight in moved), default=0)


def engine_weights(spec: RunSpec) -> list[EngineWeight]:
    layout, case, width = spec.parallel, Case.of(spec), engine_width(spec)
    tp = spec.align.engine_tp
    shares = layout.tp == tp and case.sharding == "alone" and layout.offload == "none"
    shares = shares and case.software.weights == width
    adapted = {linear.name: linear for linear in target_linears(spec.model, spec.lora)} if spec.lora.rank else {}
    quantized = {f"{linear.name}.weight" for linear in components.linears(spec.model)} if spec.lora.base else set()
    found = []
    for weight in components.weights(spec.model):
        inside = weight.name if weight.layer < 0 else weight.name.split(".", 2)[2]
        linear = adapted.get(inside.removesuffix(".weight"))
        adapters = [] if linear is None else list(adapter_weights(linear, spec.lora, DEFAULT_ADAPTER))
        own = engine_size(weight, tp)
        same_shape = own == math.prod(tp_part(weight, layout.tp)) and inside not in (ABSORBED, *quantized)
        found.append(
            EngineWeight(
                weight.name,
                width * own,
                shares and same_shape and linear is None,
                not spec.lora.rank or linear is not None,
                (
                    *gathers(spec, case, weight, quantized=inside in quantized),
                    *(one for each in adapters for one in gathers(spec, case, each)),
                ),
            )
        )
    return [*found, *choice_biases(spec)]


def engine_size(weight: Weight, tp: int) -> int:
    """Numbers of one rank; where ranks outnumber the key heads, each has the rows of one."""
    if tp > 1 and weight.kv_heads % tp:
        return weight.size // weight.kv_heads
    return math.prod(tp_part(weight, tp))


def tp_part(weight: Weight, tp: int) -> tuple[int, ...]:
    dim = weight.sharded(tp)
    return tuple(size // tp if index == dim else size for index, size in enumerate(weight.shape))


def gathers(spec: RunSpec, case: Case, weight: Weight, quantized: bool = False) -> Iterator[Gather]:
    """Of one weight, the innermost first; groups of one rank gather nothing. A quantized one is dequantized to fp32
    once it is gathered from FSDP2's shards."""
    width = FP32 if quantized else case.software.weights
    grid = case.grid
    expert, tp = case.ep > 1 and weight.experts > 0, grid.tp
    local = tp_part(replace(weight, shape=(weight.shape[0] // grid.ep, *weight.shape[1:])) if expert else weight, tp)
    axis = "edp" if expert else "shard"
    if case.sharding == "fsdp2" and (ranks := grid.size(axis)) > 1:
        if quantized:
            parts = quantized_parts(weight, local, spec.lora.base)
            yield from (Gather(axis, ranks, each * ranks * chunk(count, ranks)) for count, each in parts)
        else:
            yield Gather(axis, ranks, width * ranks * chunk(local[0], ranks) * math.prod(local[1:]))
    size = width * math.prod(local)
    same_parts = tp == spec.align.engine_tp and not spec.lora.dora
    if weight.sharded(tp) is not None and not same_parts:
        size *= tp
        yield Gather("tp", tp, size)
    if expert:
        yield Gather("ep", grid.ep, size * grid.ep)


def choice_biases(spec: RunSpec) -> Iterable[EngineWeight]:
    """Buffers of fp32, whole on every rank."""
    layers = spec.model.layers if spec.model.experts and spec.model.balance_bias else 0
    return (EngineWeight(f"blocks.{layer}.mlp.choice_bias", 4 * spec.model.experts) for layer in range(layers))
