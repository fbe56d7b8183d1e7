"""What layers exchange while micro-batches pass through them: tensor, context, expert and pipeline parallelism.

    tp, without sp    leaving a region is an all-reduce forward, entering one an all-reduce backward
    tp, with sp       entering is an all-gather, leaving a reduce-scatter, and backward the other way round
    cp, ring          keys and values go around forward; backward again, and their gradients with them, in fp32
    cp, ulysses       queries, keys and values are traded for heads, results back; backward the same
    ep                how many tokens go where, tokens there, results back; backward tokens and results again
    pp                hidden states to the next stage, their gradients back, as wide as the residual stream

A block that is computed again exchanges again what its forward pass does, up to the last tensor that its backward pass
needs: not what leaves the MLP, and under the policy `selective`, which keeps what attention found, not the ring's keys.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, Self

from ...spec import Grid, RunSpec
from ...spec.components import attention_core, linears
from ...spec.lora import ADAPTERS
from ..case import Case
from ..ops import chunk_rows, device_of, divergence_rows
from ..pipelines.stages import Stage
from ..policies import policies
from ..software import software_of
from .shards import FP32, rank_stages

# In the passes of every micro-batch; in the last micro-batch's backward pass alone; once, when all passes are over.
FORWARD, BACKWARD, LAST, STEP = "forward", "backward", "last backward", "step"


@dataclass(frozen=True)
class Collective:
    """Calls of one kind; bytes are the messages of all of them, in the convention of `parallel.comm_counter`.

    The members of the group are `stride` global ranks apart. A "recv" is the other end of somebody's "send": it is
    listed because it is counted, and costs nothing beside that.
    """

    kind: str
    what: str
    group: str  # mesh axis, "world", or "ends": the first and the last rank of a pipeline
    ranks: int
    stride: int
    count: int  # in a step
    bytes: int
    when: str  # forward, backward, last backward, step


@dataclass(frozen=True)
class RankContext:
    """A rank of a run, and the sizes that its messages are made of."""

    spec: RunSpec
    case: Case
    grid: Grid
    rank: int
    coords: dict[str, int]
    stages: list[Stage]
    rows: int  # sequences of one micro-batch
    seq: int
    batches: int  # micro-batches of this shape in a step

    @classmethod
    def of(cls, spec: RunSpec, rank: int) -> Self:
        case, grid = Case.of(spec), Grid.of(spec.parallel)
        place = grid.coordinates(rank)
        rows = spec.data.micro_batch * spec.data.rows_per_example
        stages = rank_stages(case, place["pp"])
        return cls(spec, case, grid, rank, place, stages, rows, spec.data.seq, spec.accumulation)

    def over(self, rows: int, seq: int, batches: int) -> Self:
        """The same rank with other micro-batches."""
        return replace(self, rows=rows, seq=seq, batches=batches)

    @property
    def tokens(self) -> int:
        """Of one micro-batch, on each rank that shares its sequences over cp."""
        return self.rows * self.seq // self.spec.parallel.cp

    @property
    def width(self) -> int:
        """Bytes of a number in the compute precision."""
        return FP32 if self.spec.precision.compute == "fp32" else 2

    @property
    def stream(self) -> int:
        """Bytes of a number of the residual stream."""
        return self.case.software.stream

    def collective(self, kind: str, what: str, group: str, count: int, size: int, when: str) -> Collective:
        """`count` calls with a message of `size` bytes each."""
        return self.bulk_collective(kind, what, group, count, count * size, when)

    def bulk_collective(self, kind: str, what: str, group: str, count: int, size: int, when: str) -> Collective:
        """`count` calls of `size` bytes in all."""
        ranks = 2 if group == "ends" else self.grid.size(group)
        return Collective(kind, what, group, ranks, stride(self.grid, group), count, size, when)


def stride(grid: Grid, group: str) -> int:
    """Global ranks between neighbours of a group: how many of them fit into one node follows from it."""
    stage = grid.world // grid.pp
    return {
        "world": 1,
        "tp": 1,
        "cp": grid.tp,
        "ep": grid.tp,
        "shard": grid.tp,
        "dp_cp": grid.tp,
        "edp": grid.ep * grid.tp,
        "dp": grid.cp * grid.tp,
        "dp_shard": grid.cp * grid.tp,
        "dp_replicate": grid.dp_shard * grid.cp * grid.tp,
        "pp": stage,
        "ends": (grid.pp - 1) * stage,
    }[group]


class Calls(Protocol):
    """A row of this table, or of one that was counted (`parallel.comm_counter.Row`)."""

    @property
    def kind(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def bytes(self) -> int: ...


def by_kind(rows: Iterable[Calls]) -> dict[str, tuple[int, int]]:
    """Kind → (count, bytes)."""
    total: dict[str, tuple[int, int]] = {}
    for row in rows:
        count, size = total.get(row.kind, (0, 0))
        total[row.kind] = (count + row.count, size + row.bytes)
    return total


# --- exchanges -------------------------------------------------------------------------------------------


INT64 = 8


def exchanges(ctx: RankContext, stage: Stage) -> Iterator[Collective]:
    """Of all micro-batches in the layers of one stage."""
    layout = ctx.spec.parallel
    if layout.tp > 1:
        yield from tensor(ctx, stage)
    if layout.cp > 1:
        yield from (ring_attention if layout.cp_method == "ring" else ulysses)(ctx, stage)
    if layout.ep > 1:
        yield from experts(ctx, stage)
    model = ctx.spec.model
    if layout.cp > 1 and model.experts and model.balance_loss:
        size = FP32 * 2 * ctx.rows * model.experts
        layers, repeated = expert_layers(ctx, stage)
        yield from forward_collectives(ctx, layers, "all-reduce", "balance of experts", "cp", 1, size, repeated)


def recomputed_layers(ctx: RankContext, stage: Stage, *policy: str) -> int:
    """Layers that are computed again, under any policy or under this one."""
    chosen = policies(ctx.spec, stage.layers)
    return sum(one in policy if policy else one != "none" for one in chosen)


def expert_layers(ctx: RankContext, stage: Stage) -> tuple[int, int]:
    """Layers with experts, and those of them that are computed again."""
    routed = [ctx.spec.model.has_experts(layer) for layer in stage.layers]
    again = [one != "none" for one in policies(ctx.spec, stage.layers)]
    return sum(routed), sum(map(operator.and_, routed, again))


def forward_collectives(
    ctx: RankContext, layers: int, kind: str, what: str, group: str, calls: int, size: int, repeated: int
) -> Iterator[Collective]:
    """`calls` in each of these layers' forward pass, and as many again in `repeated` ones, which are recomputed."""
    times = ctx.batches
    yield ctx.collective(kind, what, group, times * layers * calls, size, FORWARD)
    yield ctx.collective(kind, f"{what}, again", group, times * repeated * calls, size, BACKWARD)


