"""What data parallelism makes every rank hold, and send in a step: to the byte, from the shapes of the weights alone.

    resident, of ψ weights over n ranks    parameters   gradients   AdamW's moments
    DDP                                    4ψ           4ψ          8ψ
    ZeRO-1                                 4ψ           4ψ          8ψ/n
    ZeRO-2                                 4ψ           4ψ/n        8ψ/n
    ZeRO-3, FSDP1, FSDP2                   4ψ/n         4ψ/n        8ψ/n

ψ/n is not a quotient. ZeRO and FSDP2 deal the rows of each weight as `torch.chunk` does, ⌈rows/n⌉ to a rank, so the
last ranks have fewer, or none; FSDP2 allocates ⌈rows/n⌉ everywhere, and what no row fills is padding. FSDP1 joins the
weights of a block into one flat parameter, each starting at a multiple of 16 bytes, and cuts that into n equal runs.

The fp32 parameters are the master weights: only DeepSpeed holds a second copy of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ..spec import RunSpec, SpecError
from .weights import ROOT, Weight, weights

FP32 = 4
ALIGNED = 16  # bytes: where FSDP1 lets a weight begin inside its flat parameter


@dataclass(frozen=True)
class Resident:
    """Bytes of one rank just before an update, when its gradients are complete."""

    parameters: int
    gradients: int
    master: int  # fp32 copies of weights that are held in another format
    optimizer: int
    parameter_padding: int  # allocated with the parameters, and no part of any
    gradient_padding: int

    @property
    def padding(self) -> int:
        return self.parameter_padding + self.gradient_padding

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.master + self.optimizer + self.padding


@dataclass(frozen=True)
class Collective:
    """Calls of one kind in a step; bytes in the convention of `parallel.traffic`, the same on every rank."""

    kind: str
    what: str
    count: int
    bytes: int


def strategy_of(spec: RunSpec) -> str:
    """ddp, zero1, zero2, fsdp1 or fsdp2 (which ZeRO-3 is). Other layouts are not worked out here."""
    layout = spec.parallel
    for axis in ("pp", "tp", "cp", "ep"):
        if getattr(layout, axis) > 1:
            raise SpecError(
                f"parallel.{axis} = {getattr(layout, axis)}: bytes are worked out for data parallelism alone"
            )
    if layout.engine != "native" or layout.offload != "none":
        raise SpecError("bytes are worked out for parallel.engine = 'native' and parallel.offload = 'none'")
    if layout.dp_shard > 1 and layout.dp_replicate > 1:
        raise SpecError("bytes are worked out for copies or for shards, not for copies of shards")
    if layout.strategy == "zero":
        return {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp2"}[layout.zero]
    return layout.strategy


def resident(spec: RunSpec, rank: int) -> Resident:
    found, ranks, kind = weights(spec.model), spec.parallel.dp, strategy_of(spec)
    whole = FP32 * sum(weight.size for weight in found)
    if kind == "fsdp1" and spec.parallel.dp_shard > 1:
        units = flat_units(spec)
        own = [unit.own(rank) for unit in units]
        held = FP32 * sum(sum(sizes) for sizes in own)
        padding = FP32 * sum(unit.length for unit in units) - held
        states = optimizer(spec, [size for sizes in own for size in sizes])
        return Resident(held, held, 0, states, padding, padding)
    if kind in ("ddp", "fsdp1"):
        return Resident(whole, whole, 0, optimizer(spec, [weight.size for weight in found]), 0, 0)
    sizes = [own_rows(weight.rows, ranks, rank) * weight.width for weight in found]
    held, states = FP32 * sum(sizes), optimizer(spec, sizes)
    if kind == "zero1":
        return Resident(whole, whole, 0, states, 0, 0)
    if kind == "zero2":
        return Resident(whole, held, 0, states, 0, 0)
    padding = FP32 * sum(padded(weight, ranks) for weight in found) - held
    return Resident(held, held, 0, states, padding, padding)


def deepspeed_resident(spec: RunSpec) -> Resident:
    """DeepSpeed in fp32, the same on every rank; how it pads is written in its own sources.

    It keeps an fp32 copy of what a rank updates beside the weights. Matrices and the rest are two groups of the
    optimizer. Stages 1 and 2 join each group's weights in one buffer, cut at a multiple of 2 elements; stage 3 cuts
    every weight into ⌈size/n⌉ elements. Parts are filled up as tensors: their padding is among the bytes of each kind.
    """
    found, ranks = weights(spec.model), spec.parallel.dp_shard
    groups = [[w.size for w in found if (len(w.shape) > 1) == matrices] for matrices in (True, False)]
    if spec.parallel.zero == 3:
        own = sum(chunk(size, ranks) for sizes in groups for size in sizes)
        parameters, padding = own, 0
    else:
        own = sum(2 * chunk(sum(sizes), 2 * ranks) for sizes in groups)
        parameters = sum(sum(sizes) for sizes in groups)
        padding = ranks * own - parameters
    states = FP32 * (2 * own + len(groups)) if spec.optim.optimizer == "adamw" else 0
    return Resident(FP32 * parameters, FP32 * own, FP32 * own, states, FP32 * padding, 0)


def optimizer(spec: RunSpec, sizes: Iterable[int]) -> int:
    """Two fp32 moments of what a rank updates, and for each weight it has something of, an fp32 count of steps."""
    if spec.optim.optimizer == "sgd":
        return 0
    return sum(2 * FP32 * size + FP32 for size in sizes if size)


# --- how weights are cut --------------------------------------------------------------------------------


def chunk(rows: int, ranks: int) -> int:
    """Rows that `torch.chunk` gives to a rank, at most."""
    return -(-rows // ranks)


def own_rows(rows: int, ranks: int, rank: int) -> int:
    each = chunk(rows, ranks)
    return max(0, min(each, rows - rank * each))


def padded(weight: Weight, ranks: int) -> int:
    """Elements of a rank's chunk of a weight, filled up."""
    return chunk(weight.rows, ranks) * weight.width


