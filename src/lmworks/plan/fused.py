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
from ..spec.components import MLP, Attention, Copy, Entry, Experts, Linear, Norm, Residual, Rotary, SharedGate, Sinks
from . import eager
from .adapters import Layer, weight_readers, with_frozen_weights
from .flops import mean_keys_per_query
from .ops import GEMM_ONLY, Kernel, Op, Workload, fullest, gemm, head_gemm, padded, weight_gradient, without_fp8

# Passes over the router's scores in each direction: logits in fp32, softmax, top-k, their sum and weights, the dispatch
# mask, counts by expert and by rank, their sums, a sort, and the balance loss. Counted from this list, not measured.
ROUTING = 12


def gradient_sums(load: Workload, outputs: Any, bias: bool) -> tuple[Kernel, ...]:
    """Of a linear layer, beside the two GEMMs of its backward pass; `outputs`: how many numbers it made.

    Unfused code launches the weight gradient's accumulation, and for a bias a sum over tokens and an accumulation:
    small kernels that cost the host only. Compiled code may sum the gradient of a bias in a kernel of its own.
    """
    launches = () if load.software.fused else (Kernel("stream", count=3 if load.model.qkv_bias else 1),)
    over_tokens = Kernel("stream", bytes=load.width * outputs)
    return (*launches, over_tokens) if bias and load.software.bias_grad_pass else launches


def product(
    name: str,
    load: Workload,
    inputs: Any,
    outputs: Any,
    part: str = "matmul",
    saved_selective: Sequence[Any] | None = None,
    bias: bool = False,
    input_from_kernel: bool = False,
) -> Op:
    """Weights arrive in the compute precision, or are cast with the layer where the code does so (autocast).

    `saved_selective`: bytes of the outputs that selective recompute saves, by default all in one tensor.
    """
    t = load.tokens
    cast = (Kernel("stream", bytes=6.0 * inputs * outputs),) * load.cast_weights
    forward = (gemm(t, inputs, outputs), *cast)
    sums = gradient_sums(load, t * outputs, bias)
    backward = (gemm(t, outputs, inputs), weight_gradient(outputs, t, inputs), *cast, *sums)
    kept = (load.width * t * outputs,) if saved_selective is None else tuple(saved_selective)
    return Op(name, part, forward, backward, saved_selective=kept, input_from_kernel=input_from_kernel)


def stem(load: Workload) -> list[Op]:
    x, table = load.sp_tokens * load.model.hidden * load.software.stream, load.vocab * load.model.hidden
    mask = load.sp_tokens * load.model.hidden * load.software.dropout
    forward = Kernel("stream", bytes=2 * x + mask)
    backward = () if load.frozen else (Kernel("stream", bytes=4 * table), Kernel("stream", bytes=2 * x))
    return [Op("embedding", "embedding", (forward,), backward, saved=(x, mask))]


def norm(name: str, load: Workload, kept: bool = True) -> Op:
    """Its output is saved as the next GEMM's input, if that keeps it; its input is saved by the op that made it."""
    x = load.sp_tokens * load.model.hidden
    s, w = load.software.stream, load.width
    statistics = [4 * load.sp_tokens] * (2 if load.model.norm == "layer" else 1)
    result = load.saved_width * x * (kept and not load.rematerialized)
    forward, backward = Kernel("stream", bytes=(s + w) * x), Kernel("stream", bytes=(2 * s + w) * x)
    # Launches of unfused code alone: each of its weights has a sum, which is added to the last.
    alone = not (load.software.fused or load.frozen)
    sums = (Kernel("stream", count=4 if load.model.norm == "layer" else 2),) if alone else ()
    return Op(name, "norms", (forward,), (backward, *sums), saved=(result, *statistics), for_weights=result)


def residual(layer: Residual, load: Workload) -> Op:
    """Residual add, and dropout before it with a mask of one byte per element.

    A compiler saves the addend of an `inner` add, where that has fewer bytes, and adds again.
    """
    x, s = load.sp_tokens * load.model.hidden, load.software.stream
    mask = x * load.software.dropout
    kept = (min(s, load.width) if layer.inner and load.software.fused else s) * layer.feeds_norm
    moved = np.where(load.epilogue_fusion & (not layer.inner), s, 2 * s + load.width)[()]
    forward, backward = Kernel("stream", bytes=moved * x + mask), Kernel("stream", bytes=2 * s * x + mask)
    return Op(layer.label, "residual", (forward,), (backward,), saved=(kept * x, mask))


