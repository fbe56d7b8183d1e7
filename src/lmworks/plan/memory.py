"""The memory of one rank, in bytes: what is always there, and the moment of a step at which most is alive.

Four moments of a step can be the highest: the loss (all activations, a chunk of logits), the backward pass of the top
block (activations, few gradients), of the lowest block (few activations, nearly all gradients), and the end of the
backward pass (all gradients, the embedding's last). In between every block swaps its activations for its gradients,
so the highest point lies at an end; the optimizer works in place and never exceeds the last.
Every moment is a list of rows; the peak is the largest sum. On a GPU it is what tensors hold, as
`max_memory_allocated` counts it: context and allocator come on top. On a CPU it is the growth of the resident set,
so what the allocator cannot use again is a row as well.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..spec import RunSpec, SpecError
from .network import Network, network
from .ops import Op, Workload

OVERHEAD = ("allocator holes",)  # rows that are not tensors


@dataclass(frozen=True)
class Row:
    name: str
    bytes: int
    how: str  # how it follows


@dataclass(frozen=True)
class MemorySheet:
    """Rows add up to `total`, the predicted peak; `moments` holds the sum of each moment."""

    moment: str
    rows: tuple[Row, ...]
    moments: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def tensors(self) -> int:
        """What tensors hold; exact for dense models, see tests/plan/test_memory.py."""
        return sum(row.bytes for row in self.rows if row.name not in OVERHEAD)


def memory(spec: RunSpec, device: str = "cpu") -> MemorySheet:
    refuse_unpredicted(spec)
    load = Workload.of(spec, device)
    net = network(load)
    static = static_rows(spec, load) + overhead_rows(spec, net)
    accumulated = spec.accumulation > 1
    moments = {
        "loss": at_loss(spec, net, accumulated),
        "backward, top block": at_backward(spec, net, accumulated, spec.model.layers),
        "backward, lowest block": at_backward(spec, net, accumulated, 1),
        "backward, last gradient": at_end(spec, net, accumulated),
    }
    sheets = {name: tuple(row for row in (*static, *rows) if row.bytes) for name, rows in moments.items()}
    sums = {name: sum(row.bytes for row in rows) for name, rows in sheets.items()}
    moment = max(sums, key=lambda name: sums[name])
    return MemorySheet(moment, sheets[moment], sums, tuple(notes(spec)))


def refuse_unpredicted(spec: RunSpec) -> None:
    """No number is better than a made-up one: sharded layouts are not predicted yet."""
    layout = spec.parallel
    for axis in ("dp_shard", "tp", "pp", "cp", "ep"):
        if getattr(layout, axis) > 1:
            raise SpecError(f"parallel.{axis} = {getattr(layout, axis)}: memory of this layout is not predicted yet")
    if layout.offload != "none" or layout.engine != "native":
        raise SpecError("parallel.offload and parallel.engine: memory of this layout is not predicted yet")


def notes(spec: RunSpec) -> Iterable[str]:
    if spec.parallel.dp_replicate > 1:
        yield "data-parallel communication buckets are not counted yet"
    if spec.parallel.compile:
        yield "torch.compile fuses element-wise ops and keeps less; this sheet is for eager execution"
    if spec.model.experts:
        yield "experts are taken as evenly loaded"


def total(ops: Iterable[Op], field: str = "saved") -> Any:
    return sum(getattr(op, field) for op in ops)


def row(name: str, size: float, how: str) -> Row:
    return Row(name, round(size), how)


def static_rows(spec: RunSpec, load: Workload) -> list[Row]:
    params = spec.model.params
    ids = 3 if load.documents else 2
    return [
        row("parameters", 4 * params, f"4 B × {params:,}"),
        row("optimizer states", 8 * params, f"AdamW's two moments: 8 B × {params:,}"),
        row("batch", 8 * ids * load.tokens, f"int64 tokens and targets: {8 * ids} B × {load.tokens:,} tokens"),
    ]


def overhead_rows(spec: RunSpec, net: Network) -> list[Row]:
    """glibc serves an aligned block only from a larger one, so a freed tensor leaves a hole that the next tensor of
    the same size cannot take: what every block frees in its forward pass stays resident until all is freed."""
    if net.load.device != "cpu" or platform.libc_ver()[0] != "glibc":
        return []
    _, each, _ = kept(net, spec.parallel.recompute)
    hole = max(0.0, total(net.block) + total(net.block, "freed") - each)
    return [row("allocator holes", spec.model.layers * hole, f"{spec.model.layers} × {hole:,.0f} B freed by a block")]


def weight_casts(load: Workload) -> float:
    """Under autocast every matrix of the blocks is held in 2 bytes as well."""
    m = load.model
    if not load.cast:
        return 0.0
    unvisited = m.layers * (m.experts - m.top_k) * m.mlp_matrix(m.expert_ffn) if m.experts else 0
    return 2.0 * (m.matmul_params - m.vocab * m.hidden + unvisited)


def kept(net: Network, recompute: str) -> tuple[float, float, str]:
    """Bytes that the stem and one block keep between forward and backward, and how the block's follow."""
    stream = 1.0 * net.load.software.stream * net.load.outside * net.load.model.hidden
    stem = total(net.stem)
    if recompute == "none":
        return stem, total(net.block), "what each op saves for the backward pass"
    if recompute == "attention":
        return stem, total(net.block) - total(net.block, "inside"), "what each op saves, but for attention's inside"
    stem = stem + total(net.stem, "dear")
    each = stream
    if recompute == "full":
        return stem, each, "the block's input"
    return stem, each + total(net.block, "dear"), "the block's input, results of products and of attention"