# --- tensor parallel ------------------------------------------------------------------------------------


def tensor(ctx: RankContext, stage: Stage) -> Iterator[Collective]:
    layers, repeated, hidden = len(stage.layers), recomputed_layers(ctx, stage), ctx.tokens * ctx.spec.model.hidden
    # Below the first adapter nothing has a gradient.
    frozen = bool(ctx.case.adapters) and stage.first
    adapted = any(weight.name.startswith("attention.") for weight in ctx.case.adapters)
    below = frozen, frozen and not adapted
    mlp: list[tuple[str, bool, int, int, int, int]] = []
    routed, again = expert_layers(ctx, stage)
    # A router takes the stream, and its result is as wide.
    for count, more, width in ((layers - routed, repeated - again, ctx.width), (routed, again, ctx.stream)):
        mlp += [("mlp", True, count, more, below[1], width), ("mlp", False, count, 0, 0, width)] if count else []
    crossings = [  # what, entered (or left), how often, again, without a gradient, bytes of a number
        ("attention", True, layers, repeated, below[0], ctx.width),
        ("attention", False, layers, repeated, below[1], ctx.width),
        *mlp,
        ("embedding", False, int(stage.first), 0, frozen, ctx.stream),
        ("head", True, int(stage.last), 0, 0, ctx.width),
    ]
    for what, entered, count, more, less, width in crossings:
        yield from tp_region(ctx, what, entered, count, more, less, width * hidden)
    yield from row_norms(ctx, layers, repeated)
    if stage.last and not ctx.spec.model.scalar_head:
        yield loss(ctx)


def row_norms(ctx: RankContext, layers: int, repeated: int) -> Iterator[Collective]:
    """DoRA: squared norms of the rows of row-parallel weights, of which a rank has some columns."""
    rows = {linear.name: linear.outputs for linear in linears(ctx.spec.model) if linear.shard == "row"}
    for weight in ctx.case.adapters:
        layer = weight.name.partition(f".{ADAPTERS}.")[0]
        if weight.name.endswith(".magnitude") and layer in rows:
            times, size = ctx.batches, FP32 * rows[layer]
            yield ctx.collective("all-reduce", "norms of rows", "tp", times * layers, size, FORWARD)
            yield ctx.collective("all-reduce", "norms of rows, again", "tp", times * repeated, size, BACKWARD)


def tp_region(
    ctx: RankContext, what: str, entered: bool, count: int, more: int, less: int, size: int
) -> Iterator[Collective]:
    """Into a tensor-parallel region, or out of it: two operations, each the other's gradient, or one and none.

    `more`: recomputed; `less`: without a gradient.
    """
    times = ctx.batches
    pair = ("all-gather", "reduce-scatter") if ctx.spec.parallel.sp else ("", "all-reduce")
    there, back = pair if entered else pair[::-1]
    what = f"{'into' if entered else 'out of'} {what}"
    if there:
        yield ctx.collective(there, what, "tp", times * count, size, FORWARD)
        yield ctx.collective(there, f"{what}, again", "tp", times * more, size, BACKWARD)
    if back:
        yield ctx.collective(back, f"gradient {what}", "tp", times * (count - less), size, BACKWARD)


