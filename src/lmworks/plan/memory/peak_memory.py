"""What a step of one rank needs beside weights, states and gradients, at the moments that can be the highest.

    loss                     all activations, a chunk of logits
    backward, top block      all activations but the last sum, what the block computes again
    backward, lowest block   few activations (nearly all gradients are there by then)
    backward, last gradient  the embedding's, which is whole

In between every block swaps its activations for its gradients, so the highest point lies at an end. A pipeline rank
holds several micro-batches: its order of work is followed action by action, and the highest forward and backward pass
are its moments, before and after it has made its first gradients.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...spec import Grid, RunSpec, components
from ..activation_offload import offloadable_bytes, offloaded_bytes
from ..exact.weights import ROOT, stage_weights
from ..network import Network, network
from ..ops import Workload
from ..pipelines.orders import actions
from ..pipelines.stages import Stage, stages_of_rank
from ..policies import POLICIES, policies
from ..saved_activations import recomputed_bytes, saved_bytes, stream_bytes, total

LOSS, TOP, LOWEST, END = "loss", "backward, top block", "backward, lowest block", "backward, last gradient"
# Of a pipeline rank that has made gradients of an earlier micro-batch.
IN_BACKWARD = {LOSS: "a later micro-batch's forward pass", TOP: "a later micro-batch's backward pass"}


@dataclass(frozen=True)
class Row:
    name: str
    bytes: int
    how: str  # how it follows


def row(name: str, size: float, how: str) -> Row:
    return Row(name, round(size), how)


@dataclass(frozen=True)
class StageActivations:
    """One stage of a rank."""

    stage: Stage
    net: Network
    policies: tuple[str, ...]  # of each of its blocks
    casts: float  # bytes of one block's matrices in the precision of products, where each micro-batch casts them
    offloaded: tuple[float, ...]  # bytes of each block that wait in host memory

    @property
    def head(self) -> Any:
        """Weights of the head on this rank, where the stage has one."""
        return self.net.load.vocab * self.net.load.model.hidden * self.stage.last

    @property
    def hidden(self) -> Any:
        """Numbers in hidden states as the head sees them."""
        return self.net.load.tokens * self.net.load.model.hidden

    # --- kept from forward to backward ------------------------------------------------------------------

    def saved_rows(self, left: int | None = None) -> list[Row]:
        """Of one micro-batch; in its backward pass of the lowest `left` blocks: the loss and the last sum are gone.

        What a later stage received lies in a buffer of the pipeline. What waits in host memory is there only while all
        blocks are left: the lowest have it back.
        """
        over = left is not None
        groups = Counter(self.policies[:left])
        each = {policy: saved_bytes(self.net, policy) for policy in groups}
        away = sum(self.offloaded) if left in (None, len(self.policies)) else 0.0
        blocks = sum(count * each[policy][1] for policy, count in groups.items()) - stream_bytes(self.net) * over - away
        how = "; ".join(f"{n} × {each[policy][1]:,.0f} B: {each[policy][2]}" for policy, n in groups.items())
        how += f", less {away:,.0f} B in host memory" * bool(away)
        stem = max(saved_bytes(self.net, policy)[0] for policy in self.policies) if self.stage.first else 0.0
        outside = stem + total(self.net.loss) * (self.stage.last and not over)
        found = [
            row("activations of blocks", blocks, how + ", less the last sum" * over),
            row("activations outside blocks", outside, "embedding, position tables, final norm"),
            row("weight casts", self.casts * groups["none"], "2 B × matrices of blocks that are not computed again"),
        ]
        if self.stage.last and not over:
            w = self.net.load.width
            g = self.net.load.head_gradient
            loss = w * self.hidden + g * self.head
            found.append(row("loss: gradients", loss, f"{w} B × tokens × hidden + {g} B × vocab × hidden"))
        return found

    # --- comes and goes ---------------------------------------------------------------------------------

    def at_loss(self) -> list[Row]:
        """At the end of a forward pass, while a chunk of logits is there, beside what is kept.

        Autocast holds on to every cast until the pass is over, those of recomputed blocks as well.
        """
        load = self.net.load
        recomputed = sum(policy != "none" for policy in self.policies)
        casts = row(
            "weight casts",
            self.casts * recomputed,
            "2 B × matrices of the blocks, until the forward pass is over",
        )
        if not self.stage.last:
            return [casts]
        logits = load.chunk_rows * load.logit_columns
        chunk = chunk_bytes(load, self.head)
        inputs = load.width * self.hidden + (2 * self.head if load.cast else 0)
        if load.cast and load.tp == 1:
            inputs += 4 * self.hidden
        return [
            casts,
            row(
                "loss: chunk of logits",
                chunk,
                f"{load.chunk_rows:,} tokens × {load.logit_columns:,} logits, {chunk / logits:.3g} B each",
            ),
            row("loss: inputs", inputs, "final hidden states, and casts of them and of the head under autocast"),
        ]

    def at_backward(self) -> list[Row]:
        """Inside the MLP of a block, beside what is kept: gradients, and what the block computes again."""
        load, m = self.net.load, self.net.load.model
        w, g, slots = load.width, load.software.gradients, load.tokens * m.top_k
        policy = self.policies[-1]
        once_more = recomputed_bytes(self.net, policy) + self.casts * (policy != "none")
        stream = stream_bytes(self.net)
        # Gradients beside what is saved (the result's takes its place): swiglu of silu(gate) and up, gelu of its input.
        beside = 2 if m.mlp == "swiglu" else 1
        size: float = stream * (2 if load.cast else 1)
        if load.tp > 1 and not load.sp:  # the input's gradient, from two products, before ranks add it up
            size += 2 * w * self.hidden
        if m.experts:
            ffn, count = m.expert_ffn // load.tp, m.experts // load.ep
            whole = count * ffn * m.hidden
            # Experts run one after another: at first the gradient of every slot is there, at last all experts'
            # gradients, one of them joined already, and the rows' gradient, twice; what they kept is gone by then.
            first = slots * w * m.hidden + beside * ffn * slots / count * w + g * ffn * m.hidden
            last = 4 * g * whole + 2 * slots * w * m.hidden - slots * w * (4 * ffn + m.hidden)
            size += max(first, last)
        else:
            ffn = m.ffn // load.tp
            size += beside * ffn * load.tokens * w + g * ffn * m.hidden
        return [
            row("recomputed block", once_more, "what one block saves, less what it kept"),
            row("backward temporaries", size, "gradients inside one MLP and of the residual stream"),
        ]

    def offloaded_total(self) -> float:
        """Of a micro-batch whose inputs have their gradients and whose weights have not: results' gradients."""
        return float(len(self.policies) * total(self.net.block, "saved_selective"))


