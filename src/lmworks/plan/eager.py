"""Cost rules of eager code: the op list of `model/gpt.py` and the chunked loss as PyTorch runs them line by line.

One rule for each kind of component (`spec/components.py`): the kernels it launches, and what autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_never

import numpy as np

from ..spec import components
from ..spec.components import MLP, Attention, Copy, Entry, Experts, Linear, Norm, Residual, Rotary, SharedGate, Sinks
from .adapters import Layer, weight_readers, with_frozen_weights
from .case import Number
from .flops import mean_keys_per_query
from .ops import Kernel, Op, Workload, gemm, stream, weight_gradient, without_fp8
from .passes import DIVERGENCE, LOGPROBS, SCALAR, STATES

COMPARISON_PASSES = 24  # numbers read or written for each logit where distributions are compared, beside exponentials

# As in kernels/training/cross_entropy_triton.py: logits that a program holds in registers, and the shortest
# row for which it does.
LOGITS_IN_REGISTERS, MIN_LONG_ROW = 13 * 4096, 2**14


def embedding(load: Workload) -> list[Op]:
    m, t, h, vocab = load.model, load.sp_tokens, load.model.hidden, load.vocab
    # Backward scatters into a dense gradient of the table; a tied head's gradient is added to it.
    x, table = t * h * load.stream / 4, vocab * h * load.software.gradients / 4  # in units of 4 bytes
    back = [stream(table), stream(3 * x)] + ([stream(3 * table)] if m.tie_embeddings else [])
    if load.frozen:
        back = []
    ops = [Op("token embedding", "embedding", (stream(2 * x),), tuple(back), saved=(4 * x,))]
    if m.positions == "learned":  # the sum replaces the look-up as the stream's first tensor; positions are int64
        indices = 8 * load.seq * (load.batch if load.documents else 1) * (not load.frozen)
        there, back = stream(3 * x), [] if load.frozen else [stream(2 * x)]
        ops.append(Op("position embedding", "embedding", (there,), tuple(back), indices=indices))
    if m.positions == "rope":  # cos and sin of every position, twice a head's half; shared by all layers
        table = load.seq * (load.batch if load.documents else 1) * m.rotary_width
        kinds = 2 if m.rope_local_theta else 1
        made = stream(2 * table, kind="exp", count=2 * kinds)
        ops.append(Op("rotary tables", "embedding", (made,), saved=(4 * table,) * 2 * kinds))
    return ops + mask(load)


def mask(load: Workload) -> list[Op]:
    """The attention mask, made once per pass where attention is not plainly causal.

    Autograd saves it only where the kernel takes this very tensor; under recompute the blocks save it.
    """
    m = load.model
    size = load.seq**2 * (load.batch if load.documents else 1)
    if m.layer_types and (load.documents or m.positions == "alibi"):
        size = 2 * size  # one for each kind of layers
    if load.backend == "reference" or load.device == "cuda":  # made anew in every layer, or block-sparse and small
        return []
    if m.positions == "alibi":  # one fp32 bias a head
        bias = 4 * m.heads * size
        kept = bias if load.attention == "fused" and not load.is_16_bit else 0
        return [Op("mask", "attention", (stream(bias),), saved=(kept,), saved_selective=(bias - kept,))]
    if m.sliding_window or load.documents:
        return [Op("mask", "attention", (stream(size),), saved_selective=(size,))]
    return []


# --- blocks -----------------------------------------------------------------------------------------------


def mean_block(load: Workload, block: Callable[[Workload], list[Op]]) -> list[Op]:
    """Of layers with experts beside layers without: attention, and as much of each MLP as it has layers."""
    kinds = load.model.kinds
    if len(kinds) == 1:
        return block(load)
    found: list[Op] = []
    for kind, count in kinds:
        ops = block(replace(load, model=kind))
        middle = [op.name for op in ops].index("mlp norm")
        found = found or ops[:middle]
        found += [of_some_layers(op, count / load.model.layers) for op in ops[middle:]]
    return found


def of_some_layers(op: Op, share: float) -> Op:
    """An op that this share of the layers has, as a part of the mean layer."""
    forward, backward = (
        tuple(replace(kernel, count=kernel.count * share) for kernel in way) for way in (op.forward, op.backward)
    )
    scaled = replace(op, forward=forward, backward=backward, copies=op.copies * share)
    return replace(scaled, indices=op.indices * share, core_attention=op.core_attention * share)


def block(load: Workload) -> list[Op]:
    ops: list[Op] = []
    for component in components.block(load.model):
        match component:
            case Linear():
                ops.append(linear(component, load))
            case Norm(of_branch=True):
                ops.append(branch_norm(component, load))
            case Entry():
                ops.append(entry(component, load))
            case Norm(total=0):
                entered = load.routed if component.feeds_router else load
                ops.append(norm(component.label, entered, *readers(component, load)))
            case Norm():
                ops.append(head_norm(component, load))
            case Rotary():
                ops.append(rotary(component, load))
            case Copy():
                ops.append(copied(component, load))
            case Attention():
                ops.append(attention(component, load))
            case MLP():
                ops += mlp(component, load)
            case Experts():
                ops += experts(component, load)
            case Residual():
                ops.append(residual(component, load))
            case SharedGate():
                ops += shared_gate(component, load)
            case Sinks():
                pass  # part of attention's own kernels
            case _:
                assert_never(component)
    return ops


def linear(layer: Linear, load: Workload) -> Op:
    """A layer of a tensor-parallel rank."""
    inputs, outputs = layer.inputs, load.local(layer.outputs, layer.shard)
    if layer.shard == "row":
        inputs, outputs = layer.inputs // load.tp, layer.outputs
    whole = product(layer.label, load, inputs, outputs, layer.bias)
    return with_frozen_weights(whole, load, [Layer(layer.name, inputs, outputs)])


def product(name: str, load: Workload, inputs: Any, outputs: Any, bias: bool = False) -> Op:
    """y = x·Wᵀ; backward: grad·W, gradᵀ·x, and a sum over tokens for the bias. Saved under selective recompute only."""
    t, w = load.tokens, load.width
    backward = [gemm(t, outputs, inputs), weight_gradient(outputs, t, inputs)]
    if bias:
        backward.append(Kernel("strided" if load.device == "cuda" else "stream", bytes=t * outputs * w))
    forward = [gemm(t, inputs, outputs)]
    if load.cast_weights:  # once a micro-batch, and its gradient back
        forward.append(Kernel("stream", bytes=6.0 * inputs * outputs))
        backward.append(Kernel("widen", bytes=6.0 * inputs * outputs))
    return Op(name, "matmul", tuple(forward), tuple(backward), saved_selective=(t * outputs * w,))


def normalise(load: Workload, x: Number) -> tuple[list[Kernel], list[Kernel]]:
    """Kernels of a norm over x elements: one each way, but for RMSNorm on a CPU, made of small ops.

    On a GPU the weight gradient is a kernel of its own, which reads both inputs again; on a CPU a product and a sum.
    """
    x = x * load.stream / 4
    trained = not load.frozen
    if load.device == "cuda":
        return [stream(2 * x)], [stream(3 * x)] + [stream(2 * x)] * trained
    if load.model.norm == "layer":
        return [stream(2 * x)], [stream(3 * x)]
    back = [stream(3 * x, count=1 + trained), stream(2 * x, count=4), stream(x, count=1 + trained)]
    return [stream(2 * x, count=3), stream(x)], back


def readers(source: Norm | Entry, load: Workload) -> tuple[int, int]:
    """Products that read the output of a norm, and those of them that save it."""
    count = components.readers(load.model, source)
    return count, weight_readers(load, source.name, count)


def norm(name: str, load: Workload, readers: int, saving: int) -> Op:
    """Normalise the residual stream for `readers` linear layers, of which `saving` save it.

    Saved: the output once (fp32), or one cast of it for each that saves it; 1/σ, and LayerNorm's mean. Its input is
    saved by the op that made it.
    """
    t, x, results = load.sp_tokens, load.sp_tokens * load.model.hidden, entered_tensors(load, saving)
    figure = load.stream if load.device == "cpu" else 4  # 1/σ, or a mean; those of our RMSNorm are always fp32
    saved = [*results, *([t * figure] * 2 if load.model.norm == "layer" else [4 * t])]
    if load.model.norm == "layer" and load.software.fp32_head and load.stream == 2 and not readers:
        saved.append(6 * x)  # before the loss nothing fuses it: autocast had its input and its result in fp32
    forward, backward = normalise(load, x)
    if load.cast:
        casts = readers + saving * load.frozen  # an adapter has a cast of its own
        forward.append(stream(1.5 * x, count=casts))
        backward.append(stream(1.5 * x, kind="widen", count=casts))
    added = 3 * x * load.stream / 4  # gradients of the readers
    backward.append(stream(added, count=max(0, readers - 1)))
    freed = 4 * x * ((load.model.norm == "rms" and load.device == "cpu") + load.cast)  # x², and what was cast
    return Op(name, "norms", tuple(forward), tuple(backward), tuple(saved), for_weights=sum(results), transient=freed)


def entered_tensors(load: Workload, saving: int) -> list[Any]:
    """What `saving` linear layers save of one result: it once (fp32), or one cast of it per layer."""
    x, whole = load.sp_tokens * load.model.hidden, load.tokens * load.model.hidden
    results = [2 * x] * saving if load.cast else [load.stream * x] * (saving > 0)
    if results and np.any(load.tp > 1):  # one tensor enters the region, cast before it does
        entering = np.where(load.tp > 1, load.width * whole, results[0])
        results = [entering, *[np.where(load.tp > 1, 0, results[0])] * (len(results) - 1)]
    return results


def entry(layer: Entry, load: Workload) -> Op:
    """The residual stream as linear layers save it, where no norm stands before them."""
    count, saving = readers(layer, load)
    x, kept = load.sp_tokens * load.model.hidden, entered_tensors(load, saving)
    cast = (stream(1.5 * x, count=count + saving * load.frozen),) * load.cast
    added = stream(3 * x * load.stream / 4, count=max(0, count - 1))
    return Op(layer.label, "residual", cast, (*cast, added), tuple(kept), for_weights=sum(kept))


def branch_norm(layer: Norm, load: Workload) -> Op:
    """Of what attention or MLP gives. Saved: its input, which nothing else needs, and 1/σ."""
    t, x = load.sp_tokens, load.sp_tokens * load.model.hidden
    forward, backward = normalise(load, x)
    return Op(layer.label, "norms", tuple(forward), tuple(backward), (load.width * x, 4 * t))


def residual(layer: Residual, load: Workload) -> Op:
    """x + f(x): the sum is saved for the next norm; backward adds the two gradients."""
    x = load.sp_tokens * load.model.hidden
    passed = stream(3 * x * load.stream / 4)
    back = [passed] + ([stream(1.5 * x)] if load.cast else [])
    forward = stream(np.where(load.epilogue_fusion & (not layer.inner), 1, 3)[()] * x * load.stream / 4)
    saved = (load.stream * x,) * layer.feeds_norm
    return Op(layer.label, "residual", (forward,), tuple(back), saved=saved, transient=load.width * x)


def head_norm(layer: Norm, load: Workload) -> Op:
    """RMSNorm over each head. Saved: its input, 1/σ of every head, and its output where a linear layer reads it."""
    x = load.tokens * load.local(layer.total, layer.shard)
    forward, backward = normalise(load, x)
    outputs = [load.width * x] * (readers(layer, load)[1] > 0)
    saved = (load.width * (load.tokens * layer.source if layer.source else x), 4 * (x // layer.width), *outputs)
    return Op(layer.label, "norms", tuple(forward), tuple(backward), saved=saved, for_weights=sum(outputs))


def rotary(layer: Rotary, load: Workload) -> Op:
    """x·cos + swap(x)·sin in fp32: two products with a table per position, a cat of swapped halves, a sum.

    Only the tables are saved, which all layers share; backward is the same four kernels.
    """
    x = load.tokens * load.local(layer.width, layer.shard)
    passes = [stream(2 * x, kind="strided", count=3), stream(3 * x)]
    if load.is_16_bit:  # 2 bytes in and out, fp32 within
        passes = [stream(1.5 * x, kind="strided", count=2), stream(x, kind="strided"), stream(3 * x), stream(1.5 * x)]
    freed = (14 if load.is_16_bit else 12) * x + load.width * x * (not layer.after_norm)
    return Op(layer.label, "rotary", tuple(passes), tuple(passes), transient=freed)


def copied(layer: Copy, load: Workload) -> Op:
    """One copy in each direction; attention saves what is written."""
    moved = Kernel("stream", bytes=2.0 * load.width * load.tokens * (layer.width // load.tp))
    return Op(layer.label, "attention", (moved,), (moved,))


def attention(core: Attention, load: Workload) -> Op:
    """softmax(q·kᵀ)·v. Fused: saves q, k, v, the output and a log-sum-exp per head and token."""
    m, t, w = load.model, load.tokens, load.width
    heads, kv_heads, several = core.heads // load.tp, load.local(core.kv_heads, "kv_heads"), np.greater(load.cp, 1)
    q, out = heads * core.qk_dim, heads * core.v_dim
    result = t * out * w
    read = result * (weight_readers(load, "attention", 1) > 0)  # what the next product keeps of it
    inputs = [t * q * w, t * kv_heads * core.qk_dim * w, t * kv_heads * core.v_dim * w]
    kept = result  # as attention returns it
    padded = core.v_dim < core.qk_dim and ((load.cp_method == "ring") & several | (load.device == "cpu"))
    if np.any(padded):  # values to the width of keys: by the ring, and by SDPA on a CPU
        inputs[2], kept = np.where(padded, inputs[1], inputs[2])[()], np.where(padded, inputs[0], result)[()]
    flops = 1.0 * t * (core.flops_per_key // load.tp) * mean_keys_per_query(core, load.seq)
    shape = (load.seq, core.qk_dim)
    forward, backward = [], []
    if load.attention == "scores":
        scores = t * load.seq * heads
        product = 1.0 * t * (core.flops_per_key // load.tp) * load.seq  # no causal skipping
        forward = [gemm(t * heads, core.qk_dim, load.seq), gemm(t * heads, load.seq, core.v_dim)]
        forward += [stream(2 * scores, count=core.score_passes), stream(2 * scores, kind="exp")]
        backward = [
            Kernel("attention_backward", flops=2 * product, shape=shape),
            stream(3 * scores, count=core.score_passes),
        ]
        inner = w if load.backend == "reference" else 4  # SDPA's math path computes in fp32
        repeated = (t * width * inner for width in (q, q, out))  # k, v for every head
        saved = [4 * t * heads * core.saved_scores(load.seq), *repeated, read]
        if load.is_16_bit and load.backend == "reference":
            saved.append(2 * scores)
        selective = scores * inner, t * out * inner
        return Op("attention", "attention", tuple(forward), tuple(backward), tuple(saved), selective, for_weights=read)
    around = ring_passes(core, load)
    forward = [Kernel("attention", flops=flops, shape=shape), *around[0]]
    # Five GEMMs against two: scores are recomputed.
    backward = [Kernel("attention_backward", flops=2.5 * flops, shape=shape), *around[1]]
    # Under context parallelism the output is saved twice: as merged, and as the next GEMM reads it.
    sums = 4 * t * heads
    saved = [*inputs, kept, sums, kept * several * (read > 0), read * padded]
    mask: Any = load.seq**2 * (load.batch if load.documents else 1)
    if load.device == "cpu" and m.positions == "alibi" and load.is_16_bit:  # every layer casts its own
        saved.append(heads * mask * w)
    elif load.device == "cpu" and m.positions != "alibi" and (core.window or load.documents):
        # SDPA turns the Boolean mask into a float one in every layer that has it: (seq, seq), one a sequence with
        # documents.
        mask = mask * (1 if load.documents else 1 - core.full_share)
        saved.append(mask * w)
        forward.append(stream(1.25 * mask))
    return Op("attention", "attention", tuple(forward), tuple(backward), tuple(saved), (kept, sums), for_weights=read)


def ring_passes(core: Attention, load: Workload) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Passes over memory around the tiles of our ring attention, forward and backward; it is never compiled.

    A rank attends in 2·cp + 1 tiles of half its queries and half the keys of a block. Each repeats keys and values for
    every query head, and is merged into fp32 sums: out.mul_, more * scale, add_ (`kernels/training/attention_tile.py`,
    `parallel/ring_attention.py`). Passes over a number a head and token count as launches only.
    """
    if load.cp_method != "ring" or not load.software.name.startswith("lmworks") or not np.any(np.greater(load.cp, 1)):
        return (), ()
    w, heads, kv_heads = load.width, core.heads // load.tp, load.local(core.kv_heads, "kv_heads")
    q, kv = load.tokens * heads * core.qk_dim, 2 * load.tokens * kv_heads * core.qk_dim  # values are as wide as keys
    grouped, tiles, hops = np.not_equal(heads, kv_heads), 2 * load.cp + 1, load.cp - 1
    repeated = grouped * w * (kv + 2 * q) / 2  # bytes of a tile
    merged = (8 + (w + 4) + 12) * q / 2
    # Values padded, heads first, stacked, zeros, tiles, in the dtype of the queries, heads last again.
    there = w * kv + 2 * w * (q + 2 * kv) + 4 * q + tiles * (repeated + merged) + (4 + w) * q + 2 * w * q
    # Of each tile's gradients, those of keys and values are summed over the queries' heads in fp32.
    summed = grouped * ((w + 4) * 2 * q + 4 * 2 * q + 4 * kv) / 2
    added = ((w + 8) * q + np.where(grouped, 12, w + 8) * kv) / 2
    back = 2 * w * q + 4 * (q + 2 * kv) + tiles * (repeated + summed + added) + hops * 16 * kv + 12 * kv
    back = back + (4 + w) * (q + kv) + w * kv
    several = np.greater(load.cp, 1)
    launches = several * (8 + tiles * (9 + 2 * grouped)), several * (8 + tiles * (4 + 6 * grouped) + 2 * hops)
    made = [
        Kernel("stream", bytes=moved / np.maximum(count, 1), count=count)
        for moved, count in zip((there, back), launches, strict=True)
    ]
    return (made[0],), (made[1],)