def loss(ctx: RankContext) -> Collective:
    """Two fp32 numbers a token of every rank, one gather for each chunk of logits; so of log-probabilities too."""
    spec, tp = ctx.spec, ctx.spec.parallel.tp
    if spec.align.method == "distill":
        return divergence(ctx)
    in_place = software_of(spec).in_place
    rows = int(chunk_rows(ctx.tokens, spec.model.vocab // tp, device_of(spec), ctx.width, in_place))
    count = ctx.batches * -(-ctx.tokens // rows)
    return ctx.bulk_collective("all-gather", "loss", "tp", count, ctx.batches * ctx.tokens * tp * 2 * FP32, FORWARD)


def divergence(ctx: RankContext) -> Collective:
    """Two gathers for each chunk, of fp32 numbers of a token: 7 of both distributions, then sums over their range."""
    spec, tp = ctx.spec, ctx.spec.parallel.tp
    rows = int(divergence_rows(ctx.tokens, spec.model.vocab // tp, device_of(spec)))
    numbers = 7 + (2 if spec.align.divergence == "jsd" else 1)
    size = ctx.batches * ctx.tokens * tp * numbers * FP32
    return ctx.bulk_collective("all-gather", "loss", "tp", 2 * ctx.batches * -(-ctx.tokens // rows), size, FORWARD)


# --- context parallel -----------------------------------------------------------------------------------


def ring_attention(ctx: RankContext, stage: Stage) -> Iterator[Collective]:
    spec, hops = ctx.spec, ctx.grid.cp - 1
    block = 2 * ctx.tokens * local_kv_heads(ctx) * attention_core(spec.model).qk_dim  # numbers; values are as wide
    keys, calls = ctx.width * block, ctx.batches * len(stage.layers) * hops
    for kind in ("send", "recv"):
        repeated = recomputed_layers(ctx, stage, "full")
        yield from forward_collectives(ctx, len(stage.layers), kind, "keys and values", "cp", hops, keys, repeated)
        yield ctx.collective(kind, "keys and values for gradients", "cp", calls, keys, BACKWARD)
        yield ctx.collective(kind, "gradients of keys and values", "cp", calls, FP32 * block, BACKWARD)


def ulysses(ctx: RankContext, stage: Stage) -> Iterator[Collective]:
    spec, cp = ctx.spec, ctx.grid.cp
    heads, kv_heads = spec.model.heads // spec.parallel.tp, max(local_kv_heads(ctx), cp)
    calls, repeated = ctx.batches * len(stage.layers), recomputed_layers(ctx, stage)
    core = attention_core(spec.model)
    inputs = heads * core.qk_dim + kv_heads * (core.qk_dim + core.v_dim)
    for what, count in (("queries, keys, values", inputs), ("attention's result", heads * core.v_dim)):
        size = ctx.width * ctx.tokens * count
        yield from forward_collectives(ctx, len(stage.layers), "all-to-all", what, "cp", 1, size, repeated)
        yield ctx.collective("all-to-all", f"gradient of {what}", "cp", calls, size, BACKWARD)


def local_kv_heads(ctx: RankContext) -> int:
    return max(1, ctx.spec.model.kv_heads // ctx.spec.parallel.tp)


# --- expert parallel ------------------------------------------------------------------------------------


def experts(ctx: RankContext, stage: Stage) -> Iterator[Collective]:
    model, (layers, repeated) = ctx.spec.model, expert_layers(ctx, stage)
    yield from forward_collectives(
        ctx, layers, "all-to-all", "tokens by expert", "ep", 1, INT64 * model.experts, repeated
    )
    size = ctx.width * ctx.tokens * model.top_k * model.hidden
    for what in ("tokens to experts", "results of experts"):
        yield from forward_collectives(ctx, layers, "all-to-all", what, "ep", 1, size, repeated)
        yield ctx.collective("all-to-all", f"gradient of {what}", "ep", ctx.batches * layers, size, BACKWARD)


# --- pipeline -------------------------------------------------------------------------------------------


def pipeline_sends(ctx: RankContext) -> Iterator[Collective]:
    """Between stages on different ranks; the two stages at the turn of a V are on one."""
    layout = ctx.spec.parallel
    if layout.pp == 1:
        return
    size = ctx.stream * ctx.tokens * ctx.spec.model.hidden // (layout.tp if layout.sp else 1)
    last = layout.pp * layout.virtual_stages - 1
    own = {stage.index for stage in ctx.stages}
    after = sum(
        stage < last and stage + 1 not in own for stage in own
    )  # of its stages, those with a next one elsewhere
    before = sum(stage > 0 and stage - 1 not in own for stage in own)
    count = ctx.batches
    yield ctx.collective("send", "hidden states", "pp", count * after, size, FORWARD)
    yield ctx.collective("recv", "hidden states", "pp", count * before, size, FORWARD)
    yield ctx.collective("send", "gradients of hidden states", "pp", count * before, size, BACKWARD)
    yield ctx.collective("recv", "gradients of hidden states", "pp", count * after, size, BACKWARD)
