"""What data parallelism adds to a step, at the moments that can be the highest: gradients, gathered weights, messages.

    gathered weights   FSDP with reshard: the root, the block at work and the one fetched ahead; without: all, and in
                       the backward pass those not yet done
    whole gradients    FSDP: of the root and of the block at work, or of everything while micro-batches accumulate
                       (gradients meet after the last); ZeRO-2: of buckets that are not complete; DDP keeps its buckets
                       from step to step, and holds gradients beside them while micro-batches accumulate
    in flight          one block's, or two buckets', message and what it becomes; gloo also copies what it reduces, and
                       ZeRO-2's last buckets are still on their way while the next micro-batch runs

An estimate: what is exact is `rank_weights.resident`, which all of it stands on. Numbers may be arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..case import Case, Number
from ..exact.shards import gathered_bytes
from .peak_memory import END, IN_BACKWARD, LOSS, LOWEST, TOP, Row, row
from .rank_weights import AT_END, AT_LOWEST, AT_TOP, BEFORE, RankWeights, Resident

REDUCED, UPDATED = "reduction of the last gradients", "new weights on their way"
NAMES = {"gradients": "gradients", "gathered": "gathered weights", "flying": "messages"}
EXPLANATIONS = {
    "gradients": "of weights whose gradients are held, whole or this rank's part",
    "gathered": "weights of the root and of blocks at work, and copies of a gather",
    "flying": "gradients or weights on their way, and what comes of them",
}
PLACES = {LOSS: BEFORE, TOP: AT_TOP, LOWEST: AT_LOWEST, END: AT_END}
Sizes = dict[str, dict[str, Any]]  # bytes by moment and by NAMES


@dataclass(frozen=True)
class DpState:
    case: Case
    weights: RankWeights
    state: Resident
    copies: int  # of a message: gloo makes another
    accumulates: Any  # gradients of earlier micro-batches are there

    @property
    def each(self) -> int:
        """Bytes of a weight, and of its gradient."""
        return self.case.software.gradients

    @property
    def reduced(self) -> dict[str, Number]:
        """Elements whose gradient a backward pass has made."""
        head, own = self.weights.head, self.weights
        return {LOSS: 0 * head, TOP: head, LOWEST: head + (own.layers - 1) * own.block, END: own.size}


def dp_buffers(case: Case, weights: RankWeights, state: Resident, copies: int) -> dict[str, list[Row]]:
    """Rows by moment. In a pipeline the first passes find no gradients."""
    several, piped = np.greater(case.accumulation, 1), np.greater(case.pp, 1)
    later = by_strategy(DpState(case, weights, state, copies, several))
    sizes = later
    if np.any(piped):
        before = by_strategy(DpState(case, weights, state, copies, np.zeros_like(several)))
        in_pipeline = {moment: parts for moment, parts in later.items() if moment not in (LOSS, TOP, LOWEST)}
        in_pipeline |= {IN_BACKWARD[moment]: later[moment] for moment in IN_BACKWARD}
        in_pipeline |= {moment: before[moment] for moment in IN_BACKWARD}
        sizes = choose(piped, in_pipeline, later)
    return {
        moment: [row(NAMES[name], size, EXPLANATIONS[name]) for name, size in parts.items()]
        for moment, parts in sizes.items()
    }


def choose(mask: Any, one: Sizes, other: Sizes) -> Sizes:
    """By candidate; what a candidate has not is 0."""
    if np.all(mask):
        return one
    if not np.any(mask):
        return other
    found: Sizes = {}
    for moment in dict.fromkeys([*one, *other]):
        here, there = one.get(moment, {}), other.get(moment, {})
        found[moment] = {n: np.where(mask, here.get(n, 0.0), there.get(n, 0.0)) for n in dict.fromkeys([*here, *there])}
    return found


def by_strategy(dp: DpState) -> Sizes:
    case, kind = dp.case, dp.weights.sharding
    if not case.is_lmworks:
        return other_software(dp)
    sharding = np.char.startswith(kind, "fsdp") & np.greater(case.dp_shard * case.cp, 1)
    if np.all(sharding):
        return sharded(dp)
    found = choose(np.equal(kind, "alone"), single_rank(dp), replicated(dp))
    if np.any(buckets := np.char.startswith(kind, "zero")):
        found = choose(buckets, bucketed(dp), found)
    return choose(sharding, sharded(dp), found) if np.any(sharding) else found


def single_rank(dp: DpState) -> Sizes:
    """A tied head's gradient waits for the embedding's."""
    whole, tied = dp.each * dp.weights.size, dp.weights.tied
    made = {moment: dp.each * (done + tied * (moment in (TOP, LOWEST))) for moment, done in dp.reduced.items()}
    return {moment: {"gradients": np.where(dp.accumulates, whole, size)[()]} for moment, size in made.items()}


def replicated(dp: DpState) -> Sizes:
    """Gradients of a micro-batch that is not reduced are added up beside DDP's buckets."""
    sums = 1 + dp.accumulates * (not dp.case.sync_each_pass)
    return {moment: {"gradients": dp.each * dp.weights.size * sums} for moment in dp.reduced}


