"""Every collective of one training step of one rank: what, over which ranks, how often, how many bytes, and when.

`collectives` reads as the step does: what layers exchange while micro-batches pass (`exchanges.py`), what data
parallelism gathers and reduces, what then is still a part of a sum, and what the loop itself says to all ranks.
Evaluation and checkpoints are no part of a step. A group of one rank sends nothing, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...spec import RunSpec, SpecError
from ...spec.layout import V_SHAPED
from ..pipelines.orders import actions
from ..pipelines.stages import Stage
from .calls import BACKWARD, FORWARD, LAST, STEP, Collective, Here
from .exchanges import INT64, exchanges, messages
from .shards import (
    FP32,
    Unit,
    buckets,
    compute_bytes,
    flat,
    own_shapes,
    padded,
    reduce_bytes,
    strategy_of,
    unit_size,
    units,
    weight_bytes,
)
from .weights import ROOT, Weight, held

ACTIVE = 3  # stages of a rank that PyTorch's schedules keep gathered at once


def collectives(spec: RunSpec, rank: int = 0) -> list[Collective]:
    """Experts are taken as evenly visited: every rank sends as many tokens as it gets."""
    if spec.parallel.engine != "native":
        raise SpecError(f"what parallel.engine = '{spec.parallel.engine}' sends is not known; 'native' is")
    here, rows = Here.of(spec, rank), list[Collective]()
    for stage in here.stages:
        rows += exchanges(here, stage)
        rows += data_parallel(here, stage)
    rows += [*messages(here), *leftovers(here), *figures(here)]
    return joined(row for row in rows if row.ranks > 1 and row.count)


def joined(rows: Iterable[Collective]) -> list[Collective]:
    """Calls that are alike in all but their number, as those of equal blocks are, in one row."""
    found: dict[tuple[str, str, str, str, float], Collective] = {}
    for row in rows:
        key = row.kind, row.what, row.group, row.when, row.bytes / row.count
        if key in found:
            row = replace(row, count=row.count + found[key].count, bytes=row.bytes + found[key].bytes)
        found[key] = row
    return list(found.values())


# --- data parallel --------------------------------------------------------------------------------------


def data_parallel(here: Here, stage: Stage) -> Iterator[Collective]:
    kind = strategy_of(here.spec)
    if kind in ("ddp", "zero0"):
        yield from reduced(here, stage)
        if (
            kind == "ddp" and here.spec.model.experts and here.spec.model.balance_bias
        ):  # DDP's habit: the first rank's buffers, once a step
            size = FP32 * len(stage.layers) * here.spec.model.experts
            yield here.call("broadcast", "choice bias of experts", "dp_cp", 1, size, FORWARD)
    elif kind in ("zero1", "zero2"):
        yield from scattered(here, stage, every=kind == "zero2")
    elif kind == "fsdp1" and here.spec.parallel.dp_shard == 1:
        inside = units(here.spec, stage)
        size = reduce_bytes(here.spec) * sum(flat(here.spec, unit).length for unit in inside)
        yield here.total("all-reduce", "gradients", "dp_cp", len(inside), size, LAST)
    elif kind in ("fsdp1", "fsdp2"):
        yield from sharded(here, stage)


def over(here: Here) -> str:
    """When gradients meet: in a pipeline a stage's are complete only after its last backward pass."""
    return STEP if here.spec.parallel.pp > 1 else LAST


def by_axis(found: list[Weight], other: str) -> dict[str, list[Weight]]:
    """Experts, whose gradients meet among those that hold the same ones, and all others."""
    axes: dict[str, list[Weight]] = {}
    for weight in found:
        axes.setdefault("edp" if weight.expert else other, []).append(weight)
    return axes


def reduced(here: Here, stage: Stage) -> Iterator[Collective]:
    """All gradients once, after the last micro-batch."""
    for axis, inside in by_axis(held(here.spec, stage), "dp_cp").items():
        size = reduce_bytes(here.spec) * sum(weight.size for weight in inside)
        yield here.total("all-reduce", "gradients", axis, len(buckets(here.spec, inside)), size, over(here))


def scattered(here: Here, stage: Stage, every: bool) -> Iterator[Collective]:
    """ZeRO-1 and 2: gradients to their owners (`every`: after each micro-batch), new weights back to all."""
    every = every and here.spec.parallel.pp == 1  # a pipeline's backward passes are not told apart
    times, when = (here.spec.accumulation, BACKWARD) if every else (1, over(here))
    for axis, inside in by_axis(held(here.spec, stage), "shard").items():
        ranks, count = here.grid.size(axis), len(buckets(here.spec, inside))
        numbers = ranks * sum(padded(weight, ranks) for weight in inside)
        size = reduce_bytes(here.spec) * numbers
        yield here.total("reduce-scatter", "gradients", axis, times * count, times * size, when)
        yield here.total("all-gather", "new weights", axis, count, weight_bytes(here.spec) * numbers, STEP)


