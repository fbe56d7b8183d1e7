"""What one rank holds of weights, gradients and optimizer states: one rank of one run to the byte, or many candidates.

    resident, of ψ weights over n ranks    parameters   gradients   AdamW's moments
    DDP                                    4ψ           4ψ          8ψ
    ZeRO-1                                 4ψ           4ψ          8ψ/n
    ZeRO-2                                 4ψ           4ψ/n        8ψ/n
    ZeRO-3, FSDP1, FSDP2                   4ψ/n         4ψ/n        8ψ/n

ψ is what a pipeline, tensor and expert parallelism leave to a rank (`shards.stage_weights`), and n the ranks that
share it: dp_shard × cp, for experts those that hold the same ones. How ψ/n is rounded stands in `exact/shards.py`. That
is of fp32 weights, which are their own master: with precision.weights = 'bf16' parameters and gradients have 2 bytes,
and a master 2 more for what a rank updates; with precision.states = 'bf16' moments have 4. Other code bases cut flat
buffers, ψ/n is a quotient, and most hold an fp32 master.

Nothing here depends on the batch: many candidates share a layout, and each distinct one is worked out once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...spec import Grid, ModelSpec, RunSpec, SpecError
from ...spec.errors import did_you_mean
from ...spec.layout import V_SHAPED
from ..case import Case, Number
from ..exact.optimizers import STATES, optimizer_bytes, steps_bytes
from ..exact.shards import (
    FP32,
    ROOT,
    Unit,
    buckets,
    chunk,
    gathered_bytes,
    local_rows,
    own_rows,
    padded_size,
    quantized_shard,
    rank_stages,
    trained_weights,
    unit_bytes,
    unit_shard,
    unit_size,
    units,
    updated_shapes,
    weights,
)
from ..pipelines.stages import Stage


@dataclass(frozen=True)
class Resident:
    """Bytes of one rank just before an update, when its gradients are complete."""

    parameters: Any = 0
    gradients: Any = 0
    master: Any = 0  # fp32 copies of weights that are held in another format, or the bits that these lack
    optimizer: Any = 0
    parameter_padding: Any = 0  # allocated with the parameters, and no part of any
    gradient_padding: Any = 0

    @property
    def padding(self) -> Any:
        return self.parameter_padding + self.gradient_padding

    @property
    def total(self) -> Any:
        return self.parameters + self.gradients + self.master + self.optimizer + self.padding


@dataclass(frozen=True)
class Place:
    """Of a rank: its pipeline rank, and which shard of weights and of experts it owns."""

    pp: Number = 0
    shard: int = 0
    edp: int = 0

    @classmethod
    def of(cls, grid: Grid, rank: int) -> Self:
        place = grid.coordinates(rank)
        return cls(place["pp"], place["shard"], place["edp"])


# Places of a backward pass up to which gradients are counted; see peak_memory.py.
BEFORE, AT_TOP, AT_LOWEST, AT_END = range(4)


@dataclass(frozen=True)
class RankWeights:
    """Elements of the trained weights of a rank before data parallelism cuts them, unless it says otherwise."""

    layers: Any  # blocks of all its stages
    size: Any
    block: Any  # mean of its blocks
    matrices: Any  # of a block, without vectors; frozen ones too, but for quantized ones
    root: Any  # outside blocks
    head: Any  # whose gradients are there when the blocks' backward pass begins
    tied: Any  # of a tied embedding, whose gradient waits for the head's
    sharding: Any  # `Case.sharding`
    # As FSDP gathers them, frozen ones too, padding included.
    gathered_root: Any
    gathered_block: Any
    # Gradients as FSDP reduces them, and this rank's part of each.
    reduced_root: Any
    reduced_block: Any
    own_reduced_root: Any
    own_reduced_block: Any
    # ZeRO's buckets: of those complete at four places of a backward pass the sum, and the last two; these where all
    # buckets of an earlier micro-batch went before; the last bucket, the last two, and the two largest.
    complete: tuple[Any, ...]
    flying: tuple[Any, ...]
    flying_later: tuple[Any, ...]
    last_bucket: Any
    last_buckets: Any
    largest_buckets: Any
    # Bytes, as if device and host were one; and in pinned buffers, which PyTorch rounds up to powers of two.
    parameters: Any
    gradients: Any
    master: Any
    optimizer: Any
    parameter_padding: Any
    gradient_padding: Any
    updated: Any  # elements that the rank updates
    pinned_optimizer: Any  # offload = 'optimizer'
    pinned_full: Any  # offload = 'full'

    @property
    def resident(self) -> Resident:
        return Resident(**{field.name: getattr(self, field.name) for field in fields(Resident)})


def rank_weights(case: Case, place: Place) -> RankWeights:
    """Of one candidate, or of all of them, each distinct layout once."""
    if case.optimizer not in STATES:
        raise SpecError(f"optimizer {case.optimizer!r} is not known{did_you_mean(case.optimizer, STATES)}")
    alike = case.replace(
        micro_batch=1, accumulation=1, recompute="none", recompute_every=1, policies=(), offload_activations=0.0,
        schedule="zbv" if case.schedule in V_SHAPED else "1f1b", reshard=True, device="cuda", host=1.0,
        offload="full" if case.offload == "full" else "none", **dict.fromkeys(DEGREES, 1),
    )  # fmt: skip
    known = weights_by_layout(alike)

    def one(*numbers: int) -> RankWeights:
        degrees = (*numbers, place.shard, place.edp)
        if degrees not in known:  # many degrees give the same stages over as many ranks
            candidate = alike.replace(**dict(zip(DEGREES, numbers, strict=False)))
            stages, grid = rank_stages(candidate, numbers[-1]), candidate.grid
            ranks = grid.size("shard"), grid.size("edp"), candidate.dp_shard > 1, candidate.sharding
            routed = (sum(map(case.model.has_experts, stage.layers)) for stage in stages)
            held = (
                (len(stage.layers), stage.first, stage.last, some) for stage, some in zip(stages, routed, strict=True)
            )
            layout = (candidate.tp, candidate.ep, *ranks, place.shard, place.edp, *held)
            if layout not in known:
                known[layout] = weights_of_rank(candidate, stages, place)
            known[degrees] = known[layout]
        return known[degrees]

    return distinct(one, *(getattr(case, name) for name in DEGREES), place.pp)


DEGREES = ("tp", "cp", "pp", "ep", "virtual", "dp_replicate", "dp_shard")


@functools.lru_cache(maxsize=2**6)
def weights_by_layout(_alike: Case) -> dict[tuple[Any, ...], RankWeights]:
    """Those that are worked out already, by degrees and place, and by what of these matters."""
    return {}


Found = TypeVar("Found", bound=Any)


def distinct(function: Callable[..., Found], *columns: Number) -> Found:
    """`function` of whole numbers, which gives a dataclass of numbers; of arrays called once for each distinct row."""
    if all(np.ndim(column) == 0 for column in columns):
        return function(*(int(column) for column in columns))
    rows, where = distinct_rows(columns)
    found = [function(*row) for row in rows]
    arrays = {f.name: np.array([getattr(one, f.name) for one in found])[where].T for f in fields(found[0])}
    kind: Callable[..., Found] = type(found[0])
    return kind(**arrays)


def distinct_rows(columns: Sequence[Number]) -> tuple[list[list[int]], NDArray[Any]]:
    """Distinct rows of columns of whole numbers, and which of them each row is."""
    table = np.stack([column.ravel() for column in np.broadcast_arrays(*columns)]).astype(np.int64)
    codes = np.zeros(table.shape[1], dtype=np.int64)  # one number instead of a row: sorting rows is slow
    for column in table:  # codes are numbered anew after each: the product of all columns may be above 2⁶³
        _, first, codes = np.unique(codes * (column.max() + 1) + column, return_index=True, return_inverse=True)
    return table[:, first].T.tolist(), codes


GATHERED = ("gathered", "reduced", "own_reduced")


def weights_of_rank(case: Case, stages: list[Stage], place: Place) -> RankWeights:
    layers = sum(len(stage.layers) for stage in stages)
    # Units, and how often the rank has each: blocks are alike, or of two kinds.
    held = []
    for layer, count in kinds_of_layers(case.model, [layer for stage in stages for layer in stage.layers]):
        one = Stage(0, range(layer, layer + 1), first=False, last=False)
        held += [(unit, count) for unit in units(case, one)]
    for stage in stages:
        held += [(unit, 1) for unit in units(case, Stage(0, range(0), stage.first, stage.last))]
    # A tied embedding is the head alone where the rank does not hold the first stage.
    head_names = ("norm.", "head.") if any(stage.first for stage in stages) else ("norm.", "head.", "embed.")
    block: float = 0
    matrices: float = 0
    root = head = tied = whole = 0
    gathered: dict[str, Any] = {f"{of}_{kind}": 0 for of in GATHERED for kind in ("root", "block")}
    for unit, count in held:
        kind = "root" if unit.block == ROOT else "block"
        share = count / layers if kind == "block" and count < layers else 1  # of a mean block
        whole += count * sum(weight.size for weight in unit.weights)
        cast = (w.size for w in unit.weights if kind == "block" and len(w.shape) > 1 and not w.quantized)
        matrices += share * sum(cast)
        for weight in unit.trained:
            if kind == "block":
                block += share * weight.size
            else:
                root += weight.size
                head += weight.size * weight.name.startswith(head_names)
                tied += weight.size * (weight.name == "embed.weight" and case.model.tie_embeddings)
        if case.sharding.startswith("fsdp"):
            gathered[f"gathered_{kind}"] += share * unit_bytes(case, unit) / gathered_bytes(case, unit.block)
            gathered[f"reduced_{kind}"] += share * unit_size(case, unit, trained=True)
            gathered[f"own_reduced_{kind}"] += share * unit_shard(case, unit, trained=True)
    size = root + round(layers * block)
    state = resident_of_one(case, place, held, whole) if case.is_lmworks else resident_of_others(case, held, whole)
    return RankWeights(
        layers=layers,
        size=size,
        block=block,
        matrices=matrices,
        root=root,
        head=head,
        tied=tied * (head > 0),
        sharding=case.sharding,
        **gathered,
        **bucket_sizes(case, stages, (0, head, head + round((layers - 1) * block), size)),
        **state,
    )


def kinds_of_layers(model: ModelSpec, layers: list[int]) -> list[tuple[int, int]]:
    """One of the layers with experts, and one of those without, each with their number."""
    found = ([layer for layer in layers if model.has_experts(layer) == routed] for routed in (True, False))
    return [(alike[0], len(alike)) for alike in found if alike]


def quantized_rows(unit: Unit, ranks: int = 1, rank: int = 0) -> int:
    """Bytes of a unit's quantized weights on one of the ranks that share them."""
    parts = [part for weight in unit.weights for part in weight.quantized]
    return sum(each * local_rows(count, ranks, rank) for count, each in parts)