def chunk_bytes(load: Workload, head: Any) -> Any:
    """Of the loss when a chunk of logits is there.

    Of a logit: itself, its fp32 copy and log p; where the vocabulary is cut only the first two, in fp32 one; where its
    gradient takes its place nothing else. On a GPU softmax reads fp16 itself, but not bf16. Then, where logits were
    cast, there is the product that is added to the head's gradient.
    """
    logits, cut = load.chunk_rows * load.logit_columns, np.greater(load.tp, 1)
    held = load.width * logits * components.head(load.model).saved_logits
    if load.in_place:
        return held + load.width * logits
    if not load.is_16_bit:
        return held + np.where(cut, 4, 8)[()] * logits
    each = np.where(cut, 6, 6 if load.dtype == "fp16" and load.device == "cuda" else 10)[()]
    return np.maximum(held + each * logits, 2 * logits + 2 * head)


def stage_activations(spec: RunSpec, rank: int, device: str, gathered: bool) -> list[StageActivations]:
    """`gathered`: weights come in the precision of products, and nothing is cast."""
    net = network(Workload.of(spec, device))
    found = []
    for stage in stages_of_rank(spec, Grid.of(spec.parallel).coordinates(rank)["pp"]):
        matrices = sum(w.size for w in stage_weights(spec, stage) if w.unit != ROOT and len(w.shape) > 1)
        casts = 2.0 * matrices / len(stage.layers) * net.load.cast_share * (not gathered)
        chosen = tuple(policies(spec, stage.layers))
        most = {rung: float(offloadable_bytes(net, rung)) for rung in POLICIES}
        found.append(StageActivations(stage, net, chosen, casts, tuple(offloaded_bytes(spec, chosen, most))))
    return found


