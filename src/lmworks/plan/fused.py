"""The op list of code that fuses: Megatron with Transformer Engine, torchtitan, FSDP over MPT, our own blocks compiled.

The same lists as `network`, with what sits between two products in one kernel: one pass reads its inputs and writes its
result. Kept for the backward pass (Korthikanti et al. 2022, with flash attention instead of scores where there is one):
the stream before each norm, the input of every product, q, k, v and attention's result, and dropout's masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .expert_load import fullest, padded
from .flops import keys_per_query
from .ops import Kernel, Op, Workload, gemm, in_16_bits

# Small passes over every token's scores, each way: logits in fp32, softmax, the largest, their sum and weights, who
# goes where as a mask, counts by expert and by rank, sums of these, a sort, and the loss that balances.
ROUTING = 12


def passes(*sizes: Any) -> tuple[Kernel, ...]:
    """One pass each, over so many bytes."""
    return tuple(Kernel("stream", bytes=1.0 * size) for size in sizes)


def launched(load: Workload, count: int) -> tuple[Kernel, ...]:
    """Launches of code that fuses nothing, of which the host has the work: small sums, and gradients added to others.

    What they move is counted with the passes that they belong to.
    """
    return () if load.software.fused else (Kernel("stream", count=count),)


def summed(load: Workload, numbers: Any, bias: bool) -> tuple[Kernel, ...]:
    """The gradient of a bias, where a pass of its own adds up that of the product."""
    return passes(load.width * numbers) if load.software.sums and bias else ()


def product(
    name: str,
    load: Workload,
    inputs: Any,
    outputs: Any,
    part: str = "matmul",
    dear: Sequence[Any] | None = None,
    bias: bool = False,
) -> Op:
    """Weights arrive in the compute precision, or are cast with the layer where the code does so (autocast).

    `dear` are the widths of the outputs that selective recompute keeps, where that is not all of them in one tensor.
    """
    t = load.tokens
    # The weight's gradient is added to the last one; a bias has a sum over tokens, and the same.
    sums = launched(load, 3 if load.model.bias else 1)
    cast = passes(6.0 * inputs * outputs) if load.cast_weights else ()
    forward = (gemm(t, inputs, outputs), *cast)
    backward = (gemm(t, outputs, inputs), gemm(outputs, t, inputs), *cast, *sums, *summed(load, t * outputs, bias))
    kept = tuple(load.width * t * width for width in ((outputs,) if dear is None else dear))
    return Op(name, part, forward, backward, dear=kept)


def stem(load: Workload) -> list[Op]:
    x, table = load.outside * load.model.hidden * load.software.stream, load.vocab * load.model.hidden
    mask = load.outside * load.model.hidden * load.software.dropout
    return [Op("embedding", "embedding", passes(2 * x + mask), passes(4 * table, 2 * x), saved=(x, mask))]


def norm(name: str, load: Workload) -> Op:
    """Its result is kept as the next product's input; its own input is kept by whoever made it."""
    x = load.outside * load.model.hidden
    s, w = load.software.stream, load.width
    statistics = [4 * load.outside] * (2 if load.model.norm == "layer" else 1)
    results = [] if load.made_again else [w * x]
    sums = launched(load, 4 if load.model.norm == "layer" else 2)  # each of its weights: a sum, added to the last
    return Op(name, "norms", passes((s + w) * x), (*passes((2 * s + w) * x), *sums), saved=(*results, *statistics))


def residual(name: str, load: Workload, inner: bool = False) -> Op:
    """Sum, and dropout before it with one byte a number for its mask.

    Of an `inner` sum a compiler keeps what was added, where that has fewer bytes, and adds again.
    """
    x, s = load.outside * load.model.hidden, load.software.stream
    mask = x * load.software.dropout
    kept = min(s, load.width) if inner and load.software.fused else s
    moved = np.where(load.joined & (not inner), s, 2 * s + load.width)[()]
    return Op(name, "residual", passes(moved * x + mask), passes(2 * s * x + mask), saved=(kept * x, mask))


def attention(load: Workload) -> list[Op]:
    m, t, w = load.model, load.tokens, load.width
    result, both = w * t * load.q_width, w * t * (load.q_width + load.kv_width)
    wide = [load.q_width, load.kv_width, load.kv_width]
    held = [w * t * width for width in wide]
    dear = wide[:-1] if load.software.every_second else wide
    ops = [product("query, key, value", load, m.hidden, sum(wide), dear=dear, bias=m.qkv_bias)]
    if m.positions == "rope":
        turns = 1 if load.software.fused else 3  # two halves, their product with tables in fp32, and back
        ops.append(Op("rotary", "rotary", passes(2 * turns * both), passes(2 * turns * both)))
    if m.qk_norm:
        ops.append(Op("head norms", "norms", passes(2 * both), passes(3 * both), saved=tuple(held[:2])))
    # Where keys travel between ranks, q and k are held as they came and as they were turned.
    inputs = [*held, *(size * np.greater(load.cp, 1) for size in held[:2])]
    if load.software.attention == "scores":
        return [*ops, scores(load, inputs, result)]
    shape = (load.seq, m.head_dim)
    flops = 4.0 * t * load.q_width * keys_per_query(load.seq, m.sliding_window)
    kernels = (
        Kernel("attention", flops=flops, shape=shape),
        Kernel("attention_backward", flops=2.5 * flops, shape=shape),
    )
    statistics = 4 * t * load.heads
    saved = (*inputs, result, statistics)
    return [*ops, Op("attention", "attention", kernels[:1], kernels[1:], saved, (result, statistics))]