def quantized_size(unit: Unit) -> int:
    """Weights of a unit that are kept in 8 or 4 bits."""
    return sum(weight.size for weight in unit.weights if weight.quantized)


def resident_of_one(case: Case, place: Place, held: list[tuple[Unit, int]], whole: int) -> dict[str, Any]:
    """Bytes of a rank of our own trainer."""
    code, kind, grid = case.software, case.sharding, case.grid
    where = {"shard": place.shard, "edp": place.edp}
    own = kept = states = allocated = allocated_gradients = copies = low_bits = shards = trained = 0
    quantized = quantized_padding = 0
    for unit, times in held:
        trained += times * sum(weight.size for weight in unit.trained)
        for weight, shape in updated_shapes(case, unit, where):
            size = math.prod(shape)
            own += times * size
            if case.optimizer == "sgd" and code.weights == 2:
                states += times * steps_bytes([shape])
            else:
                states += times * optimizer_bytes(case.optimizer, [shape])
            copies += times * pinned_size(code.weights * size)
            low_bits += times * pinned_size(code.low_bytes * size)
            shards += times * pinned_size(code.weights * padded_size(weight, grid.size(unit.axis)))
        if kind.startswith("fsdp"):
            allocated += times * unit_shard(case, unit)
            allocated_gradients += times * unit_shard(case, unit, trained=True)
            frozen = [weight for weight in unit.weights if not weight.trained and not weight.quantized]
            kept += times * sum(math.prod(own_rows(case, unit, weight, where)) for weight in frozen)
            held_here = quantized_rows(unit, grid.size(unit.axis), where[unit.axis])
            quantized += times * held_here
            quantized_padding += times * (quantized_shard(case, unit) - held_here)
        else:
            quantized += times * (quantized_rows(unit) - code.weights * quantized_size(unit))
    parameters, gradients, padding, gradient_padding = whole, own if kind == "zero2" else trained, 0, 0
    if kind.startswith("fsdp"):
        parameters, gradients = own + kept, own
        padding, gradient_padding = allocated - parameters, allocated_gradients - own
    return {
        "parameters": code.weights * parameters + quantized,
        "gradients": code.gradients * gradients,
        "master": (code.master + code.low_bytes) * own,
        "optimizer": states,
        "parameter_padding": code.weights * padding + quantized_padding,
        "gradient_padding": code.gradients * gradient_padding,
        "updated": own,
        "pinned_optimizer": states + 2 * copies + low_bits,
        "pinned_full": states + code.low_bytes * own + copies + shards,
    }


