"""The op list of code with fused kernels: Megatron with Transformer Engine, torchtitan, MPT, our own compiled blocks.

The same components as in `eager`, with what lies between two GEMMs in one kernel that reads its inputs and writes its
output once. Saved for the backward pass (Korthikanti et al. 2022, with flash attention instead of scores where there is
one): the residual stream before each norm, the input of every GEMM, q, k, v and attention's output, and dropout masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..spec import components
from ..spec.components import MLP, Attention, Copy, Experts, Linear, Norm, Residual, Rotary, Sinks
from . import eager
from .flops import keys_per_query
from .ops import Kernel, Op, Workload, fullest, gemm, padded, without_fp8

# Passes over the router's scores in each direction: logits in fp32, softmax, top-k, their sum and weights, the dispatch
# mask, counts by expert and by rank, their sums, a sort, and the balance loss. Counted from this list, not measured.
ROUTING = 12


def passes(*sizes: Any) -> tuple[Kernel, ...]:
    """One memory-bound kernel for each size in bytes."""
    return tuple(Kernel("stream", bytes=1.0 * size) for size in sizes)


def launched(load: Workload, count: int) -> tuple[Kernel, ...]:
    """Launches of unfused code that cost the host only: small sums, and gradient accumulation.

    Their bytes are counted with the kernels that they belong to.
    """
    return () if load.software.fused else (Kernel("stream", count=count),)


def summed(load: Workload, numbers: Any, bias: bool) -> tuple[Kernel, ...]:
    """The gradient of a bias, where a separate kernel sums it over tokens."""
    return passes(load.width * numbers) if load.software.bias_grad_pass and bias else ()


def product(
    name: str,
    load: Workload,
    inputs: Any,
    outputs: Any,
    part: str = "matmul",
    saved_selective: Sequence[Any] | None = None,
    bias: bool = False,
) -> Op:
    """Weights arrive in the compute precision, or are cast with the layer where the code does so (autocast).

    `saved_selective`: widths of the outputs that selective recompute saves, by default all in one tensor.
    """
    t = load.tokens
    # Weight-gradient accumulation; a bias has a sum over tokens and an accumulation too.
    sums = launched(load, 3 if load.model.bias else 1)
    cast = passes(6.0 * inputs * outputs) if load.cast_weights else ()
    forward = (gemm(t, inputs, outputs), *cast)
    backward = (gemm(t, outputs, inputs), gemm(outputs, t, inputs), *cast, *sums, *summed(load, t * outputs, bias))
    kept = tuple(load.width * t * width for width in ((outputs,) if saved_selective is None else saved_selective))
    return Op(name, part, forward, backward, saved_selective=kept)


def stem(load: Workload) -> list[Op]:
    x, table = load.sp_tokens * load.model.hidden * load.software.stream, load.vocab * load.model.hidden
    mask = load.sp_tokens * load.model.hidden * load.software.dropout
    return [Op("embedding", "embedding", passes(2 * x + mask), passes(4 * table, 2 * x), saved=(x, mask))]


def norm(name: str, load: Workload) -> Op:
    """Its output is saved as the next GEMM's input; its input is saved by the op that made it."""
    x = load.sp_tokens * load.model.hidden
    s, w = load.software.stream, load.width
    statistics = [4 * load.sp_tokens] * (2 if load.model.norm == "layer" else 1)
    results = [] if load.rematerialized else [w * x]
    sums = launched(load, 4 if load.model.norm == "layer" else 2)  # each of its weights: a sum, added to the last
    return Op(name, "norms", passes((s + w) * x), (*passes((2 * s + w) * x), *sums), saved=(*results, *statistics))


def residual(name: str, load: Workload, inner: bool = False) -> Op:
    """Residual add, and dropout before it with a mask of one byte per element.

    A compiler saves the addend of an `inner` add, where that has fewer bytes, and adds again.
    """
    x, s = load.sp_tokens * load.model.hidden, load.software.stream
    mask = x * load.software.dropout
    kept = min(s, load.width) if inner and load.software.fused else s
    moved = np.where(load.epilogue_fusion & (not inner), s, 2 * s + load.width)[()]
    return Op(name, "residual", passes(moved * x + mask), passes(2 * s * x + mask), saved=(kept * x, mask))


