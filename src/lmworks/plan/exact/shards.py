"""How data parallelism cuts what a rank holds: rows, flat runs, units that are gathered, buckets that travel together.

ψ/n is not a quotient. ZeRO and FSDP2 deal the rows of each weight as `torch.chunk` does, ⌈rows/n⌉ to a rank, so the
last ranks have fewer, or none; FSDP2 allocates ⌈rows/n⌉ everywhere, and what no row fills is padding. FSDP1 joins the
weights of a block into one flat parameter, each starting at a multiple of 16 bytes, and cuts that into n equal runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import Grid, RunSpec
from ..pipelines.stages import Stage, stages_of_rank
from .weights import ROOT, Weight, stage_weights

FP32 = 4
ALIGNED = 16  # bytes: where FSDP1 lets a weight begin inside its flat parameter


def strategy_of(spec: RunSpec) -> str:
    """Who holds what, as parallelize.py decides: alone, ddp, zero0, zero1, zero2, fsdp1 or fsdp2 (which ZeRO-3 is).

    "alone": nobody else has other data, and nothing has to meet. "zero0" is DDP with a group of its own for experts and
    with gradients that may come in two halves, which PyTorch's DDP can do neither of. FSDP1 without shards is "ddp",
    but for its flat parameters.
    """
    layout = spec.parallel
    kind = f"zero{layout.zero}" if layout.strategy == "zero" else layout.strategy
    if Grid.of(layout).size("dp_cp") == 1 and layout.offload != "full":
        return "alone"
    if kind == "ddp" and (layout.pp > 1 or layout.ep > 1):
        return "zero0"
    return "fsdp2" if kind == "zero3" else kind


def axis_of(weight: Weight) -> str:
    """The ranks over which a weight is sharded: those that hold the same one."""
    return "edp" if weight.expert else "shard"


def local_shapes(spec: RunSpec, rank: int) -> list[tuple[Weight, tuple[int, ...]]]:
    """Each weight of a rank with the shape of what its optimizer updates of it; a run of FSDP1 has one dimension."""
    grid, kind = Grid.of(spec.parallel), strategy_of(spec)
    place = grid.coordinates(rank)
    found: list[tuple[Weight, tuple[int, ...]]] = []
    for stage in stages_of_rank(spec, place["pp"]):
        if kind == "fsdp1" and spec.parallel.dp_shard > 1:
            for unit in units(spec, stage):
                sizes = flat_parameter(spec, unit).own(place["shard"])
                found += [(weight, (size,)) for weight, size in zip(unit.weights, sizes, strict=True)]
            continue
        for weight in stage_weights(spec, stage):
            axis = axis_of(weight)
            cut = kind in ("zero1", "zero2", "fsdp2")
            rows = local_rows(weight.rows, grid.size(axis), place[axis]) if cut else weight.rows
            found.append((weight, (rows, *weight.shape[1:])))
    return found


# --- rows -----------------------------------------------------------------------------------------------


def chunk(rows: int, ranks: int) -> int:
    """Rows that `torch.chunk` gives to a rank, at most."""
    return -(-rows // ranks)


def local_rows(rows: int, ranks: int, rank: int) -> int:
    each = chunk(rows, ranks)
    return max(0, min(each, rows - rank * each))


def padded_size(weight: Weight, ranks: int) -> int:
    """Elements of a rank's chunk of a weight, filled up."""
    return chunk(weight.rows, ranks) * weight.width


# --- units ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Weights that FSDP gathers at once, over the ranks of one axis."""

    block: int  # or ROOT: what a stage has outside blocks
    axis: str
    weights: tuple[Weight, ...]


def units(spec: RunSpec, stage: Stage) -> list[Unit]:
    """The root and each block. Experts are a unit of their own; so, then, are their router and the shared ones."""
    found: dict[tuple[int, str], list[Weight]] = {}
    for weight in stage_weights(spec, stage):
        part = ""
        if spec.parallel.ep > 1 and weight.inside.startswith("mlp."):
            part = "experts" if weight.expert else weight.inside.split(".")[1]
        found.setdefault((weight.unit, part), []).append(weight)
    return [Unit(block, axis_of(inside[0]), tuple(inside)) for (block, _), inside in sorted(found.items())]


def unit_size(spec: RunSpec, unit: Unit) -> int:
    """Elements of a unit when it is gathered, padding included."""
    ranks = Grid.of(spec.parallel).size(unit.axis)
    if spec.parallel.strategy == "fsdp1":
        return ranks * flat_parameter(spec, unit).length
    return ranks * sum(padded_size(weight, ranks) for weight in unit.weights)


def weight_bytes(spec: RunSpec) -> int:
    """Of a weight as it is kept, of its gradient, and of a number of the residual stream, which starts as a weight."""
    return 2 if spec.precision.weights == "bf16" else FP32


def compute_bytes(spec: RunSpec, block: int) -> int:
    """Of a gathered weight: blocks run in the compute precision, all else stays as it is kept."""
    return weight_bytes(spec) if block == ROOT or spec.precision.compute == "fp32" else 2


def reduce_bytes(spec: RunSpec) -> int:
    return 2 if spec.precision.reduce == "bf16" else FP32


@dataclass(frozen=True)
class FlatParameter:
    """A flat parameter of FSDP1: where its weights lie, and how long a rank's run is. In elements."""

    spans: tuple[tuple[int, int], ...]  # (start, size) of each weight
    length: int  # of one rank's run, padding included

    def own(self, rank: int) -> list[int]:
        """Elements of each weight in a rank's run."""
        begin, end = rank * self.length, (rank + 1) * self.length
        return [max(0, min(end, start + size) - max(begin, start)) for start, size in self.spans]


def flat_parameter(spec: RunSpec, unit: Unit) -> FlatParameter:
    ranks = Grid.of(spec.parallel).size("shard") if spec.parallel.dp_shard > 1 else 1
    step, end = ALIGNED // compute_bytes(spec, unit.block), 0
    spans = []
    for weight in unit.weights:
        start = -(-end // step) * step
        spans.append((start, weight.size))
        end = start + weight.size
    return FlatParameter(tuple(spans), chunk(end, ranks))


# --- buckets --------------------------------------------------------------------------------------------


def buckets(spec: RunSpec, found: list[Weight]) -> list[list[Weight]]:
    """Weights that travel together, last ones first: a bucket is sent once it holds bucket_mb of gradients."""
    limit, made, ctx = spec.parallel.bucket_mb * 2**20, list[list[Weight]](), list[Weight]()
    for index, weight in enumerate(found[::-1]):
        ctx.append(weight)
        if weight_bytes(spec) * sum(weight.size for weight in ctx) >= limit or index == len(found) - 1:
            made.append(ctx)
            ctx = []
    return made