def resident_of_others(case: Case, held: list[tuple[Unit, int]], whole: int) -> dict[str, Any]:
    """Bytes of a rank of another code base: flat buffers, cut evenly."""
    code, ranks = case.software, {"shard": case.grid.size("shard"), "edp": int(case.expert_copies)}

    def cut(trained: bool) -> float:
        chosen = [(unit.trained if trained else unit.weights, unit.axis, times) for unit, times in held]
        return sum(times * sum(w.size for w in kept) / ranks[axis] for kept, axis, times in chosen)

    trained = sum(times * sum(w.size for w in unit.trained) for unit, times in held)
    stored = sum(times * (quantized_rows(unit) - code.weights * quantized_size(unit)) for unit, times in held)
    own = cut(trained=True) if case.zero >= 1 else trained
    held_weights = cut(trained=False) if case.zero == 3 else whole
    state: dict[str, Any] = {
        "parameters": code.weights * held_weights + stored * held_weights / whole,
        "gradients": code.gradients * (cut(trained=True) if case.zero >= 2 else trained),
        "master": (code.master + code.low_bytes) * own,
        "optimizer": STATES[case.optimizer] * own,
        "updated": own,
    }
    host = state["optimizer"] + state["master"] + (code.weights + code.gradients) * own
    full = sum(state[name] for name in ("parameters", "gradients", "master", "optimizer"))
    return state | {"parameter_padding": 0, "gradient_padding": 0, "pinned_optimizer": host, "pinned_full": full}


