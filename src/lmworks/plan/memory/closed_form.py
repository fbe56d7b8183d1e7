"""Peak memory (`peak_memory.py`, `dp_buffers.py`) in closed form: for any code base, thousands of layouts at once.

Less is followed one by one here. A test holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..activation_offload import total_offloaded_bytes
from ..case import Case, Number
from ..network import Network
from ..saved_activations import recomputed_bytes, saved_bytes, stream_bytes, total
from .peak_memory import chunk_bytes
from .share import RankShare, shard_degrees

# Bytes of one logit when the loss is highest. Plain code has log p, its gradient and that of the logits, in fp32, and
# over a vocabulary that is cut one more; compiled code the logits as they came and in fp32; a fused loss writes
# gradients over the logits.
LOGIT_BYTES = {"plain": 12, "compiled": 6, "fused": 2}
CUT = {"plain": 4, "compiled": 0, "fused": 0}
# Bytes of one logit that the allocator keeps from the forward pass, as nothing fits there: those as they came.
LEFT = {"plain": 2, "compiled": 0, "fused": 0}


@dataclass(frozen=True)
class Peak:
    """What is there beside weights and states."""

    gradients: Number = 0.0
    activations: Number = 0.0
    logits: Number = 0.0
    buffers: Number = 0.0
    left: Number = 0.0

    @property
    def total(self) -> Number:
        return self.gradients + self.activations + self.logits + self.buffers


def at_loss(case: Case, net: Network, part: RankShare, state: dict[str, Number], later: bool) -> Peak:
    """All activations of this rank; on the last the logits, the hidden states they come from and their gradient."""
    load, h = net.load, case.model.hidden
    states = load.width * load.tokens * h  # hidden states, as tensor-parallel ranks gather them, or their gradient
    head = load.vocab * h
    kind, left = case.software.loss, 0.0 * states
    if kind == "chunked":
        ends, logits, weights = chunked_loss(net)
    else:
        ends = total(net.loss, "saved") - total(net.loss[-1:]) + states * (1 + (load.tp > 1))
        count = load.tokens * load.vocab
        each = case.software.logit_bytes or LOGIT_BYTES[kind] + CUT[kind] * (load.tp > 1)
        logits = each / 2 * load.width * count
        left = LEFT[kind] * count * (not case.software.logit_bytes)
        weights = case.software.wgrad_placeholder * head
        if case.zero == 3:  # gathered, and its gradient as it is made and as it is sent
            weights = weights + (2 * load.width + case.software.reduce) * head
    return Peak(
        gradients=gradient_bytes(case, part, state, 0.0, later),
        activations=stored_activations(case, net, part) + part.last * ends,
        logits=part.last * logits,
        buffers=part.last * weights
        + gathered_weights(case, part, net, gathered=1.0)
        + casts(case, net, part, forward=True),
        left=part.last * left,
    )


def at_top(case: Case, net: Network, part: RankShare, state: dict[str, Number], later: bool) -> Peak:
    """Inside the MLP of the top block: what it computes again, and gradients beside what it keeps."""
    return Peak(
        gradients=gradient_bytes(case, part, state, part.head, later),
        activations=stored_activations(case, net, part) + recomputed_top_block(case, net) + inside_mlp(case, net),
        logits=0.0 * net.load.tokens,
        buffers=gathered_weights(case, part, net, gathered=2.0)
        + casts(case, net, part, forward=False)
        + reduction_buffers(case, part, later),
    )


def at_lowest(case: Case, net: Network, part: RankShare, state: dict[str, Number], later: bool) -> Peak:
    """Inside the MLP of the lowest block, or the second lowest, where both have back what waited in host memory: most
    gradients are there by then, as data parallelism leaves them, and one block's are on their way.
    """
    code = case.software
    over, over_experts = shard_degrees(case) if case.zero >= 2 else (1, 1)
    done = part.head + (part.layers - 1) * (part.dense / over + part.experts / over_experts)
    stem, each, _ = saved_bytes(net, case.recompute)
    blocks = 1 + np.greater(case.offload_activations, 0)
    left = stem + blocks * each - stream_bytes(net)
    cast = 2.0 * part.block * net.load.cast_share * (case.zero < 3) * (blocks if case.recompute == "none" else 1)
    first = np.equal(case.accumulation, 1) | (not later)
    return Peak(
        gradients=gradient_bytes(case, part, state, done, later),
        activations=left + recomputed_bytes(net, case.recompute) + inside_mlp(case, net),
        logits=0.0 * net.load.tokens,
        buffers=gathered_weights(case, part, net, gathered=1.0)
        + cast
        + code.reduce * part.block * (case.zero == 3) * first,
    )


def inside_mlp(case: Case, net: Network) -> Number:
    """Gradients inside one MLP and of the residual stream."""
    load, m = net.load, case.model
    slots, width = (load.tokens * m.top_k, m.expert_ffn) if m.experts else (load.tokens, m.ffn)
    inside = (2 if m.mlp == "swiglu" else 1) * load.width * slots * width // load.tp
    if m.experts:
        inside = inside + 2 * load.width * slots * m.hidden
    return inside + stream_bytes(net) * (2 if load.cast else 1) + load.width * load.tokens * m.hidden * (load.tp > 1)


def recomputed_top_block(case: Case, net: Network) -> Number:
    """What the top block computes again: nothing where every k-th does and it is none of them. (Of a pipeline's stages
    it is not known which they are.)
    """
    spared = np.greater((case.model.layers - 1) % case.recompute_every, 0) & np.equal(case.pp, 1)
    return recomputed_bytes(net, case.recompute) * ~spared


def at_end(case: Case, net: Network, part: RankShare, state: dict[str, Number]) -> Peak:
    """All gradients, the embedding's last; micro-batches that a pipeline still holds are done by then."""
    load, m, code = net.load, case.model, case.software
    table = (code.gradients if code.master == 0 else load.width) * load.vocab * m.hidden * part.first
    if case.zero == 3 and is_lmworks(case):  # the root's are whole, and on their way
        table = (code.gradients + code.reduce) * part.root
    return Peak(
        gradients=state["gradients"] + 0.0 * load.tokens,
        activations=code.stream * load.sp_tokens * m.hidden * (case.zero < 3),
        logits=0.0 * load.tokens,
        buffers=table + gathered_weights(case, part, net, gathered=0.0),
    )