@dataclass(frozen=True)
class FlatUnit:
    """A flat parameter of FSDP1: where its weights lie, and how long a rank's run is. In elements."""

    unit: int
    spans: tuple[tuple[int, int], ...]  # (start, size) of each weight
    length: int  # of one rank's run, padding included

    def own(self, rank: int) -> list[int]:
        """Elements of each weight in a rank's run."""
        begin, end = rank * self.length, (rank + 1) * self.length
        return [max(0, min(end, start + size) - max(begin, start)) for start, size in self.spans]


def flat_units(spec: RunSpec) -> list[FlatUnit]:
    found, ranks = weights(spec.model), spec.parallel.dp_shard
    units = []
    for unit in units_of(spec):
        step, end = ALIGNED // compute_bytes(spec, unit), 0
        spans = []
        for weight in (weight for weight in found if weight.unit == unit):
            start = -(-end // step) * step
            spans.append((start, weight.size))
            end = start + weight.size
        units.append(FlatUnit(unit, tuple(spans), chunk(end, ranks)))
    return units


def units_of(spec: RunSpec) -> list[int]:
    """What FSDP gathers at once: everything outside blocks, and each block."""
    return [ROOT, *range(spec.model.layers)]


def compute_bytes(spec: RunSpec, unit: int) -> int:
    """Of a gathered weight: blocks run in the compute precision, all else stays fp32."""
    return FP32 if unit == ROOT or spec.precision.dtype == "fp32" else 2


# --- what travels ---------------------------------------------------------------------------------------


def collectives(spec: RunSpec) -> list[Collective]:
    """Of one step, without evaluation and checkpoints. Nothing travels where there is one rank."""
    kind = strategy_of(spec)
    if spec.parallel.dp == 1:
        return []
    if kind == "ddp" or (kind == "fsdp1" and spec.parallel.dp_shard == 1):
        rows = reduced(spec)
    elif kind in ("zero1", "zero2"):
        rows = scattered(spec, every=kind == "zero2")
    else:
        rows = gathered(spec, kind)
    return [*rows, *figures(spec)]


def figures(spec: RunSpec) -> list[Collective]:
    """What the training loop itself says to all ranks: loss, ‖g‖², and of each rank its memory and its signal."""
    rows = [Collective("all-reduce", "figures of the step", 1, 8 * (2 + 2 * spec.parallel.world))]
    if spec.data.document_mask:
        rows.append(Collective("all-reduce", "targets that count", 1, 8))
    if spec.model.experts:
        rows.append(Collective("all-reduce", "visits of experts", 1, 8 * spec.model.layers * spec.model.experts))
    return rows


def reduce_bytes(spec: RunSpec) -> int:
    return 2 if spec.precision.reduce == "bf16" else FP32


def reduced(spec: RunSpec) -> list[Collective]:
    """All gradients once, after the last micro-batch."""
    found = weights(spec.model)
    if spec.parallel.strategy == "fsdp1":
        numbers, count = sum(unit.length for unit in flat_units(spec)), len(units_of(spec))
    else:
        numbers, count = sum(weight.size for weight in found), len(buckets(spec, found))
    return [Collective("all-reduce", "gradients", count, reduce_bytes(spec) * numbers)]


def buckets(spec: RunSpec, found: list[Weight]) -> list[list[Weight]]:
    """Weights that travel together, last ones first: a bucket is sent once it holds bucket_mb of fp32 gradients."""
    limit, made, held = spec.parallel.bucket_mb * 2**20, list[list[Weight]](), list[Weight]()
    for index, weight in enumerate(reversed(found)):
        held.append(weight)
        if FP32 * sum(weight.size for weight in held) >= limit or index == len(found) - 1:
            made.append(held)
            held = []
    return made


def scattered(spec: RunSpec, every: bool) -> list[Collective]:
    """ZeRO-1 and 2: gradients to their owners (`every`: after each micro-batch), new weights back to all."""
    found, ranks = weights(spec.model), spec.parallel.dp_shard
    count = len(buckets(spec, found))
    numbers = sum(ranks * padded(weight, ranks) for weight in found)
    times = spec.accumulation if every else 1
    return [
        Collective("reduce-scatter", "gradients", times * count, times * reduce_bytes(spec) * numbers),
        Collective("all-gather", "new weights", count, FP32 * numbers),
    ]


def gathered(spec: RunSpec, kind: str) -> list[Collective]:
    """FSDP: units whole while they run, gradients to their owners after the last micro-batch.

    With reshard, blocks are gathered again for the backward pass; the root stays. Without, FSDP2 still lets go after
    every backward pass, and FSDP1 after the last alone.
    """
    times = spec.accumulation
    if kind == "fsdp1" and not spec.parallel.reshard:
        times = 1
    sizes = unit_sizes(spec, kind)
    root = sizes.pop(ROOT)
    inside = sum(compute_bytes(spec, unit) * size for unit, size in sizes.items())
    rows = [
        Collective("all-gather", "weights, forward", times * (1 + len(sizes)), times * (FP32 * root + inside)),
        Collective("all-gather", "weights, backward", times * len(sizes), times * inside),
        Collective("reduce-scatter", "gradients", 1 + len(sizes), reduce_bytes(spec) * (root + sum(sizes.values()))),
    ]
    return rows if spec.parallel.reshard else [rows[0], rows[2]]


def unit_sizes(spec: RunSpec, kind: str) -> dict[int, int]:
    """Elements of each unit when it is gathered, padding included."""
    ranks = spec.parallel.dp_shard
    if kind == "fsdp1":
        return {unit.unit: ranks * unit.length for unit in flat_units(spec)}
    sizes = dict.fromkeys(units_of(spec), 0)
    for weight in weights(spec.model):
        sizes[weight.unit] += ranks * padded(weight, ranks)
    return sizes


class Calls(Protocol):
    """A row of this table, or of one that was counted (`parallel.traffic.Row`)."""

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