def pinned_size(size: int) -> int:
    """As PyTorch pins it."""
    return 1 << (size - 1).bit_length() if size else 0


def bucket_sizes(case: Case, stages: list[Stage], moments: tuple[int, ...]) -> dict[str, Any]:
    """Elements of ZeRO's buckets when so many gradients are made; see `RankWeights`."""
    nothing = dict.fromkeys(("complete", "flying", "flying_later"), (0,) * len(moments))
    if not case.sharding.startswith("zero") or not case.is_lmworks:
        return nothing | dict.fromkeys(("last_bucket", "last_buckets", "largest_buckets"), 0)
    sizes = buckets(case, [size for stage in stages for size in sizes_in_order(case, stage)])
    found: dict[str, list[int]] = {name: [] for name in nothing}
    for made in moments:
        complete, total = list[int](), 0
        for size in sizes:
            if total + size <= made:
                complete.append(size)
                total += size
        found["complete"].append(total)
        found["flying"].append(sum(complete[-2:]))
        found["flying_later"].append(sum([*sizes, *complete][-2:]))
    several = {name: tuple(values) for name, values in found.items()}
    ends = {"last_bucket": sizes[-1], "last_buckets": sum(sizes[-2:]), "largest_buckets": sum(sorted(sizes)[-2:])}
    return several | ends


def sizes_in_order(case: Case, stage: Stage) -> list[int]:
    """Elements of each weight of a stage in the order of the network, from those of one block."""
    found = trained_weights(case, Stage(0, range(1), stage.first, stage.last))
    sizes, inside = [weight.size for weight in found], [n for n, weight in enumerate(found) if weight.unit != ROOT]
    begin, end = inside[0], inside[-1] + 1
    return [*sizes[:begin], *sizes[begin:end] * len(stage.layers), *sizes[end:]]