def activation(load: Workload, width: Any, tokens: Any, count: Any = 1, read: bool = True) -> Op:
    """SwiGLU saves gate, silu(gate) and up, GeGLU as much; GELU saves its input; the next GEMM, if it keeps what it
    has `read`, saves their output."""
    x = tokens * width * load.width / 4  # in units of 4 bytes
    if not load.model.gated_mlp:
        there, back = (np.where(load.epilogue_fusion, 1, apart)[()] * x for apart in (2, 3))
        forward, backward = [stream(there, kind="tanh", count=count)], [stream(back, kind="tanh", count=count)]
        tensors = 1
    else:
        forward = [stream(2 * x, kind="exp", count=count), stream(3 * x, count=count)]
        backward = [stream(3 * x, count=2 * count), stream(3 * x, kind="exp", count=count)]
        tensors = 3
    saved, result = (4 * x,) * (tensors + read), 4 * x * read
    return Op(load.model.mlp, "activation", tuple(forward), tuple(backward), saved, copies=count, for_weights=result)


def mlp(layer: MLP, load: Workload) -> list[Op]:
    read = weight_readers(load, layer.name, 1) > 0
    middle = activation(load, layer.width // load.tp, load.tokens, read=read)
    return [*(linear(each, load) for each in layer.up), middle, linear(layer.down, load)]


def experts(layer: Experts, load: Workload) -> list[Op]:
    """Router, dispatch by expert, experts, combine: tokens × top_k slots, counted as spread evenly."""
    load = load.routed
    m, t, w, h = load.model, load.tokens, load.width, layer.hidden
    ffn, slots = layer.ffn // load.tp, load.tokens * layer.top_k
    count = layer.count // load.ep  # of this rank, which receives as many slots as it sends
    rows = np.maximum(1, slots // count)  # tokens of one expert
    # scores (fp32), a weight per slot; top-k values and their sum (fp32); each sequence's load
    scores = [4 * t * layer.count, load.stream * slots]
    if m.norm_topk:
        scores += [4 * slots, 4 * t]
    if m.balance_loss:
        scores.append(4 * load.batch * layer.count)
        if m.router == "sigmoid":  # their sum over the experts
            scores.append(4 * t)
    route = Op(
        "routing",
        "experts",
        (stream(2 * t * layer.count, kind="exp"),),
        (stream(3 * t * layer.count),),
        saved=tuple(scores),
        indices=24 * slots + 8 * layer.count,  # of the chosen, two permutations; counts
    )
    launches = 1 if load.grouped_experts else count
    forward = [gemm(rows, h, ffn, 2 * count), gemm(rows, ffn, h, count)]
    backward = [gemm(rows, ffn, h, 2 * count), gemm(rows, h, ffn, count)]
    backward += [weight_gradient(ffn, rows, h, 2 * count), weight_gradient(h, rows, ffn, count)]
    if load.cast_weights:
        cast = Kernel("stream", bytes=6.0 * ffn * h * count / launches, count=3 * launches)
        forward.append(cast)
        backward.append(cast)
    dear = [slots / launches * w * width for width in (ffn, ffn, h)]
    matrices = Op("experts", "matmul", tuple(forward), tuple(backward), saved_selective=tuple(dear), copies=launches)
    inner = activation(load, ffn, slots / count, count, read=not load.frozen)
    ops = [
        with_frozen_weights(product("router", load, h, layer.count), load),
        route,
        dispatch(layer, load, slots, count * ffn * h),
        with_frozen_weights(matrices, load),
        gated(load, slots * ffn) if load.grouped_experts else inner,
    ]
    return without_fp8(load, ops)


def dispatch(layer: Experts, load: Workload, slots: Any, weights: Any) -> Op:
    """Rows grouped by expert, and their outputs weighted and summed; both are saved.

    Kernels of a GPU read and write each of them once (`kernels.training.permute`). Without them outputs are
    concatenated, moved, weighted and summed. Backward, the input gradients of gate and up are added; `weights`: of one
    matrix of all experts, whose gradients are joined where experts run one after another.
    """
    x, once = slots * layer.hidden * load.width / 4, load.tokens * layer.hidden * load.width / 4
    if load.grouped_experts:
        there, back = [stream(once + x, count=2)], [stream(2 * x + once), stream(x + once), stream(3 * x)]
    else:
        h = layer.hidden
        there = [stream(2 * x, count=3), stream(x + slots * h), stream(slots * h + load.tokens * h)]
        back = [stream(2 * x, count=3), stream(x + slots * h, count=2), stream(x + load.tokens * h), stream(3 * x)]
        back += [] if load.frozen else [stream(2 * weights, count=3)]
    rows = 4 * x * (not load.frozen)  # of which experts keep what they multiply
    return Op("dispatch", "experts", tuple(there), tuple(back), saved=(rows, 4 * x))


def gated(load: Workload, numbers: Any) -> Op:
    """SwiGLU in one kernel, which computes silu(gate) again in the backward pass (`kernels.swiglu`)."""
    x = numbers * load.width / 4
    return Op("swiglu", "activation", (stream(3 * x),), (stream(5 * x),), saved=(4 * x,) * (2 + (not load.frozen)))


def shared_gate(layer: SharedGate, load: Workload) -> list[Op]:
    """A number per token, its sigmoid, and its product with what the shared experts gave."""
    t, w = load.tokens, load.width
    x = t * layer.hidden * w / 4
    ops = [
        with_frozen_weights(product("shared gate", load, layer.hidden, 1), load),
        Op("shared experts' share", "experts", (stream(2 * x),), (stream(4 * x),), saved=(w * t, 4 * x)),
    ]
    return without_fp8(load, ops)


# --- head and loss ----------------------------------------------------------------------------------------


def loss(load: Workload) -> list[Op]:
    """Final norm, head, and what is computed from it."""
    heads = {SCALAR: values, LOGPROBS: logprobs, DIVERGENCE: divergence, STATES: final_states}
    return heads.get(load.head, chunked_cross_entropy)(load)


def final_norm(load: Workload) -> Op:
    """The loss keeps its output."""
    return norm("final norm", load, 0, 0)


def final_states(load: Workload) -> list[Op]:
    """Of a teacher: its head is a part of the student's loss."""
    return [final_norm(load)]


def divergence(load: Workload) -> list[Op]:
    """From a teacher, chunk by chunk, with both gradients within the forward pass."""
    assert load.teacher is not None
    t, h, rows, seen = load.tokens, load.model.hidden, load.chunk_rows, load.logit_columns
    chunks, head, theirs = t / rows, load.vocab * h, load.vocab * load.teacher.hidden
    products = [gemm(rows, h, seen, chunks), gemm(rows, load.teacher.hidden, seen, chunks)]
    products += [gemm(rows, seen, h, chunks), *head_gradient(load, chunks)]
    logits = rows * seen
    passes = [stream(8 * logits, kind="exp", count=chunks), stream(COMPARISON_PASSES * logits, count=chunks)]
    if load.cast:  # both heads, once
        passes.append(stream(1.5 * (head + theirs)))
    if load.is_16_bit and not load.frozen:  # every chunk adds to the head's gradient
        passes.append(stream(3 * head, count=chunks))
    begun, scaled = ([], []) if load.frozen else ([stream(head)], [stream(2 * head)])
    return [
        final_norm(load),
        Op("head", "loss", tuple(products)),
        Op("divergence", "loss", (*passes, *begun), (*scaled, stream(2 * t * h))),
    ]


def head_gradient(load: Workload, chunks: Any) -> list[Kernel]:
    """The product that gives the gradient of the head's weight, chunk by chunk."""
    return [] if load.frozen else [weight_gradient(load.logit_columns, load.chunk_rows, load.model.hidden, chunks)]


def values(load: Workload) -> list[Op]:
    """One number a token: a matrix with one row, which keeps its input."""
    t, h = load.tokens, load.model.hidden
    saved = (load.width * t * h, 2 * h if load.cast else 0)  # hidden states, and the row as it was cast
    score = Op("score", "loss", (stream(t * h),), (stream(2 * t * h),), saved)
    return [final_norm(load), score]


def logprobs(load: Workload) -> list[Op]:
    """Log-probabilities of targets: the backward pass computes the logits of a chunk again."""
    t, h, rows, seen = load.tokens, load.model.hidden, load.chunk_rows, load.logit_columns
    chunks, head = t / rows, load.vocab * h
    logits = gemm(rows, h, seen, chunks)
    more = load.width * rows * seen / 4
    capped = [stream(2 * more, count=chunks)] * components.logit_passes(load.model)
    cast = [stream(1.5 * head)] if load.cast else []
    sums = stream(more, kind="exp", count=chunks)
    slopes = stream(3 * more, kind="exp", count=chunks)
    products = (gemm(rows, seen, h, chunks), *head_gradient(load, chunks))
    begun = [] if load.frozen else [stream(head)]
    return [
        final_norm(load),
        Op("head", "loss", (logits,), (logits, *products)),
        Op(
            "log-probabilities",
            "loss",
            (*cast, *capped, sums),
            (*cast, *capped, slopes, *begun),
            saved=(load.width * t * h, 4 * t),  # hidden states, log-sum-exp
            indices=2 * 4 * t,  # and the results: log-probabilities, entropies
        ),
    ]


def chunked_cross_entropy(load: Workload) -> list[Op]:
    """Final norm, head and chunked cross-entropy: all three GEMMs and both gradients within the forward pass."""
    t, h, vocab = load.tokens, load.model.hidden, load.vocab
    rows, seen = load.chunk_rows, load.logit_columns
    chunks, head = t / rows, vocab * h
    products = [gemm(rows, h, seen, chunks), gemm(rows, seen, h, chunks), *head_gradient(load, chunks)]
    passes = [softmax_in_place(load, rows * seen, chunks)] if load.in_place else softmax(load, rows * seen, chunks)
    more = load.width * rows * seen / 4  # read or written by a further pass over the logits
    passes += [stream(2 * more, count=chunks)] * components.logit_passes(load.model)
    if load.cast:  # the head, once
        passes.append(stream(1.5 * head))
    if load.is_16_bit and not load.frozen:  # every chunk adds to its gradient
        added = load.head_gradient / 2 if load.in_place else 3
        passes.append(stream(added * head, count=chunks))
    each = (load.head_gradient + load.software.gradients) / 4
    begun, scaled = ([], []) if load.frozen else ([stream(head)], [stream(each * head)])
    return [
        final_norm(load),
        Op("head", "loss", tuple(products)),
        Op("cross-entropy", "loss", (*passes, *begun), (*scaled, stream(2 * t * h))),
    ]


def softmax(load: Workload, logits: Any, chunks: Any) -> list[Kernel]:
    """From a chunk of logits to their gradient."""
    found = [stream(3 * logits, kind="exp", count=chunks), stream(2 * logits, kind="exp", count=chunks)]  # log p, exp
    if not load.is_16_bit:
        return [*found, stream(2 * logits, count=chunks)]  # which rows count
    # Softmax on a GPU reads fp16 itself. Which rows count, and back to 2 bytes, is one pass that is not vectorised.
    wide = [] if load.dtype == "fp16" else [stream(1.5 * logits, kind="widen", count=chunks)]
    back = "strided" if load.device == "cuda" else "stream"
    return [*found, *wide, stream(1.5 * logits, kind=back, count=chunks)]


def softmax_in_place(load: Workload, logits: Any, chunks: Any) -> Kernel:
    """`softmax` in one kernel: two reads and a write; in bf16 the part of a long row held in registers is read once.

    That kernel is further from copy bandwidth than one that reads twice: on an H200 it took what 2.63 passes would
    where it holds all of a row (4.27 ms a step of GPT-2, docs/log.md), and 2.88 where it holds 0.42 of it (2.98 ms a
    step of Llama 3 8B, benchmarks/results/train_gpu.json). Under vocabulary parallelism a collective lies between the
    two reads.
    """
    passes: Any = 3.0
    if load.width == 2 and load.dtype != "fp16" and not load.software.fp32_head:
        held = (
            np.minimum(1.0, LOGITS_IN_REGISTERS / load.logit_columns)
            * np.greater_equal(load.logit_columns, MIN_LONG_ROW)
            * np.equal(load.tp, 1)
        )
        passes = 3.0 - 0.37 * held
    return Kernel("exp", bytes=passes * load.width * logits, count=chunks)