def chunked_loss(net: Network) -> tuple[Any, Any, Any]:
    """(hidden states, logits, weights) of kernels/training/cross_entropy.py, as `moments.Piece` has them row by row."""
    load, cut = net.load, np.greater(net.load.tp, 1)
    hidden, head = load.tokens * load.model.hidden, load.vocab * load.model.hidden
    ends = total(net.loss) + 2 * load.width * hidden
    weights = load.head_gradient * head
    if not load.cast:
        return ends, chunk_bytes(load, head), weights
    return ends + 4 * hidden * ~cut, chunk_bytes(load, head), weights + 2 * head


def stored_activations(case: Case, net: Network, part: RankShare) -> Number:
    """Activations of all micro-batches under way."""
    stem, _, _ = saved_bytes(net, case.recompute)
    received = case.software.stream * net.load.sp_tokens * case.model.hidden
    loss: Number = 0.0 * received
    if case.software.loss == "chunked":  # both its gradients wait for the backward pass; those of one are at_loss's
        load = net.load
        loss = part.last * (part.in_flight - 1) * (load.width * load.tokens + load.head_gradient * load.vocab)
    kept_here = saved_by_blocks(case, net, part) + np.where(part.first, stem, received * (not is_lmworks(case)))
    return part.in_flight * kept_here + loss * case.model.hidden - total_offloaded_bytes(case, net)


def saved_by_blocks(case: Case, net: Network, part: RankShare) -> Number:
    """Of one micro-batch. Every k-th block is recomputed whole, the others not at all."""
    each = saved_bytes(net, case.recompute)[1]
    if case.recompute != "full":
        return part.layers * each
    few = np.ceil(part.layers / case.recompute_every)
    return few * each + (part.layers - few) * saved_bytes(net, "none")[1]


