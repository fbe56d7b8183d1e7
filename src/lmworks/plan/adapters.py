"""Costs of low-rank adapters over frozen weights, for eager and for fused code.

    y = W·x + scale · B·A·x

W is frozen: it has no gradient, and x is kept for the gradient of A alone. The adapter adds two narrow products and a
sum forward; backward two gradients of weights, two of inputs, and the sum of two gradients of x. DoRA divides by the
norms of the rows of W + scale · B·A, which it computes in every forward pass. A frozen W in 8 or 4 bits is dequantized
in the forward pass and again in the backward pass, and so is its copy for DoRA's norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..spec import components
from ..spec.lora import ADAPTERS, NF4_BLOCK
from .ops import Kernel, Op, Workload, gemm, stream, weight_gradient

# Of plain torch (kernels/nf4.py, model/quantized_weight.py), bytes read and written for one weight, and launches; then
# a cast to the precision of products. NF4: two halves of a byte, stacked, as indices of 4 bytes and of 8, times the
# scale of their block. int8: in fp32, times the scale of their row.
DEQUANTIZED = {"nf4": (29.0, 7), "int8": (13.0, 2)}
LOOKED_UP = {"nf4": 12.0, "int8": 0.0}  # an index of 8 bytes and a level of 4: on a CPU not bound by memory
STORED = {"nf4": 0.5 + 1 / NF4_BLOCK, "int8": 1.0}  # bytes of one weight, which is what compiled code reads


@dataclass(frozen=True)
class Layer:
    """A linear layer on one rank."""

    name: str
    inputs: Any
    outputs: Any


@dataclass(frozen=True)
class LowRank:
    rank: int
    dora: bool


def low_rank(load: Workload, layer: str) -> LowRank | None:
    """The adapter of a linear layer, if it has one."""
    own = [weight for weight in load.adapters if weight.name.startswith(f"{layer}.{ADAPTERS}.")]
    if not own:
        return None
    return LowRank(own[0].shape[0], any(weight.name.endswith("magnitude") for weight in own))


def weight_readers(load: Workload, source: str, readers: int) -> int:
    """Of the products that read `source`, those that keep it for a weight's gradient: all, or those with adapters."""
    if not load.frozen:
        return readers
    linears = (linear for linear in components.linears(load.model) if linear.reads == source)
    return sum(low_rank(load, linear.name) is not None for linear in linears)


def with_frozen_weights(op: Op, load: Workload, layers: Sequence[Layer] = ()) -> Op:
    """An op of products over frozen weights, with the adapters of these layers."""
    if not load.frozen:
        return op
    forward, saved, selective = list(op.forward), list(op.saved), list(op.saved_selective)
    backward = [kernel for kernel in op.backward if kernel.kind == "gemm" and not kernel.over_tokens]
    for layer in layers:
        if load.frozen_base:
            forward += dequantization(load, layer)
            backward += dequantization(load, layer)
        adapter = low_rank(load, layer.name)
        if adapter is not None:
            update = adapter_op(adapter, load, layer)
            forward, backward = [*forward, *update.forward], [*backward, *update.backward]
            saved, selective = [*saved, *update.saved], [*selective, *update.saved_selective]
    return replace(
        op, forward=tuple(forward), backward=tuple(backward), saved=tuple(saved), saved_selective=tuple(selective)
    )


def adapter_op(adapter: LowRank, load: Workload, layer: Layer) -> Op:
    """What the adapter of one layer adds. Kept: A·x; under selective recompute the results of both products."""
    t, w, rank, wide = load.tokens, load.width, adapter.rank, load.width / 4
    inputs, outputs = layer.inputs, layer.outputs
    results = w * t * rank, w * t * outputs
    forward = [gemm(t, inputs, rank), gemm(t, rank, outputs), stream(3 * t * outputs * wide)]
    # B's result is scaled; its two gradients, A's two, and x has one from W and one from A.
    backward = [stream(2 * t * outputs * wide), weight_gradient(outputs, t, rank), gemm(t, outputs, rank)]
    backward += [weight_gradient(rank, t, inputs), gemm(t, rank, inputs), stream(3 * t * inputs * wide)]
    if load.cast_weights:
        casts = [Kernel("stream", bytes=6.0 * rank * inputs), Kernel("stream", bytes=6.0 * rank * outputs)]
        forward += casts
        backward += [replace(cast, kind="widen") for cast in casts]
    there, back = (tuple(replace(kernel, bf16_only=True) for kernel in way) for way in (forward, backward))
    found = Op("adapter", "matmul", there, back, results[:1], results)
    return with_magnitudes(found, load, layer, rank) if adapter.dora else found


def with_magnitudes(op: Op, load: Workload, layer: Layer, rank: int) -> Op:
    """DoRA: norms of the rows in fp32; kept are what they scale, norms, and magnitudes over norms."""
    outputs, result = layer.outputs, load.tokens * layer.outputs * load.width
    numbers = layer.outputs * layer.inputs
    norms = list(dequantization(load, layer)) if load.frozen_base else []
    if load.software.weights < 4 and not load.frozen_base:  # in fp32
        norms.append(Kernel("stream", bytes=6.0 * numbers))
    # The product adds to W; then squares, and their sums.
    norms += [gemm(outputs, rank, layer.inputs), stream(2 * numbers), stream(2 * numbers), stream(numbers)]
    scaled, gradient = Kernel("stream", bytes=2.0 * result), Kernel("stream", bytes=3.0 * result)
    return replace(
        op,
        forward=(*op.forward, *norms, scaled),
        backward=(scaled, gradient, *op.backward),
        saved=(*op.saved, result, 4 * outputs, load.width * outputs),
        saved_selective=(*op.saved_selective, 4 * numbers),
    )


def dequantization(load: Workload, layer: Layer) -> Iterator[Kernel]:
    """Of a whole weight; compiled code reads what is stored and writes what is multiplied."""
    numbers = layer.inputs * layer.outputs
    if load.software.graph:
        yield Kernel("stream", bytes=(STORED[load.frozen_base] + load.width) * numbers)
        return
    each, launches = DEQUANTIZED[load.frozen_base]
    yield Kernel("stream", bytes=each * numbers / launches, count=launches)
    if looked_up := LOOKED_UP[load.frozen_base]:
        yield Kernel("exp", bytes=looked_up * numbers)
    if load.is_16_bit:
        yield Kernel("stream", bytes=6.0 * numbers)
