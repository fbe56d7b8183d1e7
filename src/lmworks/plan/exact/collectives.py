"""Every collective of one training step of one rank: what, over which ranks, how often, how many bytes, and when.

`collectives` reads as the step does: what layers exchange while micro-batches pass (`exchanges.py`), what data
parallelism gathers and reduces, what then is still a part of a sum, and what the loop itself says to all ranks.
Evaluation and checkpoints are no part of a step. A group of one rank sends nothing, and is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ...spec import RunSpec, SpecError
from ...spec.layout import V_SHAPED
from ..passes import TEACHER, held_models, passes
from ..pipelines.schedule import actions
from ..pipelines.stages import Stage
from .exchanges import BACKWARD, FORWARD, INT64, LAST, STEP, Collective, RankContext, exchanges, pipeline_sends
from .shards import (
    FP32,
    ROOT,
    Unit,
    Weight,
    buckets,
    flat_parameter,
    local_shapes,
    padded_size,
    trained_weights,
    unit_bytes,
    unit_size,
    units,
)

FP64 = 8
ACTIVE_STAGES = 3  # stages of a rank that PyTorch's schedules keep gathered at once


# Means of a step that methods report.
METRICS = {"dpo": 4, "ipo": 4, "simpo": 4, "orpo": 6, "kto": 5, "reward": 7, "distill": 3}


def collectives(spec: RunSpec, rank: int = 0, lengths: Sequence[int] = ()) -> list[Collective]:
    """Experts are taken as evenly visited: every rank sends as many tokens as it gets.

    `lengths`: of the rows of each micro-batch, where they are not all data.seq: answers are padded to the longest.
    """
    if spec.parallel.engine != "native":
        raise SpecError(f"what parallel.engine = '{spec.parallel.engine}' sends is not known; 'native' is")
    ctx, rows = RankContext.of(spec, rank), list[Collective]()
    shapes = Counter(lengths or [spec.data.seq] * spec.accumulation)
    for stage in ctx.stages:
        for seq, batches in shapes.items():
            rows += exchanges(ctx.over(ctx.rows, seq, batches), stage)
        rows += data_parallel(ctx, stage)
    rows += scoring(ctx, shapes)
    rows += [*pipeline_sends(ctx), *partial_gradients(ctx), *step_scalars(ctx)]
    return merge_rows(row for row in rows if row.ranks > 1 and row.count)


def merge_rows(rows: Iterable[Collective]) -> list[Collective]:
    """Calls that are alike in all but their number, as those of equal blocks are, in one row."""
    found: dict[tuple[str, str, str, str, float], Collective] = {}
    for row in rows:
        key = row.kind, row.what, row.group, row.when, row.bytes / row.count
        if key in found:
            row = replace(row, count=row.count + found[key].count, bytes=row.bytes + found[key].bytes)
        found[key] = row
    return list(found.values())


def scoring(ctx: RankContext, shapes: Mapping[int, int]) -> Iterator[Collective]:
    """Forward passes without gradients; `shapes`: how many micro-batches have rows of each length.

    After such a pass FSDP2 lets go of all that it gathered, the root too.
    """
    models = held_models(ctx.spec)
    for one in passes(ctx.spec):
        if one.backward:
            continue
        model = models[one.model]
        here = RankContext.of(model.run, ctx.rank)
        holder = RankContext.of(models[model.weights_of].run, ctx.rank) if model.weights_of else here
        for stage in here.stages:
            for seq, batches in shapes.items():
                found = exchanges(here.over(one.rows, seq, batches), stage)
                for row in found:
                    if row.when == FORWARD and (one.model, row.what) != (TEACHER, "loss"):
                        yield replace(row, what=f"{one.model}: {row.what}")
        if holder.case.sharding == "fsdp2":
            for stage in holder.stages:
                for unit in units(holder.case, stage):
                    size = unit_bytes(holder.case, unit)
                    what = f"{one.model}: weights to score"
                    yield ctx.collective("all-gather", what, unit.axis, ctx.spec.accumulation, size, FORWARD)


# --- data parallel --------------------------------------------------------------------------------------


def data_parallel(ctx: RankContext, stage: Stage) -> Iterator[Collective]:
    kind = ctx.case.sharding
    if kind in ("ddp", "zero0"):
        yield from all_reduce_gradients(ctx, stage)
        if (
            kind == "ddp" and ctx.spec.model.experts and ctx.spec.model.balance_bias
        ):  # DDP's habit: the first rank's buffers, once a step
            size = FP32 * sum(map(ctx.spec.model.has_experts, stage.layers)) * ctx.spec.model.experts
            yield ctx.collective("broadcast", "choice bias of experts", "dp_cp", 1, size, FORWARD)
    elif kind in ("zero1", "zero2"):
        yield from zero_1_and_2(ctx, stage, every=kind == "zero2")
    elif kind == "fsdp1" and ctx.spec.parallel.dp_shard == 1:
        inside = units(ctx.case, stage)
        size = ctx.case.software.reduce * sum(flat_parameter(ctx.case, unit).length for unit in inside)
        yield ctx.bulk_collective("all-reduce", "gradients", "dp_cp", len(inside), size, LAST)
    elif kind in ("fsdp1", "fsdp2"):
        yield from fsdp(ctx, stage)


def reduction_phase(ctx: RankContext) -> str:
    """When gradients meet: in a pipeline a stage's are complete only after its last backward pass."""
    return STEP if ctx.spec.parallel.pp > 1 else LAST