def projections(layers: Sequence[Linear], load: Workload) -> Op:
    """Layers that read the same input are one product; selective recompute saves their outputs."""
    first = layers[0]
    outputs = [layer.outputs if layer.shard == "row" else load.local(layer.outputs, layer.shard) for layer in layers]
    inputs = first.inputs // load.tp if first.shard == "row" else first.inputs
    kept = outputs[:-1] if load.software.saves_alternate_gemms else outputs
    name = ", ".join(layer.label for layer in layers)
    return product(name, load, inputs, sum(outputs), saved_selective=kept, bias=first.bias)


def rotary(layers: Sequence[Rotary], load: Workload) -> Op:
    moved = load.width * load.tokens * sum(load.local(layer.width, layer.shard) for layer in layers)
    turns = 1 if load.software.fused else 3  # unfused: two halves, their product with fp32 tables, and back
    return Op("rotary", "rotary", passes(2 * turns * moved), passes(2 * turns * moved))


def head_norms(layers: Sequence[Norm], load: Workload) -> Op:
    """Saved: their inputs, and their outputs where a linear layer reads them."""
    sizes = [load.width * load.tokens * load.local(layer.total, layer.shard) for layer in layers]
    outputs = [
        size
        for layer, size in zip(layers, sizes, strict=True)
        if components.readers(load.model, layer) and not load.rematerialized
    ]
    inputs = [
        load.width * load.tokens * layer.source if layer.source else size
        for layer, size in zip(layers, sizes, strict=True)
    ]
    return Op("head norms", "norms", passes(2 * sum(sizes)), passes(3 * sum(sizes)), saved=(*inputs, *outputs))