# --- weights and gradients on their way -----------------------------------------------------------------


def gradient_bytes(case: Case, part: RankShare, state: dict[str, Number], done: Number, later: bool) -> Number:
    """Before the backward pass is over. Megatron keeps a buffer for all; elsewhere they come with the backward pass.

    While micro-batches accumulate they stay, so a `later` one finds them: whole, as they meet after the last one. Our
    DDP keeps its buckets from step to step.
    """
    if case.software.master:
        return state["gradients"]
    whole = case.software.gradients * (part.root + part.layers * part.block)
    piped = np.greater(case.pp, 1)
    several = np.greater(case.accumulation, 1) & later
    delayed = state["gradients"]
    if case.software.delayed_reduction and case.zero == 3:  # of bf16 weights as they will be sent
        delayed = whole * max(1, case.software.reduce / case.software.gradients)
    if case.zero >= 2:  # PyTorch's pipelines let gradients meet at the end
        delayed = np.where(piped, whole, delayed)
    found = np.where(several, delayed, case.software.gradients * done)
    if case.zero == 0 and is_lmworks(case):
        buckets = np.greater(case.dp * case.cp, 1) & ~piped & np.equal(case.ep, 1)
        found = np.where(buckets, whole * (1 + several), found)
    return found


def casts(case: Case, net: Network, part: RankShare, forward: bool) -> Number:
    """Autocast's copies of the blocks' weights, where none are gathered.

    They are kept with the activations of every micro-batch, or, of recomputed blocks, until the forward pass is over,
    and made again block by block.
    """
    each = 2.0 * part.block * net.load.cast_share * (case.zero < 3)
    if case.recompute == "none":
        return part.in_flight * part.layers * each
    return each * np.where(forward, part.layers, 1)


def gathered_weights(case: Case, part: RankShare, net: Network, gathered: float) -> Number:
    """Weights that are gathered for as long as a block, or the whole pass, needs them; buffers that code keeps."""
    code, w = case.software, net.load.width
    own = code.wgrad_placeholder * part.block
    if code.master == 0:  # PyTorch's pipelines receive every micro-batch in a buffer of its own, from both sides
        sides = 2 * case.virtual - np.where(part.first, 1, 0) - np.where(part.last, 1, 0)
        stream = code.stream * net.load.sp_tokens * case.model.hidden
        own = own + np.where(np.greater(case.pp, 1), sides * case.accumulation * stream, 0)
    if case.zero < 3:
        return own
    width = code.gather or w
    keep = (not case.reshard) | (
        np.greater(case.pp, 1) & (case.schedule not in ("gpipe", "1f1b") or not is_lmworks(case))
    )
    blocks = np.where(keep, part.layers, 0) + np.where(keep & (gathered > 1), 0, np.minimum(gathered, part.layers))
    root = code.weights * part.root if is_lmworks(case) else 0.0 * part.root  # ours keeps embedding and head gathered
    return own + width * np.minimum(part.block, code.bucket) * blocks + root


def reduction_buffers(case: Case, part: RankShare, later: bool) -> Number:
    """A block's gradients as they are made and as they are sent, where they are not held back; of ours the head's, and
    a rank's part of them: the top block's are sent when it is done, and under a pipeline all of them at the end. Those
    that were held back are sent block by block.
    """
    alone = np.equal(case.pp, 1)
    if is_lmworks(case) and case.zero in (1, 2):
        ranks = case.dp_shard * case.cp
        arriving = np.where(np.greater(ranks, 1) & alone, 1 + 1 / ranks, 0)
        return arriving * case.software.gradients * part.head
    if case.zero == 3 and is_lmworks(case):
        return case.software.reduce * part.block * (np.greater(case.accumulation, 1) & later & alone)
    if case.zero < 3:
        return 0.0 * part.block
    return (case.software.reduce + 2) * np.minimum(part.block, case.software.bucket)


def is_lmworks(case: Case) -> bool:
    return case.software.name.startswith("lmworks")
