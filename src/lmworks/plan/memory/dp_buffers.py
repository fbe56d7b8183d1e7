"""What data parallelism adds to a step, at the moments that can be the highest: gradients, gathered weights, messages.

    gathered weights   FSDP with reshard: the root, the block at work and the one fetched ahead; without: all, and in
                       the backward pass those not yet done
    whole gradients    FSDP: of the root and of the block at work, or of everything while micro-batches accumulate
                       (gradients meet after the last); ZeRO-2: of buckets that are not complete; DDP keeps its buckets
                       from step to step, and holds gradients beside them while micro-batches accumulate
    in flight          one block's, or two buckets', message and what it becomes; gloo also copies what it reduces, and
                       ZeRO-2's last buckets are still on their way while the next micro-batch runs

An estimate: what is exact is `residency.resident`, which all of it stands on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...spec import Grid, RunSpec
from ..exact.residency import Resident
from ..exact.shards import buckets, compute_bytes, reduce_bytes, strategy_of, unit_size, units, weight_bytes
from ..exact.weights import ROOT, Weight, stage_weights
from ..pipelines.stages import stages_of_rank
from .peak_memory import END, IN_BACKWARD, LOSS, LOWEST, TOP, Row, row

REDUCED, UPDATED = "reduction of the last gradients", "new weights on their way"
NAMES = {"gradients": "gradients", "gathered": "gathered weights", "flying": "messages"}
Sizes = dict[str, dict[str, float]]  # by moment and by NAMES


@dataclass(frozen=True)
class DpState:
    """Weights of a rank, before data parallelism cuts them."""

    spec: RunSpec
    weights: list[Weight]
    head: int  # elements whose gradient is there when the blocks' backward pass begins
    layers: int
    accumulates: bool  # gradients of earlier micro-batches are there
    state: Resident
    copies: int  # of a message: gloo makes another

    @property
    def each(self) -> int:
        """Bytes of a weight, and of its gradient."""
        return weight_bytes(self.spec)

    @property
    def size(self) -> int:
        return sum(weight.size for weight in self.weights)

    @property
    def block(self) -> float:
        return sum(weight.size for weight in self.weights if weight.unit != ROOT) / self.layers

    @property
    def reduced(self) -> dict[str, float]:
        """Elements whose gradient a backward pass has made."""
        return {LOSS: 0, TOP: self.head, LOWEST: self.head + (self.layers - 1) * self.block, END: self.size}


def dp_state(spec: RunSpec, rank: int, state: Resident, copies: int) -> DpState:
    stages = stages_of_rank(spec, Grid.of(spec.parallel).coordinates(rank)["pp"])
    found = [weight for stage in stages for weight in stage_weights(spec, stage)]
    last = [weight for stage in stages if stage.last for weight in stage_weights(spec, stage) if weight.unit == ROOT]
    copy = not any(stage.first for stage in stages)  # of a tied embedding: it is the head alone
    head = sum(w.size for w in last if w.name.startswith(("norm.", "head.")) or (copy and w.name == "embed.weight"))
    layers = sum(len(stage.layers) for stage in stages)
    return DpState(spec, found, head, layers, spec.accumulation > 1, state, copies)


def dp_buffers(spec: RunSpec, rank: int, state: Resident, copies: int) -> dict[str, list[Row]]:
    """Rows by moment."""
    dp = dp_state(spec, rank, state, copies)
    if spec.parallel.pp == 1:
        sizes = by_strategy(dp, rank)
    else:
        later = by_strategy(dp, rank)
        sizes = {moment: later[moment] for moment in later if moment not in (LOSS, TOP, LOWEST)}
        sizes |= {IN_BACKWARD[moment]: later[moment] for moment in IN_BACKWARD}
        before = by_strategy(replace(dp, accumulates=False), rank)
        sizes |= {moment: before[moment] for moment in IN_BACKWARD}
    return {
        moment: [row(NAMES[name], size, EXPLANATIONS[name]) for name, size in parts.items()]
        for moment, parts in sizes.items()
    }


def by_strategy(dp: DpState, rank: int) -> Sizes:
    kind, layout = strategy_of(dp.spec), dp.spec.parallel
    if kind.startswith("fsdp") and Grid.of(layout).size("shard") * layout.dp_shard > 1:
        return sharded(dp, kind, rank)
    if kind.startswith("zero"):
        return bucketed(dp, kind)
    return single_rank(dp) if kind == "alone" else replicated(dp)


EXPLANATIONS = {
    "gradients": "of weights whose gradients are held, whole or this rank's part",
    "gathered": "weights of the root and of blocks at work, and copies of a gather",
    "flying": "gradients or weights on their way, and what comes of them",
}


def single_rank(dp: DpState) -> Sizes:
    tied = dp.spec.model.tie_embeddings  # the head's gradient waits for the embedding's
    table = sum(weight.size for weight in dp.weights if weight.name == "embed.weight") * tied * (dp.head > 0)
    made = {moment: dp.each * (done + table * (moment in (TOP, LOWEST))) for moment, done in dp.reduced.items()}
    return {moment: {"gradients": dp.each * dp.size if dp.accumulates else size} for moment, size in made.items()}


def replicated(dp: DpState) -> Sizes:
    return {moment: {"gradients": dp.each * dp.size * (2 if dp.accumulates else 1)} for moment in dp.reduced}


def bucketed(dp: DpState, kind: str) -> Sizes:
    """Under a pipeline gradients meet after the last micro-batch, all at once, and are whole until then."""
    second, ranks = kind == "zero2", 1 if kind == "zero0" else Grid.of(dp.spec.parallel).size("shard")
    sizes = [dp.each * sum(weight.size for weight in bucket) for bucket in buckets(dp.spec, dp.weights)]
    arriving, whole = (dp.copies + 1 / ranks if ranks > 1 else dp.copies), dp.each * dp.size
    found: Sizes = {}
    for moment, elements in dp.reduced.items():
        made, complete = dp.each * elements, list[int]()
        if dp.spec.parallel.pp > 1:
            found[moment] = {"gradients": whole if dp.accumulates else made}
            continue
        for size in sizes:
            if sum(complete) + size <= made:
                complete.append(size)
        before = sizes if second and dp.accumulates else []
        flying = arriving * sum([*before, *complete][-2:])
        if second:
            owned = dp.state.gradients if dp.accumulates else sum(complete) / ranks
            found[moment] = {"gradients": owned + made - sum(complete), "flying": flying}
        else:
            found[moment] = {"gradients": whole if dp.accumulates else made, "flying": flying}
    found[REDUCED] = {
        "gradients": whole if dp.spec.parallel.pp > 1 or not second else dp.state.gradients + sizes[-1],
        "flying": arriving * sum(sizes[-2:]),
    }
    if ranks > 1:
        flying = (1 + 1 / ranks) * sum(sorted(sizes)[-2:])
        found[UPDATED] = {"gradients": dp.state.gradients, "flying": flying}
    return found


def sharded(dp: DpState, kind: str, rank: int) -> Sizes:
    spec, layout, layers = dp.spec, dp.spec.parallel, dp.layers
    grid = Grid.of(layout)
    parts = [
        (unit.block, unit_size(spec, unit), unit_size(spec, unit) / grid.size(unit.axis))
        for stage in stages_of_rank(spec, grid.coordinates(rank)["pp"])
        for unit in units(spec, stage)
    ]
    root = sum(size for block, size, _ in parts if block == ROOT)
    block = sum(size for block, size, _ in parts if block != ROOT) / layers
    own = sum(size for block, _, size in parts if block != ROOT) / layers  # a rank's part of a block
    own_root = sum(size for block, _, size in parts if block == ROOT)
    away, each = layout.offload == "full", dp.each  # a rank's own gradients go to the host
    gathered, message = compute_bytes(spec, 0) * block, dp.copies * reduce_bytes(spec) * block
    keep = not layout.reshard or (layout.pp > 1 and layout.schedule not in ("gpipe", "1f1b"))
    ahead = min(layout.prefetch, layers - 1)
    at_work = layers * gathered if keep else (1 + ahead) * gathered
    # FSDP2 lets go of a gather's buffer at the next gather; where experts are apart, the last of a block is small.
    left = gathered if kind == "fsdp2" and layout.ep == 1 else 0.0
    whole = {LOSS: left + (layers * gathered if keep else 0), TOP: at_work, LOWEST: gathered, END: 0.0}
    found: Sizes = {}
    for moment, weights_there in whole.items():
        past = {TOP: 0, LOWEST: layers - 1, END: layers}.get(moment, 0)
        sums, flying = each * past * own * (not away), message if past else 0.0
        if dp.accumulates:  # of bf16 weights FSDP2 adds up what it will send
            sums, flying = max(each, reduce_bytes(spec)) * (root + layers * block), 0.0
        elif moment == END:
            sums += each * root
        elif moment != LOSS:
            sums += each * dp.head
        found[moment] = {"gradients": sums, "gathered": each * root + weights_there, "flying": flying}
    found[REDUCED] = {
        "gradients": each * (root + layers * own * (not away)),
        "gathered": each * root,
        "flying": dp.copies * reduce_bytes(spec) * root + each * own_root,
    }
    if dp.accumulates:  # block after block is sent, the root last
        found[TOP]["flying"] = 0.0 if layout.pp > 1 else message
    return found
