"""The highest moment of a data-parallel step, in bytes of one rank's tensors: resident state and what passes through.

Activations are those of one rank with the same micro-batch (`memory.py`). Around them, by strategy:

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

from collections.abc import Callable
from dataclasses import dataclass

from ..spec import ParallelSpec, RunSpec, SpecError
from .memory import at_backward, at_end, at_loss
from .network import network
from .ops import Workload
from .residency import Resident, resident
from .shards import FP32, buckets, compute_bytes, reduce_bytes, unit_size, units
from .stages import stages_here
from .weights import ROOT, weights

LOSS, TOP, LOWEST, END, REDUCED, UPDATED = (
    "loss",
    "backward, top block",
    "backward, lowest block",
    "backward, last gradient",
    "reduction of the last gradients",
    "new weights on their way",
)
STATE = ("gradients", "gradients so far")  # rows of one rank's sheet that a strategy replaces


@dataclass(frozen=True)
class Peak:
    moment: str
    bytes: int


def strategy_of(spec: RunSpec) -> str:
    """ddp, zero1, zero2, fsdp1 or fsdp2 (which ZeRO-3 is). Other layouts are not worked out here."""
    layout = spec.parallel
    for axis in ("pp", "tp", "cp", "ep"):
        if getattr(layout, axis) > 1:
            raise SpecError(f"parallel.{axis} = {getattr(layout, axis)}: peaks are of data parallelism alone")
    if layout.engine != "native" or layout.offload != "none":
        raise SpecError("peaks are of parallel.engine = 'native' and parallel.offload = 'none'")
    if layout.dp_shard > 1 and layout.dp_replicate > 1:
        raise SpecError("peaks are of copies or of shards, not of copies of shards")
    if layout.strategy == "zero":
        return {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp2"}[layout.zero]
    return layout.strategy


def peak(spec: RunSpec, rank: int, device: str = "cpu") -> Peak:
    state = resident(spec, rank)
    kept = state.parameters + state.parameter_padding + state.optimizer
    kept += 16 * spec.data.micro_batch * spec.data.seq  # int64 tokens and targets
    passing: Callable[[RunSpec, Resident, int], dict[str, float]] = {
        "fsdp": sharded,
        "zero": bucketed,
        "ddp": replicated,
    }[strategy_of(spec)[:4].rstrip("12")]
    beside = passing(spec, state, 2 if device == "cpu" else 1)
    work = activations(spec, device)
    moments = {name: kept + work.get(name, 0.0) + size for name, size in beside.items()}
    highest = max(moments, key=lambda name: moments[name])
    return Peak(highest, round(moments[highest]))


def activations(spec: RunSpec, device: str) -> dict[str, float]:
    """What one rank's step needs beside parameters, states and gradients, by moment."""
    data = spec.data.replace(global_batch=spec.data.micro_batch * spec.accumulation)
    kept = {key: getattr(spec.parallel, key) for key in ("recompute", "recompute_every", "recompute_budget")}
    one = spec.replace(data=data, parallel=ParallelSpec(**kept))
    net, several = network(Workload.of(one, device)), spec.accumulation > 1
    moments = {
        LOSS: at_loss(one, net, several),
        TOP: at_backward(one, net, several, one.model.layers),
        LOWEST: at_backward(one, net, several, 1),
        END: at_end(one, net, several),
    }
    gathers = strategy_of(spec).startswith("fsdp")  # and with the weights come their casts
    skipped = (*STATE, "weight casts") if gathers else STATE
    return {name: sum(row.bytes for row in rows if row.name not in skipped) for name, rows in moments.items()}


def done_by(spec: RunSpec) -> dict[str, int]:
    """Elements whose gradient this backward pass has made."""
    m = spec.model
    head = m.norm_params + (0 if m.tie_embeddings else m.vocab * m.hidden)
    return {LOSS: 0, TOP: head, LOWEST: head + (m.layers - 1) * m.block_params, END: m.params}


def replicated(spec: RunSpec, state: Resident, copies: int) -> dict[str, float]:
    whole = FP32 * spec.model.params
    return dict.fromkeys(done_by(spec), whole * (2 if spec.accumulation > 1 else 1))


def bucketed(spec: RunSpec, state: Resident, copies: int) -> dict[str, float]:
    second, ranks = strategy_of(spec) == "zero2", spec.parallel.dp_shard
    sizes = [FP32 * sum(weight.size for weight in bucket) for bucket in buckets(spec, weights(spec.model))]
    found: dict[str, float] = {}
    for moment, elements in done_by(spec).items():
        made, complete = FP32 * elements, list[int]()
        for size in sizes:
            if sum(complete) + size <= made:
                complete.append(size)
        before = sizes if second and spec.accumulation > 1 else []
        flying = (copies + 1 / ranks) * sum([*before, *complete][-2:])
        if second:
            owned = state.gradients if spec.accumulation > 1 else sum(complete) / ranks
            found[moment] = owned + made - sum(complete) + flying
        else:
            found[moment] = (state.gradients if spec.accumulation > 1 else made) + flying
    found[UPDATED] = state.gradients + (1 + 1 / ranks) * sum(sorted(sizes)[-2:])
    return found


def sharded(spec: RunSpec, state: Resident, copies: int) -> dict[str, float]:
    kind, ranks, layers = strategy_of(spec), max(1, spec.parallel.dp_shard), spec.model.layers
    if spec.parallel.dp_shard == 1:
        return replicated(spec, state, copies)
    sizes = {unit.block: unit_size(spec, unit) for unit in units(spec, *stages_here(spec, 0))}
    root, block = sizes[ROOT], max(size for unit, size in sizes.items() if unit != ROOT)
    gathered, message = compute_bytes(spec, 0) * block, copies * reduce_bytes(spec) * block
    ahead = min(spec.parallel.prefetch, layers - 1)
    at_work = (1 + ahead if spec.parallel.reshard else layers) * gathered
    left = gathered if kind == "fsdp2" else 0  # FSDP2 lets go of a gather's buffer at the next gather
    whole = {LOSS: left + (0 if spec.parallel.reshard else layers * gathered), TOP: at_work, LOWEST: gathered, END: 0}
    found: dict[str, float] = {}
    done = done_by(spec)
    head = FP32 * done[TOP]
    for moment, weights_there in whole.items():
        past = max(0, done[moment] - done[TOP]) if moment != END else layers * block
        own = FP32 * past / ranks + (message if past else 0)
        if spec.accumulation > 1:
            own = FP32 * (root + layers * block)
        elif moment == END:
            own += FP32 * root
        elif moment != LOSS:
            own += head
        found[moment] = FP32 * root + weights_there + own
    last = (FP32 + copies * reduce_bytes(spec) + FP32 / ranks) * root  # gradients, their message, and what comes of it
    found[REDUCED] = FP32 * root + last + FP32 * layers * block / ranks
    return found