def projections(layers: Sequence[Linear], load: Workload) -> Op:
    """Layers that read the same input are one product; selective recompute saves their outputs."""
    first, outputs, labels, kept, alone = layers[0], 0, list[str](), list[Any](), list[Layer]()
    inputs = first.inputs // load.tp if first.shard == "row" else first.inputs
    for layer in layers:
        width = layer.outputs if layer.shard == "row" else load.local(layer.outputs, layer.shard)
        outputs = outputs + width
        labels.append(layer.label)
        kept.append(load.width * load.tokens * width)
        alone.append(Layer(layer.name, inputs, width))
    if load.software.saves_alternate_gemms:
        kept.pop()
    after_norm = first.shard != "row"  # else after attention
    name = ", ".join(labels)
    found = product(name, load, inputs, outputs, saved_selective=kept, bias=first.bias, input_from_kernel=after_norm)
    return with_frozen_weights(found, load, alone)


def rotary(layers: Sequence[Rotary], load: Workload) -> Op:
    moved = load.width * load.tokens * sum(load.local(layer.width, layer.shard) for layer in layers)
    turns = 1 if load.software.fused else 3  # unfused: two halves, their product with fp32 tables, and back
    kernel = Kernel("stream", bytes=2 * turns * moved)
    return Op("rotary", "rotary", (kernel,), (kernel,))


def head_norms(layers: Sequence[Norm], load: Workload) -> Op:
    """Saved: their inputs, and their outputs where a linear layer reads them."""
    sizes = [load.width * load.tokens * load.local(layer.total, layer.shard) for layer in layers]
    outputs = [
        size
        for layer, size in zip(layers, sizes, strict=True)
        if eager.readers(layer, load)[1] and not load.rematerialized
    ]
    inputs = [
        load.width * load.tokens * layer.source if layer.source else size
        for layer, size in zip(layers, sizes, strict=True)
    ]
    forward, backward = Kernel("stream", bytes=2 * sum(sizes)), Kernel("stream", bytes=3 * sum(sizes))
    return Op("head norms", "norms", (forward,), (backward,), saved=(*inputs, *outputs), for_weights=sum(outputs))