def reductions(ctx: RankContext) -> tuple[int, str]:
    """How often gradients of DDP and FSDP are reduced in a step, and when."""
    return (ctx.spec.accumulation, BACKWARD) if ctx.case.sync_each_pass else (1, reduction_phase(ctx))


def by_axis(found: list[Weight], other: str) -> dict[str, list[Weight]]:
    """Experts, whose gradients meet among those that hold the same ones, and all others."""
    axes: dict[str, list[Weight]] = {}
    for weight in found:
        axes.setdefault("edp" if weight.expert else other, []).append(weight)
    return axes


def all_reduce_gradients(ctx: RankContext, stage: Stage) -> Iterator[Collective]:
    """All gradients after the last micro-batch, or after each."""
    times, when = reductions(ctx)
    for axis, inside in by_axis(trained_weights(ctx.case, stage), "dp_cp").items():
        size = ctx.case.software.reduce * sum(weight.size for weight in inside)
        yield ctx.bulk_collective(
            "all-reduce",
            "gradients",
            axis,
            times * len(buckets(ctx.case, [weight.size for weight in inside])),
            times * size,
            when,
        )


def zero_1_and_2(ctx: RankContext, stage: Stage, every: bool) -> Iterator[Collective]:
    """ZeRO-1 and 2: gradients to their owners (`every`: after each micro-batch), new weights back to all."""
    every = every and ctx.spec.parallel.pp == 1  # a pipeline's backward passes are not told apart
    times, when = (ctx.spec.accumulation, BACKWARD) if every else (1, reduction_phase(ctx))
    for axis, inside in by_axis(trained_weights(ctx.case, stage), "shard").items():
        ranks, count = ctx.grid.size(axis), len(buckets(ctx.case, [weight.size for weight in inside]))
        numbers = ranks * sum(padded_size(weight, ranks) for weight in inside)
        size = ctx.case.software.reduce * numbers
        yield ctx.bulk_collective("reduce-scatter", "gradients", axis, times * count, times * size, when)
        yield ctx.bulk_collective("all-gather", "new weights", axis, count, ctx.case.software.weights * numbers, STEP)