def attention(core: Attention, load: Workload) -> Op:
    t, w = load.tokens, load.width
    heads, kv_heads, several = core.heads // load.tp, load.local(core.kv_heads, "kv_heads"), np.greater(load.cp, 1)
    q, k = w * t * heads * core.qk_dim, w * t * kv_heads * core.qk_dim
    v, result = w * t * kv_heads * core.v_dim, w * t * heads * core.v_dim
    inputs = [q, k, v, q * several, k * several]  # with context parallelism also before the rotary embedding
    if load.software.attention == "scores":
        return scores(core, load, inputs, result)
    shape = (load.seq, core.qk_dim)
    flops = 1.0 * t * (core.flops_per_key // load.tp) * keys_per_query(load.seq, core.window)
    kernels = (
        Kernel("attention", flops=flops, shape=shape),
        Kernel("attention_backward", flops=2.5 * flops, shape=shape),
    )
    statistics = 4 * t * heads
    saved = (*inputs, result, statistics)
    return Op("attention", "attention", kernels[:1], kernels[1:], saved, (result, statistics))


def scores(core: Attention, load: Workload, inputs: Sequence[Any], result: Any) -> Op:
    """Without flash attention: all scores q·kᵀ, one kernel for scale, mask and softmax, another for dropout."""
    w, drop, heads = load.width, load.software.dropout, core.heads // load.tp
    each = load.batch * heads
    count = load.tokens * load.seq * heads
    seen = w * (1 + drop) + drop  # softmax output, and under dropout its output and mask
    up, down = (
        gemm(load.seq // load.cp, core.qk_dim, load.seq, each),
        gemm(load.seq // load.cp, load.seq, core.v_dim, each),
    )
    forward = (up, down, *passes(2 * w * count), *passes(*[(2 * w + 1) * count] * drop), *launched(load, 1))
    backward = (up, up, down, down, *passes(3 * w * count), *passes(*[(2 * w + 1) * count] * drop), *launched(load, 3))
    saved = (*inputs, seen * count, result)
    return Op(
        "attention",
        "attention",
        forward,
        backward,
        saved,
        saved_selective=(w * count, result),
        core_attention=seen * count,
    )


def mlp(load: Workload, width: Any, tokens: Any, count: Any = 1, rows: Any = None) -> list[Op]:
    """`count` MLPs (one, or this rank's experts) over `tokens` each; their GEMMs are padded to `rows`."""
    h, w = load.model.hidden, load.width
    rows = tokens if rows is None else rows
    each = w * tokens * width
    wide = each * count
    gated, bias = load.model.mlp == "swiglu", load.model.bias
    up, apart = (2 if gated else 1), (1 if load.software.fused else 2)
    cast = passes(*[6.0 * h * width * count] * load.cast_weights)
    forward = (gemm(rows, h, up * width, count), *up * cast)
    sums = launched(load, 3 if bias else 1)
    backward = (gemm(rows, up * width, h, count), gemm(up * width, rows, h, count), *up * cast, *sums)
    there = np.where(load.epilogue_fusion, 1, (up + 1) * apart)[()] * wide
    back = np.where(load.epilogue_fusion, 1, (2 * up + 1) * apart)[()] * wide
    last = (
        (gemm(rows, width, h, count), *cast),
        (gemm(rows, h, width, count), gemm(h, rows, width, count), *cast, *sums),
    )
    more = summed(load, up * tokens * width * count, bias), summed(load, tokens * h * count, bias)
    saved_selective = (each,) * (1 if load.software.saves_alternate_gemms else up)
    saved = (each,) * (up + (not load.rematerialized))
    return [
        Op("up", "matmul", forward, backward + more[0], saved_selective=saved_selective, copies=count),
        Op(load.model.mlp, "activation", passes(there), passes(back), saved=saved, copies=count),
        # The backward pass does not need the last GEMM's output: a compiler does not save it.
        Op(
            "down",
            "matmul",
            last[0],
            last[1] + more[1],
            saved_selective=() if load.software.fused else (w * tokens * h,),
            copies=count,
        ),
    ]


def experts(layer: Experts, load: Workload) -> list[Op]:
    """Token dispatch sorted by expert, each rank's experts, combine.

    Rows are sorted before and after the all-to-all, in both directions. Time is that of the most loaded rank; saved
    bytes are counted as evenly spread.
    """
    w, t = load.width, load.tokens
    load = load.routed
    slots, mine = t * layer.top_k, layer.count // load.ep
    each = np.maximum(1, slots // mine)
    moved = w * slots * layer.hidden
    route = product("router", load, layer.hidden, layer.count)
    scores = Op("routing", "experts", *(tuple(ROUTING * passes(8 * t * layer.count)),) * 2)
    sorts = passes(*[2 * moved * np.where(load.ep > 1, 2, 1)] * 2)
    move = Op("dispatch", "experts", sorts, sorts, saved=(moved,))
    rows = padded(each * fullest(slots, load.ep))
    return without_fp8(load, [route, scores, move, *mlp(load, layer.ffn // load.tp, each, mine, rows)])


def block(load: Workload) -> list[Op]:
    ops: list[Op] = []
    for _, neighbours in itertools.groupby(components.block(load.model), computed_together):
        together: list[Any] = list(neighbours)
        match together[0]:
            case Linear():
                ops.append(projections(together, load))
            case Norm(total=0) as layer:
                ops.append(norm(layer.label, load.routed if components.feeds_router(load.model, layer) else load))
            case Norm():
                ops.append(head_norms(together, load))
            case Rotary():
                ops.append(rotary(together, load))
            case Copy() as layer:
                ops.append(eager.copied(layer, load))
            case Attention() as core:
                ops.append(attention(core, load))
            case MLP() as layer:
                ops += mlp(load, layer.width // load.tp, load.tokens)
            case Experts() as layer:
                ops += experts(layer, load)
            case Residual() as add:
                ops.append(residual(add.label, load, add.inner))
            case Sinks():
                pass  # part of attention's own kernels
            case other:
                raise AssertionError(f"no cost rule for {other}")
    return ops


def computed_together(component: components.Component) -> tuple[Any, ...]:
    """The same for neighbours that one fused kernel computes: projections of one input, head norms, rotary."""
    return type(component), getattr(component, "reads", None), getattr(component, "total", 0) > 0


def loss(load: Workload) -> list[Op]:
    """Unchunked logits; plain code also holds them in fp32, as log-softmax and as gradient."""
    logits, w = load.tokens * load.vocab, load.width
    plain = load.software.loss == "plain"
    there, back = (
        # a cast; log-softmax, which reads twice; the gradient and the cast back
        ((w + 4) * logits, 12 * logits) if plain else (w * logits, w * logits),
        (12 * logits, (w + 4) * logits) if plain else (w * logits,),
    )
    softmax = Op("cross-entropy", "loss", passes(*there), passes(*back), saved=(w * logits, 4 * plain * logits))
    return [norm("final norm", load), product("head", load, load.model.hidden, load.vocab, "loss"), softmax]
