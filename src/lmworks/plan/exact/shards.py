"""The weights that one rank holds, and how data parallelism shards them: rows, flat parameters, FSDP units, buckets.

A rank holds the stages of its pipeline rank and a tensor- and expert-parallel shard of each weight: which dimension
is sharded is part of the description of a component (`spec/components.py`). Data parallelism shards what is left.
ψ/n is not a quotient: ZeRO and FSDP2 deal the rows of each weight as `torch.chunk` does, ⌈rows/n⌉ to a rank, so the
last ranks have fewer, or none; FSDP2 allocates ⌈rows/n⌉ everywhere, and what no row fills is padding. FSDP1 joins
the weights of a block into one flat parameter, each starting at a multiple of 16 bytes, and cuts that into n equal
runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...spec import ModelSpec, RunSpec, components
from ...spec.lora import quantized_parts
from ..case import Case
from ..pipelines.schedule import stages_of
from ..pipelines.stages import Stage, split_layers

ROOT = components.ROOT  # the unit of weights outside blocks: embedding, last norm, head


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]
    unit: int  # the block it belongs to, or ROOT
    expert: bool = False  # other experts lie on other ranks: its gradient meets over "edp"
    partial: bool = False  # whole on every tensor-parallel rank, each of which finds a part of its gradient
    trained: bool = True  # False: frozen, under adapters
    # Where it is kept in 4 or 8 bits: (numbers, bytes of each) of what it is stored in.
    quantized: tuple[tuple[int, int], ...] = ()

    @property
    def inside(self) -> str:
        """Its name within the block, or within the network."""
        return self.name if self.unit == ROOT else self.name.split(".", 2)[2]

    @property
    def axis(self) -> str:
        """The ranks over which it is sharded: those that hold the same weight."""
        return "edp" if self.expert else "shard"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def weights(model: ModelSpec, stage: Stage | None = None) -> list[Weight]:
    """As `GPT(model).named_parameters()` has them, of all or of one stage; a tied head is no weight of its own."""
    return [Weight(weight.name, weight.shape, weight.layer) for weight in described(model, stage)]


Adapters = tuple[components.Weight, ...]  # of a block


def described(model: ModelSpec, stage: Stage | None, adapters: Adapters = ()) -> list[components.Weight]:
    if stage is None:
        return components.weights(model)
    found = []
    if stage.first or (stage.last and model.tie_embeddings):
        embedding = list(components.embedding_weights(model))
        found += embedding if stage.first else embedding[:1]
    for layer in stage.layers:
        found += components.layer_weights(model, layer)
        found += [replace(weight, name=f"blocks.{layer}.{weight.name}", layer=layer) for weight in adapters]
    return [*found, *(components.head_weights(model) if stage.last else ())]


# --- what a rank updates ---------------------------------------------------------------------------------


FP32 = 4
ALIGNED = 16  # bytes: where FSDP1 lets a weight begin inside its flat parameter
ROWS_CUT = ("zero1", "zero2", "fsdp2")  # strategies that deal the rows of each weight


def rank_stages(case: Case, pp_rank: int) -> list[Stage]:
    """Of a pipeline rank. Other code bases are taken to cut a network evenly, and their busiest rank is meant."""
    ranks, virtual, layers = int(case.pp), int(case.virtual), case.model.layers
    indices, count = stages_of(case.schedule, ranks, virtual, pp_rank), ranks * virtual
    if case.is_lmworks and count <= layers:
        stages = split_layers(case.model, case.seq, count)
        return [stages[index] for index in indices]
    each = -(-layers // count)
    found, left = [], layers
    for index in indices:
        blocks = range(index * each, index * each + min(each, left))
        found.append(Stage(index, blocks, first=index == 0, last=index == count - 1))
        left -= len(blocks)
    return found


def stage_weights(case: Case, stage: Stage) -> list[Weight]:
    """What tensor and expert parallelism leave of each weight, before data parallelism: alike on all their ranks."""
    return local_weights(stage, *weight_layout(case))


def trained_weights(case: Case, stage: Stage) -> list[Weight]:
    return [weight for weight in stage_weights(case, stage) if weight.trained]


def weight_layout(case: Case) -> tuple[ModelSpec, int, bool, int, int, Adapters, str]:
    """What the local shapes of weights follow from."""
    experts = int(case.ep), int(case.expert_tp)
    return case.model, int(case.tp), bool(case.sp and case.tp > 1), *experts, case.adapters, case.frozen_base


@functools.lru_cache(maxsize=2**10)
def local_weights(
    stage: Stage, model: ModelSpec, tp: int, sp: bool, ep: int, expert_tp: int, adapters: Adapters, base: str
) -> list[Weight]:
    linears = {f"{linear.name}.weight" for linear in components.linears(model)} if base else set()
    found, trained = [], {components.SCORE, *(weight.name for weight in adapters)}
    for weight in described(model, stage, adapters):
        shape, expert, dim = list(weight.shape), ep > 1 and weight.experts > 0, weight.sharded(tp)
        if expert:
            shape[0] //= ep
        if dim is not None:
            shape[dim] //= expert_tp if weight.experts else tp
        local = Weight(weight.name, tuple(shape), weight.layer, expert, weight.has_partial_grad(tp, sp))
        if adapters and local.inside not in trained:
            parts = quantized_parts(weight, local.shape, base) if local.inside in linears else ()
            local = replace(local, trained=False, quantized=parts)
        found.append(local)
    return found


def local_shapes(spec: RunSpec, rank: int) -> list[tuple[Weight, tuple[int, ...]]]:
    """Each weight of a rank with the shape of what its optimizer updates of it; a run of FSDP1 has one dimension."""
    case = Case.of(spec)
    place = case.grid.coordinates(rank)
    found: list[tuple[Weight, tuple[int, ...]]] = []
    for stage in rank_stages(case, place["pp"]):
        for unit in units(case, stage):
            found += updated_shapes(case, unit, place)
    return found


def updated_shapes(case: Case, unit: Unit, place: dict[str, int]) -> list[tuple[Weight, tuple[int, ...]]]:
    """The same of one unit."""
    if case.sharding == "fsdp1" and case.dp_shard > 1:
        sizes = flat_parameter(case, unit).own(place["shard"])
        return [(weight, (size,)) for weight, size in zip(unit.weights, sizes, strict=True)]
    if case.sharding not in ROWS_CUT:
        return [(weight, weight.shape) for weight in unit.trained]
    return [(weight, own_rows(case, unit, weight, place)) for weight in unit.trained]


def own_rows(case: Case, unit: Unit, weight: Weight, place: dict[str, int]) -> tuple[int, ...]:
    """The shape of a rank's rows of a weight."""
    return (local_rows(weight.shape[0], case.grid.size(unit.axis), place[unit.axis]), *weight.shape[1:])