def attention(core: Attention, load: Workload) -> Op:
    t, w = load.tokens, load.width
    heads, kv_heads, several = core.heads // load.tp, load.local(core.kv_heads, "kv_heads"), np.greater(load.cp, 1)
    q, k = w * t * heads * core.qk_dim, w * t * kv_heads * core.qk_dim
    v, result = w * t * kv_heads * core.v_dim, w * t * heads * core.v_dim
    inputs = [q, k, v, q * several, k * several]  # with context parallelism also before the rotary embedding
    if load.software.attention == "scores":
        return scores(core, load, inputs, result)
    shape = (load.seq, core.qk_dim)
    flops = 1.0 * t * (core.flops_per_key // load.tp) * mean_keys_per_query(core, load.seq)
    around = eager.ring_passes(core, load)
    forward = (Kernel("attention", flops=flops, shape=shape), *around[0])
    backward = (Kernel("attention_backward", flops=2.5 * flops, shape=shape), *around[1])
    statistics = 4 * t * heads
    # The product that follows keeps its own copy in fp8.
    copy = result / w * (load.saved_width < w and weight_readers(load, "attention", 1) > 0)
    saved = (*inputs, result, statistics, copy)
    return Op("attention", "attention", forward, backward, saved, (result, statistics))


def scores(core: Attention, load: Workload, inputs: Sequence[Any], result: Any) -> Op:
    """Without flash attention: all scores q·kᵀ, one kernel for scale, mask and softmax, another for dropout."""
    w, drop, heads = load.width, load.software.dropout, core.heads // load.tp
    each = load.batch * heads
    count = load.tokens * load.seq * heads
    seen = w * (1 + drop) + drop  # softmax output, and under dropout its output and mask
    up, down = (
        head_gemm(load.seq // load.cp, core.qk_dim, load.seq, each),
        head_gemm(load.seq // load.cp, load.seq, core.v_dim, each),
    )
    dropout = (Kernel("stream", bytes=(2 * w + 1) * count),) * drop
    forward: tuple[Kernel, ...] = (up, down, Kernel("stream", bytes=2 * w * count), *dropout)
    backward: tuple[Kernel, ...] = (up, up, down, down, Kernel("stream", bytes=3 * w * count), *dropout)
    if not load.software.fused:  # small ones that cost the host only
        forward, backward = (*forward, Kernel("stream", count=1)), (*backward, Kernel("stream", count=3))
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


def mlp(load: Workload, layer: MLP) -> list[Op]:
    width = layer.width // load.tp
    up, middle, down = mlps(load, width, load.tokens, read=weight_readers(load, layer.name, 1) > 0)
    return [
        with_frozen_weights(up, load, [Layer(one.name, one.inputs, width) for one in layer.up]),
        middle,
        with_frozen_weights(down, load, [Layer(layer.down.name, width, layer.down.outputs)]),
    ]


def mlps(
    load: Workload,
    width: Any,
    tokens: Any,
    count: Any = 1,
    rows: Any = None,
    routed: bool = False,
    read: bool = True,
) -> list[Op]:
    """`count` MLPs (one, or this rank's experts) over `tokens` each; their GEMMs are padded to `rows`. `read`: the last
    keeps its input.

    Under fp8 the activation of experts writes 16 bits, unless it is fused with their products.
    """
    casts_apart = routed and not load.software.fused_experts
    h, w = load.model.hidden, load.width
    rows = tokens if rows is None else rows
    each = w * tokens * width
    wide = each * count
    gated, bias = load.model.gated_mlp, load.model.mlp_bias
    up, apart = (2 if gated else 1), (1 if load.software.fused else 2)
    cast = (Kernel("stream", bytes=6.0 * h * width * count),) * load.cast_weights
    forward = (gemm(rows, h, up * width, count), *up * cast)
    sums = gradient_sums(load, up * tokens * width * count, bias)
    backward = (gemm(rows, up * width, h, count), weight_gradient(up * width, rows, h, count), *up * cast, *sums)
    there = Kernel("stream", bytes=np.where(load.epilogue_fusion, 1, (up + 1) * apart)[()] * wide)
    back = Kernel("stream", bytes=np.where(load.epilogue_fusion, 1, (2 * up + 1) * apart)[()] * wide)
    sums = gradient_sums(load, tokens * h * count, bias)
    last = (
        (gemm(rows, width, h, count), *cast),
        (gemm(rows, h, width, count), weight_gradient(h, rows, width, count), *cast, *sums),
    )
    saved_selective = (each,) * (1 if load.software.saves_alternate_gemms else up)
    activated = load.saved_width * tokens * width * (read and not load.rematerialized)
    saved = (*(each,) * up, activated)
    return [
        Op(
            "up",
            "matmul",
            forward,
            backward,
            saved_selective=saved_selective,
            copies=count,
            input_from_kernel=not routed,
            gradient_from_kernel=not casts_apart,
        ),
        Op(load.model.mlp, "activation", (there,), (back,), saved=saved, copies=count, for_weights=activated),
        # The backward pass does not need the last GEMM's output: a compiler does not save it.
        Op(
            "down",
            "matmul",
            last[0],
            last[1],
            saved_selective=() if load.software.fused else (w * tokens * h,),
            copies=count,
            input_from_kernel=not casts_apart,
        ),
    ]


def experts(layer: Experts, load: Workload) -> list[Op]:
    """Token dispatch sorted by expert, each rank's experts, combine.

    Rows are sorted before and after the all-to-all, in both directions; where a token travels once, only behind it.
    Time is that of the most loaded rank; saved bytes are counted as evenly spread.
    """
    w, t = load.width, load.routed_tokens
    load = load.routed
    slots, mine = t * layer.top_k, layer.count // load.ep
    each = np.maximum(1, slots // mine)
    moved = w * slots * layer.hidden
    route = with_frozen_weights(product("router", load, layer.hidden, layer.count), load)
    scored = ROUTING * (Kernel("stream", bytes=8 * t * layer.count),)
    scores = Op("routing", "experts", scored, scored)
    twice = np.greater(load.ep, 1) & (not load.software.dispatch_once)
    sorts: tuple[Kernel, ...] = 2 * (Kernel("stream", bytes=2 * moved * np.where(twice, 2, 1)),)
    if load.dtype in GEMM_ONLY and load.software.fused_casts and not load.software.dispatch_once:
        sorts += 2 * (Kernel("stream", bytes=2 * moved),)  # rows of each expert, copied to a multiple of 16 and back
    # Our trainer weighs results behind the products and saves them; others weigh what the down product reads.
    results = (moved,) if load.grouped_experts else ()
    kept = moved * load.saved_width // w * (not load.frozen)  # what experts multiply
    move = Op("dispatch", "experts", sorts, sorts, saved=(kept, *results))
    rows = padded(each * fullest(slots, load.ep))
    biases = [expert_biases(slots * layer.hidden, mine)] if load.software.adds_expert_biases else []
    up, middle, down = mlps(load, layer.ffn // load.expert_tp, each, mine, rows, routed=True, read=not load.frozen)
    products = [with_frozen_weights(up, load), middle, with_frozen_weights(down, load)]
    return without_fp8(load, [route, scores, move, *biases, *products])


def expert_biases(results: Any, count: Any) -> Op:
    """output + bias · weight of each expert in fp32, joined and cast; backward both factors' gradients, and the
    output's. `results`: numbers that the experts make."""
    each = results / count
    forward = (Kernel("stream", bytes=4 * each, count=count), Kernel("stream", bytes=10 * each, count=count))
    joined = Kernel("stream", bytes=8 * results), Kernel("stream", bytes=6 * results)
    cast = Kernel("stream", bytes=6 * each, count=count)
    factor = Kernel("stream", bytes=8 * each, count=count), Kernel("stream", bytes=4 * each, count=count)
    backward = (Kernel("stream", bytes=6 * results), cast, *factor, *factor, Kernel("stream", bytes=4 * results))
    return Op("expert biases", "experts", (*forward, *joined), backward)


def block(load: Workload) -> list[Op]:
    ops: list[Op] = []
    for _, neighbours in itertools.groupby(components.block(load.model), computed_together):
        together: list[Any] = list(neighbours)
        match together[0]:
            case Linear():
                ops.append(projections(together, load))
            case Norm(of_branch=True) as layer:
                ops.append(eager.branch_norm(layer, load))
            case Entry() as layer:
                ops.append(eager.entry(layer, load))
            case Norm(total=0) as layer:
                entered = load.routed if layer.feeds_router else load
                ops.append(norm(layer.label, entered, eager.readers(layer, load)[1] > 0))
            case Norm():
                ops.append(head_norms(together, load))
            case Rotary():
                ops.append(rotary(together, load))
            case Copy() as layer:
                ops.append(eager.copied(layer, load))
            case Attention() as core:
                ops.append(attention(core, load))
            case MLP() as layer:
                ops += mlp(load, layer)
            case Experts() as layer:
                ops += experts(layer, load)
            case Residual() as add:
                ops.append(residual(add, load))
            case SharedGate() as layer:
                ops += eager.shared_gate(layer, load)
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
    once = Kernel("stream", bytes=w * logits)
    forward: tuple[Kernel, ...] = (once, once)
    backward: tuple[Kernel, ...] = (once,)
    if plain:  # a cast; log-softmax, which reads twice; the gradient and the cast back
        cast, wide = Kernel("stream", bytes=(w + 4) * logits), Kernel("stream", bytes=12 * logits)
        forward, backward = (cast, wide), (wide, cast)
    softmax = Op("cross-entropy", "loss", forward, backward, saved=(w * logits, 4 * plain * logits))
    head = with_frozen_weights(product("head", load, load.model.hidden, load.vocab, "loss"), load)
    return [norm("final norm", load, not load.frozen), head, softmax]
