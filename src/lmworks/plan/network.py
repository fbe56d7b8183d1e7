"""The network as an op list: embedding, blocks, loss, and the optimizer step. Mirrors `model/gpt.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spec import ModelSpec
from . import fused
from .ops import (
    Kernel,
    Op,
    Workload,
    activation,
    attention,
    gemm,
    head_norm,
    linear,
    norm,
    residual,
    rotary,
    stream,
    without_fp8,
)
from .software import Software

# As in kernels/training/cross_entropy_one_pass_triton.py: logits that a program holds in registers, and the shortest
# row for which it does.
LOGITS_IN_REGISTERS, MIN_LONG_ROW = 13 * 4096, 2**14


def embedding(load: Workload) -> list[Op]:
    m, t, h, vocab = load.model, load.sp_tokens, load.model.hidden, load.vocab
    # Backward scatters into a dense gradient of the table; a tied head's gradient is added to it.
    x, table = t * h * load.stream / 4, vocab * h * load.software.gradients / 4  # in units of 4 bytes
    back = [stream(table), stream(3 * x)] + ([stream(3 * table)] if m.tie_embeddings else [])
    ops = [Op("token embedding", "embedding", (stream(2 * x),), tuple(back), saved=(4 * x,))]
    if m.positions == "learned":  # the sum replaces the look-up as the stream's first tensor; positions are int64
        indices = 8 * load.seq * (load.batch if load.documents else 1)
        ops.append(Op("position embedding", "embedding", (stream(3 * x),), (stream(2 * x),), indices=indices))
    if m.positions == "rope":  # cos and sin of every position, twice a head's half; shared by all layers
        table = load.seq * (load.batch if load.documents else 1) * m.head_dim
        ops.append(Op("rotary tables", "embedding", (stream(2 * table, kind="exp", count=2),), saved=(4 * table,) * 2))
    return ops + mask(load)


def mask(load: Workload) -> list[Op]:
    """The attention mask, made once per pass where attention is not plainly causal.

    Autograd saves it only where the kernel takes this very tensor; under recompute the blocks save it.
    """
    m = load.model
    size = load.seq**2 * (load.batch if load.documents else 1)
    if m.attention == "reference" or load.device == "cuda":  # made anew in every layer, or block-sparse and small
        return []
    if m.positions == "alibi":  # one fp32 bias a head
        bias = 4 * m.heads * size
        kept = bias if load.attention == "fused" and not load.is_16_bit else 0
        return [Op("mask", "attention", (stream(bias),), saved=(kept,), saved_selective=(bias - kept,))]
    if m.sliding_window or load.documents:
        return [Op("mask", "attention", (stream(size),), saved_selective=(size,))]
    return []


def mlp(load: Workload, width: Any, prefix: str = "") -> list[Op]:
    h, bias = load.model.hidden, load.model.bias
    gate = [linear(f"{prefix}gate", load, h, width, bias)] if load.model.mlp == "swiglu" else []
    up, down = linear(f"{prefix}up", load, h, width, bias), linear(f"{prefix}down", load, width, h, bias)
    return [*gate, up, activation(load, width, load.tokens), down]


def experts(load: Workload) -> list[Op]:
    """Router, dispatch by expert, expert after expert, combine: tokens × top_k slots, counted as spread evenly."""
    shared = mlp(load, load.model.shared_experts * load.model.expert_ffn // load.tp, "shared ")
    load = load.routed
    m, t, w, h = load.model, load.tokens, load.width, load.model.hidden
    ffn, slots = m.expert_ffn // load.tp, load.tokens * m.top_k
    count = m.experts // load.ep  # of this rank, which receives as many slots as it sends
    rows = np.maximum(1, slots // count)  # tokens of one expert
    # softmax, top-k values, their sum (fp32), a weight per slot, each sequence's load
    scores = [4 * t * m.experts, 4 * slots, 4 * t, load.stream * slots]
    if m.balance_loss:
        scores.append(4 * load.batch * m.experts)
    route = Op(
        "routing",
        "experts",
        (stream(2 * t * m.experts, kind="exp"),),
        (stream(3 * t * m.experts),),
        saved=tuple(scores),
        indices=24 * slots + 8 * m.experts,  # of the chosen, two permutations; counts
    )
    x = slots * h * w / 4  # rows that move, in units of 4 bytes
    # Saved: rows grouped by expert, and their outputs. Outputs are concatenated, moved, weighted and summed.
    move = [stream(2 * x, count=3), stream(x + slots * h), stream(slots * h + t * h)]
    # Backward; the gate weights' gradient reads the outputs, input gradients of gate and up are added.
    back = [stream(2 * x, count=3), stream(x + slots * h, count=2), stream(x + t * h), stream(3 * x)]
    join = [stream(2 * count * ffn * h, count=3)]  # gradients of single experts into one tensor
    dispatch = Op("dispatch", "experts", tuple(move), (*back, *join), saved=(4 * x, 4 * x))
    forward = [gemm(rows, h, ffn, 2 * count), gemm(rows, ffn, h, count)]
    backward = [gemm(rows, ffn, h, 2 * count), gemm(rows, h, ffn, count)]
    backward += [gemm(ffn, rows, h, 2 * count), gemm(h, rows, ffn, count)]
    if load.cast_weights:
        forward.append(Kernel("stream", bytes=6.0 * ffn * h, count=3 * count))
        backward.append(Kernel("stream", bytes=6.0 * ffn * h, count=3 * count))
    dear = [slots / count * w * width for width in (ffn, ffn, h)]
    products = Op("experts", "matmul", tuple(forward), tuple(backward), saved_selective=tuple(dear), copies=count)
    ops = [
        linear("router", load, h, m.experts),
        route,
        dispatch,
        products,
        activation(load, ffn, slots / count, count),
    ]
    return without_fp8(load, ops) + (shared if m.shared_experts else [])


def block(load: Workload) -> list[Op]:
    m, h = load.model, load.model.hidden
    ops = [norm("attention norm", load, readers=3)]
    ops += [linear("query", load, h, load.q_width, m.qkv_bias)]
    ops += [linear(name, load, h, load.kv_width, m.qkv_bias) for name in ("key", "value")]
    if m.qk_norm:
        ops += [head_norm("query norm", load, load.heads), head_norm("key norm", load, load.kv_width // m.head_dim)]
    if m.positions == "rope":
        ops += [rotary("rotary query", load, load.q_width), rotary("rotary key", load, load.kv_width)]
    ops += [
        attention(load),
        linear("attention out", load, load.q_width, h, m.bias),
        residual("attention residual", load, inner=True),
    ]
    if m.experts:
        readers = 1 + 2 * (m.shared_experts > 0)
        ops += [norm("mlp norm", load.routed, readers), *experts(load)]
    else:
        ops += [norm("mlp norm", load, 2 if m.mlp == "swiglu" else 1), *mlp(load, m.ffn // load.tp)]
    return [*ops, residual("mlp residual", load)]


def loss(load: Workload) -> list[Op]:
    """Final norm, head and chunked cross-entropy: all three GEMMs and both gradients within the forward pass."""
    t, h, vocab = load.tokens, load.model.hidden, load.vocab
    rows, seen = load.chunk_rows, load.logit_columns
    chunks, head = t / rows, vocab * h
    products = [gemm(rows, h, seen, chunks), gemm(rows, seen, h, chunks), gemm(seen, rows, h, chunks)]
    passes = [*softmax(load, rows * seen, chunks)]
    if load.cast:  # the head, once
        passes.append(stream(1.5 * head))
    if load.is_16_bit:  # every chunk adds to its gradient
        added = load.head_gradient / 2 if load.in_place else 3
        passes.append(stream(added * head, count=chunks))
    scaled = (load.head_gradient + load.software.gradients) / 4
    return [
        norm("final norm", load, readers=0),
        Op("head", "loss", tuple(products)),
        Op("cross-entropy", "loss", (*passes, stream(head)), (stream(scaled * head), stream(2 * t * h))),
    ]


def softmax(load: Workload, logits: Any, chunks: Any) -> list[Kernel]:
    """From a chunk of logits to their gradient."""
    if load.in_place:
        return [Kernel("exp", bytes=passes_in_place(load) * load.width * logits, count=chunks)]
    found = [stream(3 * logits, kind="exp", count=chunks), stream(2 * logits, kind="exp", count=chunks)]  # log p, exp
    if not load.is_16_bit:
        return [*found, stream(2 * logits, count=chunks)]  # which rows count
    # Softmax on a GPU reads fp16 itself. Which rows count, and back to 2 bytes, is one pass that is not vectorised.
    wide = [] if load.dtype == "fp16" else [stream(1.5 * logits, kind="widen", count=chunks)]
    back = "strided" if load.device == "cuda" else "stream"
    return [*found, *wide, stream(1.5 * logits, kind=back, count=chunks)]


def passes_in_place(load: Workload) -> Any:
    """Passes over the logits: two reads and a write; in bf16 the part of a long row held in registers is read once.

    That kernel is further from copy bandwidth than one that reads twice: on an H200 it took what 2.63 passes would
    where it holds all of a row (4.27 ms a step of GPT-2, docs/log.md), and 2.88 where it holds 0.42 of it (2.98 ms a
    step of Llama 3 8B, benchmarks/results/train_gpu.json). Under vocabulary parallelism a collective lies between the
    two reads.
    """
    if load.dtype == "fp16" or load.width != 2 or load.software.fp32_head:
        return 3.0
    held = (
        np.minimum(1.0, LOGITS_IN_REGISTERS / load.logit_columns)
        * np.greater_equal(load.logit_columns, MIN_LONG_ROW)
        * np.equal(load.tp, 1)
    )
    return 3.0 - 0.37 * held


@dataclass(frozen=True)
class Network:
    """Ops of the embedding, of one block, and of head and loss."""

    load: Workload
    stem: tuple[Op, ...]
    block: tuple[Op, ...]
    loss: tuple[Op, ...]

    @property
    def halves(self) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """Of a block: attention, and the MLP or the experts with the norm before them."""
        middle = [op.name for op in self.block].index("mlp norm")
        return self.block[:middle], self.block[middle:]


def network(load: Workload) -> Network:
    """By code base: our eager blocks op by op, or the list of fused kernels."""
    if load.software.fused or (load.software.stream == 2 and not load.software.name.startswith("lmworks")):
        last = loss(load) if load.software.loss == "chunked" else fused.loss(load)
        return Network(load, tuple(fused.stem(load)), tuple(fused.block(load)), tuple(last))
    return Network(load, tuple(embedding(load)), tuple(block(load)), tuple(loss(load)))


def optimizer(model: ModelSpec, software: Software, states: float) -> list[Op]:
    """Gradient clipping, and the update, which reads p, g and states and writes p and states."""
    numbers = model.params * software.gradients / 4  # in units of 4 bytes
    clip = Op("clip", "optimizer", (stream(software.clip_passes * numbers),))
    each = 2 * (software.weights + software.low_bytes + states) + software.gradients
    return [clip, Op("update", "optimizer", (Kernel("optimizer", bytes=1.0 * each * model.params),))]