# --- a run ----------------------------------------------------------------------------------------------


def run_weights(spec: RunSpec, rank: int) -> RankWeights:
    case = Case.of(spec)
    return rank_weights(case, Place.of(case.grid, rank))


def resident(spec: RunSpec, rank: int) -> Resident:
    """On the device. With offload = 'optimizer' gradients pass through it on their way to the host, and count."""
    if spec.parallel.engine == "deepspeed":
        return deepspeed_resident(spec)
    return on_device(run_weights(spec, rank).resident, spec.parallel.offload)


def frozen_resident(spec: RunSpec, rank: int) -> Resident:
    """Of a model that is only evaluated (`plan.passes.frozen_run`): FSDP2 shards it, all others hold it whole."""
    found = run_weights(spec, rank)
    if Case.of(spec).sharding == "fsdp1":
        return Resident(Case.of(spec).software.weights * found.size)
    return Resident(found.parameters, parameter_padding=found.parameter_padding)


def adapter_resident(spec: RunSpec, rank: int) -> Resident:
    """Of the adapter of a run and its scalar head alone, over weights that another model holds."""
    case = Case.of(spec)
    stages = rank_stages(case, case.grid.coordinates(rank)["pp"])
    units_held = [unit for stage in stages for unit in units(case, stage) if unit.trained]
    held = [(replace(unit, weights=unit.trained), 1) for unit in units_held]
    whole = sum(weight.size for unit, _ in held for weight in unit.weights)
    state = resident_of_one(case, Place.of(case.grid, rank), held, whole)
    return on_device(Resident(**{field.name: state[field.name] for field in fields(Resident)}), spec.parallel.offload)


def on_device(state: Resident, offload: str) -> Resident:
    if offload == "full":
        return Resident(*(0 * getattr(state, field.name) for field in fields(state)))
    return state if offload == "none" else replace(state, optimizer=0 * state.optimizer, master=0 * state.master)


def on_host(spec: RunSpec, rank: int) -> Resident:
    """In host memory: with offload = 'full' all of it, with 'optimizer' copies of what the rank updates, and states."""
    if spec.parallel.offload == "none":
        return Resident()
    found = run_weights(spec, rank)
    if spec.parallel.offload == "full":
        return found.resident
    own = Case.of(spec).software.weights * found.updated
    return Resident(own, own, found.master, found.optimizer)


def deepspeed_resident(spec: RunSpec) -> Resident:
    """DeepSpeed in fp32, the same on every rank; how it pads is written in its own sources.

    It keeps an fp32 copy of what a rank updates beside the weights. Matrices and the rest are two groups of the
    optimizer. Stages 1 and 2 join each group's weights in one buffer, cut at a multiple of 2 elements; stage 3 cuts
    every weight into ⌈size/n⌉ elements. Parts are filled up as tensors: their padding is among the bytes of each kind.
    """
    if spec.precision.dtype != "fp32" or spec.parallel.offload != "none":
        raise SpecError(
            "bytes of parallel.engine = 'deepspeed' are known for precision.dtype = 'fp32' and parallel.offload = "
            f"'none', not for '{spec.precision.dtype}' and '{spec.parallel.offload}'; engine = 'native' has them all"
        )
    found, ranks = weights(spec.model), spec.parallel.dp_shard
    groups = [[w.size for w in found if (len(w.shape) > 1) == matrices] for matrices in (True, False)]
    if spec.parallel.zero == 3:
        own = sum(chunk(size, ranks) for sizes in groups for size in sizes)
        parameters, padding = own, 0
    else:
        own = sum(2 * chunk(sum(sizes), 2 * ranks) for sizes in groups)
        parameters = sum(sum(sizes) for sizes in groups)
        padding = ranks * own - parameters
    moments = FP32 * (2 * own + len(groups)) if spec.optim.optimizer == "adamw" else 0
    return Resident(FP32 * parameters, FP32 * own, FP32 * own, moments, FP32 * padding, 0)