def sharded(here: Here, stage: Stage) -> Iterator[Collective]:
    """FSDP: units whole while they run, gradients to their owners after the last micro-batch, and then to copies."""
    spec = here.spec
    for unit in units(spec, stage):
        what = "root" if unit.block == ROOT else "experts" if unit.axis == "edp" else "block"
        numbers, ranks = unit_size(spec, unit), here.grid.size(unit.axis)
        forward, backward = gathers(here, stage, unit)
        gathered, sent = compute_bytes(spec, unit.block) * numbers, reduce_bytes(spec) * numbers
        yield here.call("all-gather", f"weights of a {what}", unit.axis, forward, gathered, FORWARD)
        yield here.call("all-gather", f"weights of a {what}", unit.axis, backward, gathered, BACKWARD)
        yield here.call("reduce-scatter", f"gradients of a {what}", unit.axis, 1, sent, over(here))
        if unit.axis == "shard" or here.grid.experts_over == "shard":  # else copies are a part of edp
            copies = f"gradients of a {what}, shards"
            yield here.call("all-reduce", copies, "dp_replicate", 1, sent // ranks, over(here))


def gathers(here: Here, stage: Stage, unit: Unit) -> tuple[int, int]:
    """How often a unit is gathered in forward and in backward passes.

    With reshard, blocks are gathered again for the backward pass; the root stays. Without, FSDP2 still lets go after
    every backward pass, and FSDP1 after the last alone.

    In a pipeline a stage stays whole after a backward pass, until a forward pass lets go of its blocks: of 1F1B's, the
    first p − r forward passes gather, and then the backward passes that follow one. A schedule with several stages
    a rank gathers and lets go of whole stages itself.
    """
    spec, batches = here.spec, here.spec.accumulation
    layout = spec.parallel
    stays = unit.block == ROOT or not layout.reshard
    if layout.pp == 1:
        kept = layout.strategy == "fsdp1" and not layout.reshard
        return (1 if kept else batches), (0 if stays else batches)
    if layout.schedule not in ("gpipe", "1f1b"):
        return fetched(here, stage), 0
    if stays:
        return 1, 0
    ahead = batches if layout.schedule == "gpipe" else min(batches, layout.pp - here.place["pp"])
    return ahead, batches - ahead + 1


def fetched(here: Here, stage: Stage) -> int:
    """How often a stage is gathered where a rank has several: those of its next ACTIVE ones stay whole."""
    layout = here.spec.parallel
    if len(here.stages) <= ACTIVE:
        return 1
    order = actions(layout.schedule, layout.pp, layout.virtual_stages, here.spec.accumulation)[here.place["pp"]]
    stages, whole, count = [action.stage for action in order], set[int](), 0
    for position in range(len(stages)):
        following = list(dict.fromkeys(stages[position:]))[:ACTIVE]
        count += stage.index in following and stage.index not in whole
        whole = set(following)
    return count


# --- what is left ---------------------------------------------------------------------------------------


def leftovers(here: Here) -> Iterator[Collective]:
    """Gradients that are parts of a sum still: of whole weights on tensor-parallel ranks, of tied embeddings."""
    own, each = own_shapes(here.spec, here.rank), weight_bytes(here.spec)
    partial = sum(math.prod(shape) for weight, shape in own if weight.partial)
    yield here.call("all-reduce", "gradients of whole weights", "tp", int(partial > 0), each * partial, STEP)
    layout, ends = here.spec.parallel, here.place["pp"] in (0, here.grid.pp - 1)
    if layout.pp > 1 and ends and here.spec.model.tie_embeddings and layout.schedule not in V_SHAPED:
        tied = sum(math.prod(shape) for weight, shape in own if weight.name == "embed.weight")
        yield here.call("all-reduce", "gradients of the tied embedding", "ends", int(tied > 0), each * tied, STEP)


def figures(here: Here) -> Iterator[Collective]:
    """What the training loop itself says to all ranks: loss, ‖g‖², and of each rank its memory and its signal."""
    yield here.call("all-reduce", "figures of the step", "world", 1, 8 * (2 + 3 * here.grid.world), STEP)
    if here.spec.data.document_mask:
        yield here.call("all-reduce", "targets that count", "dp", 1, INT64, STEP)
    for stage in here.stages if here.spec.model.experts else ():
        size = INT64 * len(stage.layers) * here.spec.model.experts
        yield here.call("all-reduce", "visits of experts", "dp_cp", 1, size, STEP)