def activation_rows(spec: RunSpec, net: Network) -> list[Row]:
    stem, each, how = kept(net, spec.parallel.recompute)
    layers = spec.model.layers
    return [
        row("activations of blocks", layers * each, f"{layers} × {each:,.0f} B: {how}"),
        row("activations outside blocks", stem + total(net.loss), "embedding, position tables, final norm"),
    ]


def gradient_row(spec: RunSpec, there: bool) -> Row:
    params = spec.model.params
    how = f"4 B × {params:,}" if there else "freed after the last step, not made yet"
    return row("gradients", 4 * params * there, how)


def at_loss(spec: RunSpec, net: Network, accumulated: bool) -> list[Row]:
    load, m = net.load, spec.model
    w, hidden, head = load.width, load.tokens * m.hidden, m.vocab * m.hidden
    rows = load.chunk_rows
    logits = rows * m.vocab
    if load.cast:
        # 2-byte logits, their fp32 copy (softmax cannot read 2 bytes itself), log p; then its gradient in
        # 2 bytes beside log p, and the product that is added to the head's gradient.
        chunk = max(logits * 10, logits * 6 + 2 * head)
    else:
        chunk = 8 * logits  # logits and log p
    held = 4 * hidden + (2 * hidden + 2 * head if load.cast else 0)
    return [
        gradient_row(spec, accumulated),
        *activation_rows(spec, net),
        row("weight casts", weight_casts(load), f"2 B × matrices of the blocks, as {load.dtype}"),
        row("loss: gradients", w * hidden + 4 * head, f"{w} B × tokens × hidden + 4 B × vocab × hidden"),
        row("loss: chunk of logits", chunk, f"{rows:,} tokens × {m.vocab:,} logits, {chunk / logits:.3g} B each"),
        row("loss: inputs", held, "final hidden states, and casts of them and of the head under autocast"),
    ]


def at_backward(spec: RunSpec, net: Network, accumulated: bool, block: int) -> list[Row]:
    """Inside the MLP of block `block` (from 1): its gradients, what it and lower blocks keep, what is recomputed."""
    load, m = net.load, spec.model
    t, w, recompute = load.tokens, load.width, spec.parallel.recompute
    stem, each, how = kept(net, recompute)
    stream = 4 * t * m.hidden
    done = 4 * (m.vocab * m.hidden + m.norm_params + (m.layers - block) * m.block_params)
    again = 0.0
    if recompute != "none":
        again = total(net.block) - stream + weight_casts(load) / m.layers
    if recompute == "selective":  # taken over from what was kept, all but the last product, which nothing asks for
        again -= total(net.block, "dear") - t * w * m.hidden
    # Gradients beside what is saved (the result's takes its place): swiglu of silu(gate) and up, gelu of its input.
    beside = 2 if m.mlp == "swiglu" else 1
    temporaries: float = stream * (2 if load.cast else 1)
    if m.experts:
        whole, slots = m.experts * m.expert_ffn * m.hidden, t * m.top_k
        # Experts run one after another: at first the gradient of every slot is there, at last all experts' gradients,
        # one of them joined already, and the rows' gradient, twice; what they kept is gone by then.
        first = slots * w * m.hidden + beside * m.expert_ffn * slots / m.experts * w + 4 * m.expert_ffn * m.hidden
        last = 16 * whole + 2 * slots * w * m.hidden - slots * w * (4 * m.expert_ffn + m.hidden)
        temporaries += max(first, last)
    else:
        temporaries += beside * m.ffn * t * w + 4 * m.ffn * m.hidden
    return [
        gradient_row(spec, True)
        if accumulated
        else row("gradients so far", done, "4 B × head and blocks already done"),
        row("activations of blocks", block * each - stream, f"{block} × {each:,.0f} B, less the last sum: {how}"),
        row("activations outside blocks", stem, "embedding, position tables"),
        row(
            "weight casts",
            weight_casts(load) * block / m.layers * (recompute == "none"),
            "2 B × matrices of the blocks",
        ),
        row("recomputed block", again, "what one block saves, less what it kept"),
        row("backward temporaries", temporaries, "gradients inside one MLP and of the residual stream"),
    ]


def at_end(spec: RunSpec, net: Network, accumulated: bool) -> list[Row]:
    """All gradients; the embedding's comes last, and a tied head's is added to it in a third tensor."""
    m = spec.model
    copies = 2 * m.tie_embeddings + accumulated
    stream = 4 * net.load.tokens * m.hidden
    return [
        gradient_row(spec, True),
        row(
            "embedding gradient", 4 * copies * m.vocab * m.hidden, f"{copies} × 4 B × vocab × hidden before it is added"
        ),
        row("gradient of the stream", stream, "4 B × tokens × hidden"),
    ]