# --- rows -----------------------------------------------------------------------------------------------


def chunk(rows: int, ranks: int) -> int:
    """Rows that `torch.chunk` gives to a rank, at most."""
    return -(-rows // ranks)


def local_rows(rows: int, ranks: int, rank: int) -> int:
    each = chunk(rows, ranks)
    return max(0, min(each, rows - rank * each))


def padded_size(weight: Weight, ranks: int) -> int:
    """Elements of a rank's chunk of a weight, filled up."""
    return chunk(weight.shape[0], ranks) * math.prod(weight.shape[1:])


# --- units ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Weights that FSDP gathers at once, over the ranks of one axis."""

    block: int  # or ROOT: what a stage has outside blocks
    axis: str
    weights: tuple[Weight, ...]

    @property
    def trained(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.weights if weight.trained)


def units(case: Case, stage: Stage) -> list[Unit]:
    """The root and each block. Experts are a unit of their own; so, then, are their router and the shared ones."""
    return units_of(stage, *weight_layout(case))


@functools.lru_cache(maxsize=2**10)
def units_of(
    stage: Stage, model: ModelSpec, tp: int, sp: bool, ep: int, expert_tp: int, adapters: Adapters, base: str
) -> list[Unit]:
    found: dict[tuple[int, str], list[Weight]] = {}
    for weight in local_weights(stage, model, tp, sp, ep, expert_tp, adapters, base):
        part = ""
        if ep > 1 and weight.inside.startswith("mlp."):
            part = "experts" if weight.expert else weight.inside.split(".")[1]
        found.setdefault((weight.unit, part), []).append(weight)
    return [Unit(block, inside[0].axis, tuple(inside)) for (block, _), inside in sorted(found.items())]


def unit_shard(case: Case, unit: Unit, trained: bool = False) -> int:
    """Elements that a rank allocates of a unit, padding included, without quantized weights; `trained`: of its
    gradients."""
    if case.strategy == "fsdp1":
        return flat_parameter(case, unit).length
    ranks = case.grid.size(unit.axis)
    chosen = unit.trained if trained else unit.weights
    return sum(padded_size(weight, ranks) for weight in chosen if not weight.quantized)


def unit_size(case: Case, unit: Unit, trained: bool = False) -> int:
    """Elements of a unit when it is gathered, as `unit_shard` counts them."""
    return case.grid.size(unit.axis) * unit_shard(case, unit, trained)


def quantized_shard(case: Case, unit: Unit) -> int:
    """Bytes that a rank of FSDP2 allocates of a unit's quantized weights, padding included."""
    ranks = case.grid.size(unit.axis)
    return sum(each * chunk(count, ranks) for weight in unit.weights for count, each in weight.quantized)


def unit_bytes(case: Case, unit: Unit) -> int:
    """Of a unit when it is gathered."""
    quantized = case.grid.size(unit.axis) * quantized_shard(case, unit)
    return gathered_bytes(case, unit.block) * unit_size(case, unit) + quantized


def gathered_bytes(case: Case, block: int) -> int:
    """Of a gathered weight: blocks run in the compute precision, all else stays as it is kept."""
    return case.software.weights if block == ROOT else min(case.software.weights, case.compute_bytes)


@dataclass(frozen=True)
class FlatParameter:
    """A flat parameter of FSDP1: where its weights lie, and how long a rank's run is. In elements."""

    spans: tuple[tuple[int, int], ...]  # (start, size) of each weight
    length: int  # of one rank's run, padding included

    def own(self, rank: int) -> list[int]:
        """Elements of each weight in a rank's run."""
        begin, end = rank * self.length, (rank + 1) * self.length
        return [max(0, min(end, start + size) - max(begin, start)) for start, size in self.spans]


def flat_parameter(case: Case, unit: Unit) -> FlatParameter:
    ranks = case.grid.size("shard") if case.dp_shard > 1 else 1
    step, end = ALIGNED // gathered_bytes(case, unit.block), 0
    spans = []
    for weight in unit.weights:
        start = -(-end // step) * step
        spans.append((start, weight.size))
        end = start + weight.size
    return FlatParameter(tuple(spans), chunk(end, ranks))


# --- buckets --------------------------------------------------------------------------------------------


def buckets(case: Case, sizes: Sequence[int]) -> list[int]:
    """Elements of weights that travel together, last ones first: bucket_mb of gradients, or the last weight beyond."""
    return list(filled(reversed(sizes), case.bucket_mb * 2**20 / case.software.weights))


def filled(sizes: Iterable[int], limit: float) -> Iterable[int]:
    total = 0
    for size in sizes:
        total += size
        if total >= limit:
            yield total
            total = 0
    if total:
        yield total