def scores(load: Workload, inputs: Sequence[Any], result: Any) -> Op:
    """Before flash attention: q·kᵀ whole, scaled, masked and turned into weights in one pass, dropout in another."""
    m, w, drop = load.model, load.width, load.software.dropout
    each = load.batch * load.heads
    count = load.tokens * load.seq * load.heads
    seen = w * (1 + drop) + drop  # weights, and under dropout what is left of them and its mask
    up, down = (
        gemm(load.seq // load.cp, m.head_dim, load.seq, each),
        gemm(load.seq // load.cp, load.seq, m.head_dim, each),
    )
    forward = (up, down, *passes(2 * w * count), *passes(*[(2 * w + 1) * count] * drop), *launched(load, 1))
    backward = (up, up, down, down, *passes(3 * w * count), *passes(*[(2 * w + 1) * count] * drop), *launched(load, 3))
    saved = (*inputs, seen * count, result)
    return Op("attention", "attention", forward, backward, saved, dear=(w * count, result), inside=seen * count)


def mlp(load: Workload, width: Any, tokens: Any, count: Any = 1, rows: Any = None) -> list[Op]:
    """`count` of them, each over so many tokens: one, or this rank's experts. Their products pay for `rows`."""
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
    there, back = (np.where(load.joined, 1, moved * apart)[()] * wide for moved in (up + 1, 2 * up + 1))
    last = (
        (gemm(rows, width, h, count), *cast),
        (gemm(rows, h, width, count), gemm(h, rows, width, count), *cast, *sums),
    )
    more = summed(load, up * tokens * width * count, bias), summed(load, tokens * h * count, bias)
    dear = (each,) * (1 if load.software.every_second else up)
    saved = (each,) * (up + (not load.made_again))
    return [
        Op("up", "matmul", forward, backward + more[0], dear=dear, copies=count),
        Op(load.model.mlp, "activation", passes(there), passes(back), saved=saved, copies=count),
        # Nothing in the backward pass asks for the last product: a compiler does not keep it.
        Op(
            "down",
            "matmul",
            last[0],
            last[1] + more[1],
            dear=() if load.software.fused else (w * tokens * h,),
            copies=count,
        ),
    ]


def experts(load: Workload) -> list[Op]:
    """Rows sorted by expert, each rank's experts over what comes to them, rows back.

    They are sorted before they travel to another rank and again after, and so on their way back. The pace is that of
    the fullest rank; what is kept is counted as evenly spread.
    """
    m, w, t = load.model, load.width, load.tokens
    shared = mlp(load, m.shared_experts * m.expert_ffn // load.tp, t) if m.shared_experts else []
    load = load.routed
    slots, mine = t * m.top_k, m.experts // load.ep
    each = np.maximum(1, slots // mine)
    moved = w * slots * m.hidden
    route = product("router", load, m.hidden, m.experts)
    scores = Op("routing", "experts", *(tuple(ROUTING * passes(8 * t * m.experts)),) * 2)
    sorts = passes(*[2 * moved * np.where(load.ep > 1, 2, 1)] * 2)
    move = Op("dispatch", "experts", sorts, sorts, saved=(moved,))
    rows = padded(each * fullest(slots, load.ep))
    ops = [route, scores, move, *mlp(load, m.expert_ffn // load.tp, each, mine, rows)]
    return in_16_bits(load, ops) + shared


def block(load: Workload) -> list[Op]:
    m = load.model
    dear = () if load.software.every_second else None
    out = product("attention out", load, load.q_width, m.hidden, dear=dear, bias=m.bias)
    first = [norm("attention norm", load), *attention(load), out, residual("attention residual", load, inner=True)]
    second = experts(load) if m.experts else mlp(load, m.ffn // load.tp, load.tokens)
    return [*first, norm("mlp norm", load.routed), *second, residual("mlp residual", load)]


def loss(load: Workload) -> list[Op]:
    """Logits whole: plain code also has them in fp32, as their logarithms and as their gradient."""
    logits, w = load.tokens * load.vocab, load.width
    plain = load.software.loss == "plain"
    there, back = (
        # a cast; logarithms of their softmax, which read it twice; their gradient and the cast back
        ((w + 4) * logits, 12 * logits) if plain else (w * logits, w * logits),
        (12 * logits, (w + 4) * logits) if plain else (w * logits,),
    )
    softmax = Op("cross-entropy", "loss", passes(*there), passes(*back), saved=(w * logits, 4 * plain * logits))
    return [norm("final norm", load), product("head", load, load.model.hidden, load.vocab, "loss"), softmax]