def bucketed(dp: DpState) -> Sizes:
    """Under a pipeline gradients meet after the last micro-batch, all at once, and are whole until then."""
    case, own, each = dp.case, dp.weights, dp.each
    second, ranks = case.zero == 2, case.dp_shard * case.cp if case.zero else 1
    arriving, whole = dp.copies + np.where(np.greater(ranks, 1), 1 / ranks, 0), each * own.size
    piped = np.greater(case.pp, 1)
    found: Sizes = {}
    for moment, elements in dp.reduced.items():
        made, complete = each * elements, each * own.complete[PLACES[moment]]
        flying = own.flying[PLACES[moment]]
        gradients = np.where(dp.accumulates, whole, made)
        if second:
            flying = np.where(dp.accumulates, own.flying_later[PLACES[moment]], flying)
            held = np.where(dp.accumulates, dp.state.gradients, complete / ranks)
            gradients = np.where(piped, gradients, held + made - complete)
        found[moment] = {"gradients": gradients[()], "flying": np.where(piped, 0, arriving * each * flying)[()]}
    last = dp.state.gradients + each * own.last_bucket if second else whole
    found[REDUCED] = {
        "gradients": np.where(piped, whole, last)[()],
        "flying": arriving * each * own.last_buckets,
    }
    if np.any(np.greater(ranks, 1)):
        flying = (1 + 1 / ranks) * each * own.largest_buckets
        found[UPDATED] = {"gradients": dp.state.gradients, "flying": flying}
    return found


def sharded(dp: DpState) -> Sizes:
    case, own, each, code = dp.case, dp.weights, dp.each, dp.case.software
    layers, root, own_block = own.layers, own.reduced_root, own.own_reduced_block
    piped, stays = np.greater(case.pp, 1), case.offload != "full"  # a rank's own gradients go to the host
    gathered = gathered_bytes(case, 0) * own.gathered_block
    message = dp.copies * code.reduce * own.reduced_block
    keep = (not case.reshard) | (piped & (case.schedule not in ("gpipe", "1f1b")))
    ahead = np.minimum(case.prefetch, layers - 1)
    at_work = np.where(keep, layers, 1 + ahead) * gathered
    # FSDP2 lets go of a gather's buffer at the next gather; where experts are apart, the last of a block is small.
    left = np.where(np.equal(own.sharding, "fsdp2") & np.equal(case.ep, 1), gathered, 0)
    whole = {LOSS: left + np.where(keep, layers, 0) * gathered, TOP: at_work, LOWEST: gathered, END: 0 * gathered}
    done = {LOSS: 0, TOP: 0, LOWEST: layers - 1, END: layers}
    outside = {LOSS: 0, TOP: own.head, LOWEST: own.head, END: root}
    # Of bf16 weights FSDP2 adds up what it will send.
    summed = max(each, code.reduce) * (root + layers * own.reduced_block)
    whole_sums = dp.accumulates & (not case.sync_each_pass)  # of a micro-batch that is not reduced
    before = np.where(dp.accumulates & case.sync_each_pass, dp.state.gradients, 0)  # a rank's own, of earlier ones
    found: Sizes = {}
    for moment, weights_there in whole.items():
        past = done[moment]
        sums = np.maximum(before, each * past * own_block * stays) + each * outside[moment]
        arrived = np.where(before > 0, code.reduce * own_block, 0)  # until it is added
        flying = np.where(whole_sums, 0, (message + arrived) * np.greater(past, 0))
        if moment == TOP:  # block after block is sent, the root last
            flying = np.where(whole_sums & ~piped, message, flying)
        found[moment] = {
            "gradients": np.where(whole_sums, summed, sums)[()],
            "gathered": each * own.gathered_root + weights_there,
            "flying": flying[()],
        }
    found[REDUCED] = {
        "gradients": each * (root + layers * own_block * stays),
        "gathered": each * own.gathered_root,
        "flying": dp.copies * code.reduce * root + each * own.own_reduced_root,
    }
    return found


def other_software(dp: DpState) -> Sizes:
    """Of other code bases. Megatron keeps a buffer for all gradients; elsewhere they come with the backward pass, and
    while micro-batches accumulate they stay. ZeRO-3 gathers a block at a time and lets the next arrive; a block's
    gradients are there as they are made and as they are sent.
    """
    case, own, code = dp.case, dp.weights, dp.case.software
    whole, piped = code.gradients * own.size, np.greater(case.pp, 1)
    later = np.where(piped & (case.zero >= 2), whole, dp.state.gradients)  # PyTorch's pipelines reduce at the end
    dummy = code.wgrad_placeholder * own.block
    keep = (not case.reshard) | piped
    unit = (code.gather or case.compute_bytes) * np.minimum(own.block, code.bucket) * (case.zero == 3)
    gathered = {
        LOSS: np.where(keep, own.layers, 0) + np.minimum(1, own.layers),
        TOP: np.where(keep, own.layers, np.minimum(2, own.layers)),
        END: np.where(keep, own.layers, 0),
    }
    message = (code.reduce + 2) * np.minimum(own.block, code.bucket) * (case.zero == 3)
    found: Sizes = {}
    for moment, blocks in gathered.items():
        made = np.where(dp.accumulates, later, code.gradients * dp.reduced[moment])[()]
        there = dp.state.gradients if code.master or moment == END else made
        found[moment] = {
            "gradients": there,
            "gathered": unit * blocks + dummy,
            "flying": message if moment == TOP else 0 * message,
        }
    return found