def candidate_peaks(spec: RunSpec, rank: int, device: str, gathered: bool) -> dict[str, list[Row]]:
    found = stage_activations(spec, rank, device, gathered)
    if spec.parallel.pp > 1:
        return pipeline_peaks(spec, rank, found)
    (piece,) = found
    return {
        LOSS: [*piece.saved_rows(), *piece.at_loss()],
        TOP: [*piece.saved_rows(len(piece.policies)), *piece.at_backward()],
        # Where some waited, the lowest block has its own back while the one above works.
        LOWEST: [*piece.saved_rows(2 if any(piece.offloaded) else 1), *piece.at_backward()],
        END: at_end(spec, piece),
    }


def at_end(spec: RunSpec, piece: StageActivations) -> list[Row]:
    """The embedding's gradient comes last, and is added to a tied head's."""
    copies = (spec.model.tie_embeddings * piece.stage.last + (spec.accumulation > 1)) * piece.stage.first
    code = piece.net.load.software
    table = code.gradients * piece.net.load.vocab * spec.model.hidden
    how = f"{copies} × {code.gradients} B × vocab × hidden before it is added"
    return [
        row("embedding gradient", copies * table, how),
        row("gradient of the stream", stream_bytes(piece.net), f"{code.stream} B × tokens × hidden"),
    ]


# --- pipelines ------------------------------------------------------------------------------------------


def pipeline_peaks(spec: RunSpec, rank: int, found: list[StageActivations]) -> dict[str, list[Row]]:
    """The highest forward and the highest backward pass of the rank's order of work, and the end."""
    layout = spec.parallel
    orders = actions(layout.schedule, layout.pp, layout.virtual_stages, spec.accumulation)
    by_index = {piece.stage.index: piece for piece in found}
    in_flight: Counter[int] = Counter()  # micro-batches whose activations a stage keeps
    weight_pending: Counter[int] = Counter()  # of these, with gradients of inputs and not of weights
    highest: dict[str, tuple[int, list[Row]]] = {}
    begun = False
    for stage, kind, _ in orders[Grid.of(layout).coordinates(rank)["pp"]]:
        piece = by_index[stage]
        in_flight[stage] += kind == "F"
        if kind != "W":
            rows = in_flight_activations(by_index, in_flight, weight_pending, stage if kind != "F" else None)
            rows = merged([*rows, *(piece.at_loss() if kind == "F" else piece.at_backward())])
            moment = LOSS if kind == "F" else TOP
            name, size = IN_BACKWARD[moment] if begun else moment, sum(one.bytes for one in rows)
            highest[name] = max(highest.get(name, (-1, [])), (size, rows), key=lambda one: one[0])
        split = kind == "I" and layout.recompute == "none"  # else I is all of the backward pass
        weight_pending[stage] += split - (kind == "W" and weight_pending[stage] > 0)
        in_flight[stage] -= kind in "BI" if not split else 0
        in_flight[stage] -= kind == "W" and layout.recompute == "none"
        begun = begun or kind != "F"
    return {moment: rows for moment, (_, rows) in highest.items()} | {END: at_end(spec, found[0])}


def in_flight_activations(
    by_index: dict[int, StageActivations], in_flight: Counter[int], weight_pending: Counter[int], back: int | None
) -> list[Row]:
    """Of all micro-batches of all stages; one of stage `back` is in its backward pass."""
    rows: list[Row] = []
    for index, piece in by_index.items():
        count = in_flight[index]
        if index == back:
            count -= 1
            rows += piece.saved_rows(len(piece.policies))
        rows += [Row(one.name, count * one.bytes, f"{count} × ({one.how})") for one in piece.saved_rows() if count]
        if weight_pending[index]:
            rows.append(
                row(
                    "gradients that wait",
                    weight_pending[index] * piece.offloaded_total(),
                    "of results, for their weights'",
                )
            )
    return rows


def merged(rows: list[Row]) -> list[Row]:
    """One of each name."""
    found: dict[str, Row] = {}
    for one in rows:
        before = found.get(one.name)
        how = f"{before.how} + {one.how}" if before else one.how
        found[one.name] = Row(one.name, one.bytes + (before.bytes if before else 0), how)
    return list(found.values())