def fsdp(ctx: RankContext, stage: Stage) -> Iterator[Collective]:
    """FSDP: units whole while they run, gradients to their owners after the last micro-batch, or each, then copies."""
    case, (times, when) = ctx.case, reductions(ctx)
    for unit in units(case, stage):
        what = "root" if unit.block == ROOT else "experts" if unit.axis == "edp" else "block"
        ranks, gathered = ctx.grid.size(unit.axis), unit_bytes(case, unit)
        forward, backward = gathers(ctx, stage, unit)
        sent, reduced = case.software.reduce * unit_size(case, unit, trained=True), times * bool(unit.trained)
        yield ctx.collective("all-gather", f"weights of a {what}", unit.axis, forward, gathered, FORWARD)
        yield ctx.collective("all-gather", f"weights of a {what}", unit.axis, backward, gathered, BACKWARD)
        yield ctx.collective("reduce-scatter", f"gradients of a {what}", unit.axis, reduced, sent, when)
        if unit.axis == "shard" or ctx.grid.experts_over == "shard":  # else copies are a part of edp
            copies = f"gradients of a {what}, shards"
            yield ctx.collective("all-reduce", copies, "dp_replicate", reduced, sent // ranks, when)


def gathers(ctx: RankContext, stage: Stage, unit: Unit) -> tuple[int, int]:
    """How often a unit is gathered in forward and in backward passes.

    With reshard, blocks are gathered again for the backward pass; the root stays. Without, FSDP2 still lets go after
    every backward pass, and FSDP1 after the last alone.

    In a pipeline a stage stays whole after a backward pass, until a forward pass lets go of its blocks: of 1F1B's, the
    first p − r forward passes gather, and then the backward passes that follow one. A schedule with several stages
    a rank gathers and lets go of whole stages itself.
    """
    spec, batches = ctx.spec, ctx.spec.accumulation
    layout = spec.parallel
    stays = unit.block == ROOT or not layout.reshard
    if layout.pp == 1:
        kept = layout.strategy == "fsdp1" and not layout.reshard
        return (1 if kept else batches), (0 if stays else batches)
    if layout.schedule not in ("gpipe", "1f1b"):
        return stage_gathers(ctx, stage), 0
    if stays:
        return 1, 0
    ahead = batches if layout.schedule == "gpipe" else min(batches, layout.pp - ctx.coords["pp"])
    return ahead, batches - ahead + 1


def stage_gathers(ctx: RankContext, stage: Stage) -> int:
    """How often a stage is gathered where a rank has several: those of its next ACTIVE ones stay whole."""
    layout = ctx.spec.parallel
    if len(ctx.stages) <= ACTIVE_STAGES:
        return 1
    order = actions(layout.schedule, layout.pp, layout.virtual_stages, ctx.spec.accumulation)[ctx.coords["pp"]]
    stages, whole, count = [action.stage for action in order], set[int](), 0
    for position in range(len(stages)):
        following = list(dict.fromkeys(stages[position:]))[:ACTIVE_STAGES]
        count += stage.index in following and stage.index not in whole
        whole = set(following)
    return count


# --- what is left ---------------------------------------------------------------------------------------


def partial_gradients(ctx: RankContext) -> Iterator[Collective]:
    """Gradients that are parts of a sum still: of whole weights on tensor-parallel ranks, of tied embeddings."""
    own, each = local_shapes(ctx.spec, ctx.rank), ctx.case.software.weights
    partial = sum(math.prod(shape) for weight, shape in own if weight.partial)
    yield ctx.collective("all-reduce", "gradients of whole weights", "tp", int(partial > 0), each * partial, STEP)
    layout, ends = ctx.spec.parallel, ctx.coords["pp"] in (0, ctx.grid.pp - 1)
    if layout.pp > 1 and ends and ctx.spec.model.tie_embeddings and layout.schedule not in V_SHAPED:
        tied = sum(math.prod(shape) for weight, shape in own if weight.name == "embed.weight")
        yield ctx.collective("all-reduce", "gradients of the tied embedding", "ends", int(tied > 0), each * tied, STEP)


def step_scalars(ctx: RankContext) -> Iterator[Collective]:
    """What the training loop itself says to all ranks: loss, ‖g‖², and of each rank its memory and its signal."""
    yield ctx.collective("all-reduce", "figures of the step", "world", 1, 8 * (2 + 3 * ctx.grid.world), STEP)
    if ctx.spec.data.masks_targets:
        method = ctx.spec.align.method
        counts = 2 if method in METRICS and method != "distill" else 1  # tokens; pairs or answers
        yield ctx.collective("all-reduce", "targets that count", "dp", 1, counts * INT64, STEP)
    yield from answer_figures(ctx)
    for stage in ctx.stages if ctx.spec.model.experts else ():
        size = INT64 * sum(map(ctx.spec.model.has_experts, stage.layers)) * ctx.spec.model.experts
        yield ctx.collective("all-reduce", "visits of experts", "dp_cp", 1, size, STEP)


def answer_figures(ctx: RankContext) -> Iterator[Collective]:
    """Sum and weight of each mean; KTO's KL, ORPO's tokens and pairs."""
    align = ctx.spec.align
    if align.method not in METRICS:
        return
    count = METRICS[align.method] + (align.method == "dpo" and align.sft_weight > 0)
    yield ctx.collective("all-reduce", "means of the step", "dp", 1, 2 * FP64 * count, STEP)
    if align.method in ("kto", "orpo"):
        yield ctx.collective("all-reduce", "figures of the global batch", "dp", 1, 2 * FP64, STEP)
