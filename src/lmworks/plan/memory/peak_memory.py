"""What a step of one rank needs beside weights, states and gradients, at the moments that can be the highest.

    loss                     all activations, a chunk of logits
    backward, top block      all activations but the last sum, what the block computes again
    backward, lowest block   few activations (nearly all gradients are there by then)
    backward, last gradient  the embedding's, which is whole

In between every block swaps its activations for its gradients, so the highest point lies at an end. A pipeline rank
holds several micro-batches: its order of work is followed action by action, and the highest forward and backward pass
are its moments, before and after it has made its first gradients. Numbers may be arrays, one element per candidate.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...spec import components
from ...spec.layout import RESIDENT_BLOCKS, SPLIT_BACKWARD
from ...spec.lora import ADAPTERS
from ..activation_offload import offloading_blocks, pinned_bytes
from ..adapters import weight_readers
from ..case import Case, Number
from ..exact.shards import rank_stages
from ..network import Network, network
from ..ops import Workload
from ..passes import CROSS_ENTROPY, DIVERGENCE, SCALAR
from ..pipelines.in_flight import PassKind, pass_states
from ..saved_activations import recomputed_bytes, saved_bytes, stream_bytes, total
from .rank_weights import Place, RankWeights, distinct, distinct_rows, rank_weights

COMPARED_TABLES = 5  # of fp32 numbers, as large as a chunk of logits, while distributions are compared
LOSS, TOP, LOWEST, END = "loss", "backward, top block", "backward, lowest block", "backward, last gradient"
# Of a pipeline rank that has made gradients of an earlier micro-batch.
IN_BACKWARD = {LOSS: "a later micro-batch's forward pass", TOP: "a later micro-batch's backward pass"}
MOMENTS: dict[PassKind, str] = {
    ("F", False): LOSS, ("B", False): TOP, ("F", True): IN_BACKWARD[LOSS], ("B", True): IN_BACKWARD[TOP],
}  # fmt: skip

# Bytes of one logit when the loss is highest, of code that holds all logits at once. Plain code has log p, its gradient
# and that of the logits, in fp32, and over a vocabulary that is cut one more; compiled code the logits as they came and
# in fp32; a fused loss writes gradients over the logits.
LOGIT_BYTES = {"plain": 12, "compiled": 6, "fused": 2}
CUT_LOGIT_BYTES = {"plain": 4, "compiled": 0, "fused": 0}
# Bytes of one logit that the allocator keeps from the forward pass, as nothing fits there: those as they came.
UNUSABLE_LOGIT_BYTES = {"plain": 2, "compiled": 0, "fused": 0}


@dataclass(frozen=True)
class Row:
    name: str
    bytes: Any  # an int, or an array of candidates
    how: str  # how it follows; of one candidate


def row(name: str, size: Number, how: str, *numbers: Any) -> Row:
    """`how` is a template of these numbers, filled for one candidate."""
    return Row(name, size, "") if np.ndim(size) else Row(name, round(float(size)), how.format(*numbers))


def times(count: Number, rows: Iterable[Row]) -> list[Row]:
    if not np.any(count):
        return []
    if np.ndim(count):
        return [Row(one.name, count * one.bytes, "") for one in rows]
    count = int(count)
    return [Row(one.name, count * one.bytes, f"{count} × ({one.how})" if count > 1 else one.how) for one in rows]


def merged(rows: Iterable[Row]) -> list[Row]:
    """One of each name."""
    found: dict[str, Row] = {}
    for one in rows:
        before = found.get(one.name)
        if before is not None:
            how = f"{before.how} + {one.how}" if before.how and one.how and np.any(one.bytes) else before.how
            one = Row(one.name, one.bytes + before.bytes, how)
        found[one.name] = one
    return list(found.values())


def sum_bytes(rows: Iterable[Row]) -> Any:
    return sum(one.bytes for one in rows)


# --- stages of a rank -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankStages:
    """Of each stage of a rank; one that only other candidates have is empty."""

    layers: tuple[Any, ...]
    begin: tuple[Any, ...]  # its first block
    first: tuple[Any, ...]  # it holds the embedding
    last: tuple[Any, ...]  # it holds the final norm and the head


def stages_of_place(case: Case, place: Place) -> RankStages:
    most = int(np.max(case.virtual))

    def one(pp: int, virtual: int, rank: int) -> RankStages:
        found = rank_stages(case.replace(pp=pp, virtual=virtual), rank)
        rest = most - len(found)
        return RankStages(
            (*(len(stage.layers) for stage in found), *[0] * rest),
            (*(stage.layers.start for stage in found), *[0] * rest),
            (*(stage.first for stage in found), *[False] * rest),
            (*(stage.last for stage in found), *[False] * rest),
        )

    return distinct(one, case.pp, case.virtual, place.pp)


# --- activations ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activations:
    """Of one micro-batch on one rank, stage by stage."""

    case: Case
    net: Network
    weights: RankWeights
    stages: RankStages
    teacher_root: Any = 0.0  # numbers of a teacher's weights outside of blocks that FSDP2 has gathered for the loss

    @classmethod
    def of(cls, case: Case, place: Place) -> Self:
        load = replace(Workload.of_case(case), device=case.device, documents=case.documents)
        weights = rank_weights(case, place)
        gathered: Any = 0.0
        if case.teacher is not None:
            frozen = rank_weights(case.replace(model=case.teacher, adapters=(), frozen_base=""), place)
            gathered = np.where(np.equal(weights.sharding, "fsdp2"), frozen.gathered_root, 0)[()]
        return cls(case, network(load), weights, stages_of_place(case, place), gathered)

    @functools.cached_property
    def casts(self) -> Any:
        """Bytes of one block's matrices in the precision of products, where each micro-batch casts them."""
        gathered = (
            np.char.startswith(self.weights.sharding, "fsdp")[()] if self.case.is_lmworks else self.case.zero == 3
        )
        return 2.0 * self.weights.matrices * self.net.load.cast_share * np.where(gathered, 0, 1)[()]

    @functools.cached_property
    def head(self) -> Any:
        """Weights of the head on this rank."""
        return self.net.load.vocab * self.net.load.model.hidden

    @functools.cached_property
    def hidden(self) -> Any:
        """Numbers in hidden states as the head sees them."""
        return self.net.load.tokens * self.net.load.model.hidden

    @functools.cached_property
    def saved(self) -> dict[str, tuple[Any, Any, str]]:
        """By policy: bytes of the embedding, of one block, and how the latter are made up."""
        return {policy: saved_bytes(self.net, policy) for policy in self.policy_names}

    @functools.cached_property
    def without_gradient(self) -> Any:
        """Bytes that the first block of the network does not save: its input has no gradient where the embedding is
        frozen, nor has anything up to the first weight that is trained. Of a block that is computed again, nothing."""
        if not self.case.adapters or self.case.recompute not in ("none", "attention"):
            return 0
        model = self.case.model
        below: Any = stream_bytes(self.net) * (model.norm_placement != "post")  # the input of the first norm
        for op in self.net.block:
            if any(kernel.over_tokens for kernel in op.backward):
                break
            below = below + op.copies * (sum(op.saved) - op.for_weights) + op.indices
        return below

    @functools.cached_property
    def casts_without_gradient(self) -> Any:
        """Bytes of casts that the first block does not hold: a product whose input has no gradient keeps no weight."""
        case = self.case
        if not case.adapters or case.recompute not in ("none", "attention"):
            return 0
        tp, numbers = int(np.max(case.tp)), 0.0 * case.tp
        first: components.Linear | None = None
        for linear in components.linears(self.case.model):
            if first is not None and linear.reads != first.reads:
                break
            down = [weight for weight in case.adapters if weight.name.startswith(f"{linear.name}.{ADAPTERS}.")][:1]
            first = first or (linear if down else None)
            for weight in (*([] if case.frozen_base else linear.weights()), *down):
                cast = weight.size * (len(weight.shape) > 1)
                numbers = numbers + cast / (case.tp if weight.sharded(tp) is not None else 1)
        return self.casts / np.maximum(1, self.weights.matrices) * numbers

    @property
    def policy_names(self) -> list[str]:
        recompute = self.case.recompute
        if recompute == "budget":
            return sorted({policy for _, chosen in self.case.policies for policy in chosen})
        return ["full", "none"] if recompute == "full" else [recompute]

    def policies(self, stage: int, left: Number | None = None, skip: int = 0) -> dict[str, Any]:
        """Blocks of a stage by policy: of all, of the lowest `left`, or of all but the topmost `skip`."""
        layers, begin, case = self.stages.layers[stage], self.stages.begin[stage], self.case
        count = np.maximum(0, (layers if left is None else np.minimum(left, layers)) - skip)[()]
        if case.recompute == "budget":
            chosen = dict(case.policies)[int(layers)][: int(count)]
            return {policy: chosen.count(policy) for policy in self.policy_names}
        if case.recompute != "full":
            return {case.recompute: count}
        every = case.recompute_every
        again = -(-(begin + count) // every) - -(-begin // every)
        return {"none": count - again, "full": again}

    # --- in host memory ---------------------------------------------------------------------------------

    @functools.cached_property
    def offloaded(self) -> list[tuple[Any, Any]]:
        """(blocks, bytes that each sends to host memory): evenly by all but the last two."""
        if not np.any(self.case.offload_activations):
            return []
        return offloading_blocks(self.case, self.net, self.policies(0, skip=RESIDENT_BLOCKS))

    @property
    def offloaded_total(self) -> Any:
        return sum(count * size for count, size in self.offloaded)

    @property
    def pinned(self) -> Any:
        """Pinned host memory for it."""
        return sum(count * pinned_bytes(size) for count, size in self.offloaded)

    # --- kept from forward to backward ------------------------------------------------------------------

    def kept(self, stage: int) -> list[Row]:
        """After a forward pass. What a later stage of our own pipelines received lies in a buffer of the pipeline."""
        last = self.stages.last[stage]
        away = self.offloaded_total if stage == 0 else 0.0
        found = self.kept_by_blocks(stage, self.policies(stage), away, "")
        if self.case.software.loss != "chunked":  # the loss itself keeps nothing: it is worked out and left at once
            return [*found, row("activations outside blocks", self.outside(stage), "embedding, position tables")]
        w, g = self.net.load.width, self.net.load.head_gradient * (not self.case.adapters)
        outside = self.outside(stage) + total(self.net.loss) * last
        if self.case.head not in (CROSS_ENTROPY, DIVERGENCE):  # which have their gradients when the pass is over
            how = "embedding, position tables, final norm, hidden states"
            return [*found, row("activations outside blocks", outside, how)]
        loss = (w * self.hidden + g * self.head) * last
        return [
            *found,
            row("activations outside blocks", outside, "embedding, position tables, final norm"),
            row("loss: gradients", loss, "{} B × tokens × hidden + {} B × vocab × hidden", w, g),
        ]

    def kept_in_backward(self, stage: int, lowest: Number | None = None) -> list[Row]:
        """While the topmost block, or one of the lowest, runs backward: the loss and the last sum are gone.

        What waits in host memory is there only while all blocks are left: the lowest have it back.
        """
        away = self.offloaded_total if stage == 0 and lowest is None else 0.0
        away = away + stream_bytes(self.net) * self.case.is_lmworks
        found = self.kept_by_blocks(stage, self.policies(stage, lowest), away, ", less the last sum")
        return [*found, row("activations outside blocks", self.outside(stage), "embedding, position tables")]

    def kept_by_blocks(self, stage: int, groups: Mapping[str, Any], away: Any, less: str) -> list[Row]:
        below = self.without_gradient * self.stages.first[stage]
        blocks = sum(count * self.saved[policy][1] for policy, count in groups.items()) - away - below
        how = ""
        if not np.ndim(blocks):
            parts = (f"{n} × {self.saved[kind][1]:,.0f} B: {self.saved[kind][2]}" for kind, n in groups.items() if n)
            offloaded = f", less {self.offloaded_total:,.0f} B in host memory" if self.offloaded_total else ""
            lowest = f", less {below:,.0f} B below the first adapter" if below else ""
            how = "; ".join(parts) + offloaded + lowest + less
        casts = self.casts * groups.get("none", 0) - self.casts_without_gradient * self.stages.first[stage]
        return [
            row("activations of blocks", blocks, how),
            row("weight casts", casts, "2 B × matrices of blocks that are not computed again"),
        ]

    def outside(self, stage: int) -> Any:
        """What the embedding saves. Others keep what a rank received too, of which each of its stages has its part."""
        chosen = self.policies(stage)
        plain = total(self.net.stem)
        stems = (np.where(np.greater(n, 0), self.saved[policy][0], plain) for policy, n in chosen.items())
        stem = functools.reduce(np.maximum, stems)[()]
        if self.case.is_lmworks:
            return stem * self.stages.first[stage]
        received = np.where(sum(self.stages.first), stem, stream_bytes(self.net))[()]
        return received / self.case.virtual

    # --- comes and goes ---------------------------------------------------------------------------------

    def at_loss(self, stage: int) -> list[Row]:
        """At the end of a forward pass, while logits are there, beside what is kept.

        Autocast holds on to every cast until the pass is over, those of recomputed blocks as well.
        """
        load, last = self.net.load, self.stages.last[stage]
        recomputed = sum(count for policy, count in self.policies(stage).items() if policy != "none")
        trained = self.weights.block / self.weights.matrices if self.case.adapters else 1  # autocast holds no others
        how = "2 B × matrices of the blocks, until the forward pass is over"
        casts = row("weight casts", self.casts * recomputed * trained, how)
        if self.case.software.loss != "chunked":
            return [casts, *self.whole_loss(stage)]
        if self.case.head not in (CROSS_ENTROPY, DIVERGENCE):
            return [casts, *self.answer_head(stage)]
        logits, chunk = load.chunk_rows * load.logit_columns, chunk_bytes(load, self.head)
        inputs = load.width * self.hidden + (2 * self.head if load.cast else 0)
        if load.cast:
            inputs = inputs + 4 * self.hidden * np.equal(load.tp, 1)
        return [
            casts,
            row(
                "loss: chunk of logits",
                chunk * last,
                "{:,} tokens × {:,} logits, {:.3g} B each",
                load.chunk_rows,
                load.logit_columns,
                chunk / logits,
            ),
            row("loss: inputs", inputs * last, "final hidden states, and casts of them and of the head under autocast"),
            *self.of_teacher(),
        ]

    def of_teacher(self) -> list[Row]:
        """What the divergence from a teacher reads."""
        if self.case.teacher is None:
            return []
        load, width = self.net.load, self.case.teacher.hidden
        head = self.case.software.weights * self.teacher_root + (2 * load.vocab * width if load.cast else 0)
        return [
            row("teacher: hidden states", load.width * load.tokens * width, "{} B × tokens × hidden", load.width),
            row("teacher: head", head, "as FSDP2 gathers it, and its cast under autocast"),
        ]

    def answer_head(self, stage: int) -> list[Row]:
        """Of log-probabilities or of one number a token, at the highest moment of its passes, beside what is kept.

        The backward pass makes a chunk of logits again and turns it into its gradient, while the gradients of the
        hidden states and of the head are made.
        """
        load, last = self.net.load, self.stages.last[stage]
        states = load.width * self.hidden
        if self.case.head == SCALAR:
            return [row("loss: gradients", states * last, "{} B × tokens × hidden", load.width)]
        forward, backward = logprob_chunk_bytes(load)
        cast = 2 * self.head if load.cast else 0
        gradients = states + load.head_gradient * self.head * (not self.case.adapters)
        inputs = 4 * self.hidden if load.cast else 0
        in_backward = np.greater(backward + gradients, forward + inputs)
        logits = load.chunk_rows * load.logit_columns
        chunk = np.where(in_backward, backward, forward)[()]
        how = "{:,} tokens × {:,} logits, {:.3g} B each"
        numbers = load.chunk_rows, load.logit_columns, chunk / logits
        return [
            row("loss: chunk of logits", chunk * last, how, *numbers),
            row("loss: inputs", (cast + np.where(in_backward, 0, inputs)[()]) * last, "casts under autocast"),
            row("loss: gradients", np.where(in_backward, gradients, 0)[()] * last, "of the hidden states and the head"),
        ]

    def whole_loss(self, stage: int) -> list[Row]:
        """Of code that holds all logits at once: hidden states as tensor-parallel ranks gather them, and a gradient."""
        load, code, last = self.net.load, self.case.software, self.stages.last[stage]
        each = code.logit_bytes or LOGIT_BYTES[code.loss] + CUT_LOGIT_BYTES[code.loss] * np.greater(load.tp, 1)
        inputs = total(self.net.loss, "saved") - total(self.net.loss[-1:])
        inputs = inputs + load.width * self.hidden * (1 + np.greater(load.tp, 1))
        weights = code.wgrad_placeholder * self.head
        if self.case.zero == 3:  # gathered, and its gradient as it is made and as it is sent
            weights = weights + (2 * load.width + code.reduce) * self.head
        logits = each / 2 * load.width * load.tokens * load.vocab
        return [
            row("loss: logits", logits * last, "{:.3g} B × tokens × vocab", each * load.width / 2),
            row("loss: inputs", inputs * last, "final hidden states and their gradient"),
            row("loss: gradients", weights * last, "the head, gathered, and its gradient"),
        ]

    def unusable(self) -> Any:
        """Bytes of logits that the allocator keeps after the forward pass of the loss."""
        code = self.case.software
        if self.case.software.loss == "chunked" or code.logit_bytes:
            return 0.0
        count = self.net.load.tokens * self.net.load.vocab
        return UNUSABLE_LOGIT_BYTES[code.loss] * count * sum(self.stages.last)

    def at_backward(self, stage: int) -> list[Row]:
        """Inside the MLP of a block, beside what is kept: gradients, and what the block computes again."""
        below = self.policies(stage, skip=1)
        again = sum(  # by the policy of the topmost block
            (count - below[policy]) * (recomputed_bytes(self.net, policy) + self.casts * (policy != "none"))
            for policy, count in self.policies(stage).items()
        )
        return [
            row("recomputed block", again, "what one block saves, less what it kept"),
            row("backward temporaries", self.temporaries, "gradients inside one MLP and of the residual stream"),
            row("dequantized weight", self.dequantized, "the largest of a block, beyond gradients inside the MLP"),
        ]

    @functools.cached_property
    def dequantized(self) -> Any:
        """Bytes while a quantized weight is multiplied: 4 for a level and 4 for the product with its scale, 1 for a
        code; and as it is multiplied, if that is 16 bits. The gradients inside the MLP are not there at that moment."""
        if not self.case.frozen_base:
            return 0
        linears = components.linears(self.case.model)
        size = max(linear.inputs * linear.outputs for linear in linears) / self.case.tp
        whole = (9 + (self.net.load.width == 2) * 2) * size
        return np.maximum(0, whole - self.temporaries + stream_bytes(self.net))

    @functools.cached_property
    def temporaries(self) -> Any:
        load, m = self.net.load, self.net.load.model
        g = load.software.gradients * (not self.case.adapters)  # of a weight's gradient; adapters' are small
        w, slots = load.width, load.tokens * m.top_k
        # Gradients beside what is saved (the result's takes its place): swiglu of silu(gate) and up, gelu of its input.
        beside = 2 if m.mlp == "swiglu" else 1
        if load.frozen:  # the result has two gradients, of the weight and of its adapter; without one nobody kept it
            beside = 2 if m.mlp != "swiglu" or weight_readers(load, "mlp", 1) else 3
        size = stream_bytes(self.net) * (2 if load.cast else 1)
        if not self.case.is_lmworks:  # weights' gradients are in buffers of their own; ranks add up gathered inputs'
            moved = 2 * w * slots * m.hidden if m.experts else 0
            rows, ffn = (slots, m.expert_ffn) if m.experts else (load.tokens, m.ffn)
            return size + beside * w * rows * ffn // load.tp + moved + w * self.hidden * np.greater(load.tp, 1)
        if not load.sp:  # the input's gradient, from two products, before ranks add it up
            size = size + 2 * w * self.hidden * np.greater(load.tp, 1)
        if not m.experts:
            ffn = m.ffn // load.tp
            return size + beside * ffn * load.tokens * w + g * ffn * m.hidden
        ffn, count = m.expert_ffn // load.tp, m.experts // load.ep
        whole = count * ffn * m.hidden
        if load.grouped_experts:
            # The results' gradients first; at last those of a matrix and of the rows, twice, where results and what
            # the products kept is gone.
            return size + np.maximum(slots * w * m.hidden, g * whole + slots * w * (m.hidden - ffn))
        # Experts run one after another: at first the gradient of every slot is there, at last all experts' gradients,
        # one of them joined already, and the rows' gradient, twice; what they kept is gone by then.
        first = slots * w * m.hidden + beside * ffn * slots / count * w + g * ffn * m.hidden
        last = 4 * g * whole + 2 * slots * w * m.hidden - slots * w * (4 * ffn + m.hidden)
        return size + np.maximum(first, last)


def chunk_bytes(load: Workload, head: Any) -> Any:
    """While one chunk's loss is highest.

    With log-probabilities, their gradient and, in 16 bits, an fp32 or 16-bit copy; over a vocabulary that is cut only
    the first two, in fp32 one; where its gradient takes its place nothing else. On a GPU softmax reads fp16 itself, but
    not bf16. Then, where logits were cast, there is the product that is added to the head's gradient.
    """
    logits, cut = load.chunk_rows * load.logit_columns, np.greater(load.tp, 1)
    if load.head == DIVERGENCE:
        return divergence_chunk_bytes(load, head)
    held = load.width * logits * components.saved_logits(load.model)
    if load.in_place:
        return held + load.width * logits
    if not load.is_16_bit:
        return held + np.where(cut, 4, 8)[()] * logits
    each = np.where(cut, 6, 6 if load.dtype == "fp16" and load.device == "cuda" else 10)[()]
    return np.maximum(held + each * logits, 2 * logits + 2 * head)


def divergence_chunk_bytes(load: Workload, head: Any) -> Any:
    """Log-probabilities of student and teacher and what is made of them in fp32; in 16 bits the student's logits too.

    The most that any of the divergences has at once. On a CPU, in 16 bits, there is later a product that is added to
    the head's gradient.
    """
    logits = load.chunk_rows * load.logit_columns
    slope = load.width * components.saved_logits(load.model)
    compared = (4 * COMPARED_TABLES + (load.width if load.is_16_bit else 0) + slope) * logits
    return np.maximum(compared, 2 * logits + 2 * head) if load.is_16_bit and load.device == "cpu" else compared


def logprob_chunk_bytes(load: Workload) -> tuple[Any, Any]:
    """Of a chunk of logits with what is made of it: for its log-probabilities, and for its gradient.

    Plain code has the logits, in 16 bits a copy in fp32, and forward the terms of log Σ exp; kernels work in place.
    """
    logits = load.chunk_rows * load.logit_columns
    held = load.width * logits * components.saved_logits(load.model)
    if load.in_place:
        return load.width * logits, held + load.width * logits
    wide = (load.width + 4 if load.is_16_bit else 4) * logits
    return wide + 4 * logits, held + wide


# --- moments --------------------------------------------------------------------------------------------


def candidate_peaks(work: Activations, place: Place) -> dict[str, list[Row]]:
    """Rows of every moment that can be the highest. One that a candidate has not has no rows, or nothing in them."""
    case = work.case
    found = pass_peaks(work, place)
    piped = np.greater(case.pp, 1)
    if not np.all(piped):
        # Where some waited, the lowest block has its own back while the one above works.
        lowest = np.where(np.greater(work.offloaded_total, 0), 2, 1)[()]
        rows = [*work.kept_in_backward(0, lowest), *work.at_backward(0)]
        found[LOWEST] = times(np.where(piped, 0, 1)[()], rows)
    return found | {END: at_end(work)}


def at_end(work: Activations) -> list[Row]:
    """The embedding's gradient comes last, and is added to a tied head's."""
    case, code = work.case, work.case.software
    first = sum(work.stages.first) * (not case.adapters)
    tied = sum(f & e for f, e in zip(work.stages.first, work.stages.last, strict=True))
    table = work.net.load.vocab * case.model.hidden
    if not case.is_lmworks:
        each = code.gradients if code.master == 0 else work.net.load.width
        rest = stream_bytes(work.net) * (case.zero < 3)
        return [row("embedding gradient", each * table * first, ""), row("gradient of the stream", rest, "")]
    copies = (case.model.tie_embeddings * tied + np.greater(case.accumulation, 1)) * first
    return [
        row(
            "embedding gradient",
            copies * code.gradients * table,
            "{} × {} B × vocab × hidden before it is added",
            copies,
            code.gradients,
        ),
        row("gradient of the stream", stream_bytes(work.net), "{} B × tokens × hidden", code.stream),
    ]


def pass_peaks(work: Activations, place: Place) -> dict[str, list[Row]]:
    """The highest forward and the highest backward pass, before and after the first gradients are made."""
    slots = range(len(work.stages.layers))
    kept, forward = [work.kept(slot) for slot in slots], [work.at_loss(slot) for slot in slots]
    backward = [[*work.kept_in_backward(slot), *work.at_backward(slot)] for slot in slots]
    # Of a micro-batch whose inputs have their gradients and whose weights have not: results' gradients.
    waiting = [work.stages.layers[slot] * total(work.net.block, "saved_selective") for slot in slots]
    chosen = highest_states(
        work.case, place, *(np.array(np.broadcast_arrays(*sizes)) for sizes in (
            [*map(sum_bytes, kept)], waiting, [*map(sum_bytes, forward)], [*map(sum_bytes, backward)],
        ))
    )  # fmt: skip
    found = {}
    for moment, (in_flight, pending, at_work) in chosen.items():
        rows: list[Row] = []
        for slot in slots:
            rows += times(in_flight[slot], kept[slot])
            rows += times(at_work[slot], forward[slot] if moment in (LOSS, IN_BACKWARD[LOSS]) else backward[slot])
            rows += times(pending[slot], [row("gradients that wait", waiting[slot], "of results, for their weights'")])
        found[moment] = merged(rows)
    return found


def highest_states(case: Case, place: Place, *sizes: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """By moment the highest state of each candidate: micro-batches in flight, pending, and 1 for the stage at work.

    `sizes`: bytes of each stage (stages, candidates): kept by a micro-batch, pending, at work forward, and backward.
    """
    columns = (case.pp, case.virtual, case.accumulation, place.pp)
    shape = np.broadcast_shapes(*(np.shape(column) for column in columns), *(size.shape[1:] for size in sizes))
    kept, waiting, forward, backward = (
        np.stack([np.broadcast_to(one, shape).reshape(-1) for one in size]) for size in sizes
    )
    slots, count = kept.shape
    rows, where = distinct_rows([np.broadcast_to(column, shape) for column in columns])
    whole = case.recompute != "none" or case.schedule not in SPLIT_BACKWARD
    found: dict[str, NDArray[Any]] = {}
    candidates = np.split(np.argsort(where, kind="stable"), np.cumsum(np.bincount(where))[:-1])
    for pipeline, mine in zip(rows, candidates, strict=True):
        for moment, states in pass_states(case.schedule, *pipeline, whole).items():
            stages = states.shape[1] // 3
            work = forward if moment[0] == "F" else backward
            each = np.concatenate([size[:stages, mine] for size in (kept, waiting, work)])
            best = found.setdefault(MOMENTS[moment], np.zeros((3, slots, count)))
            best[:, :stages, mine] = states[(states @ each).argmax(axis=0)].T.reshape(3, stages, -1)
    return {moment: best.reshape(3, slots, *shape) for moment, best in found.items()}
