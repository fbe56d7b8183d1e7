"""What a run keeps in host memory: states that are offloaded, activations that wait, and the copies that saves write.

    states        parallel.offload               weights, gradients and moments that live there (`exact/residency.py`)
    activations   parallel.offload_activations   a slab for each block that sends some (`activation_offload.py`)
    staging       checkpoint.asynchronous        what a rank writes of a checkpoint, copied: its writer process maps the
                                                 same memory, and takes none of its own for it

What is pinned for a GPU comes in powers of two: PyTorch's allocator rounds up to them. Of a tensor that several ranks
hold alike one writes all, whichever has least to write so far: here each has its even part, which is what all of them
together write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ...spec import Grid, RunSpec
from ..activation_offload import pinned_bytes
from ..exact.optimizers import STATES, optimizer_of
from ..exact.residency import low_bits_bytes, on_host
from ..exact.shards import FP32, axis_of, local_shapes, padded_size, strategy_of, weight_bytes
from ..exact.weights import stage_weights, weights
from ..pipelines.stages import stages_of_rank
from .peak_memory import stage_activations

GENERATORS = 15_088  # bytes of the states of Python's, NumPy's and torch's: train/rng.py's, as a test holds


@dataclass(frozen=True)
class HostNeed:
    """Bytes of one rank, or of all ranks of a machine."""

    states: int = 0
    activations: int = 0
    staging: int = 0

    @property
    def total(self) -> int:
        return self.states + self.activations + self.staging

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def host_need(spec: RunSpec, rank: int, device: str) -> HostNeed:
    return HostNeed(host_states(spec, rank, device), offloaded_activations(spec, rank, device), staging(spec, rank))


def machine_need(spec: RunSpec, ranks: Iterable[int], device: str) -> HostNeed:
    """Of ranks that share a machine."""
    found = [host_need(spec, rank, device) for rank in ranks]
    return HostNeed(*(sum(part) for part in zip(*(one.to_dict().values() for one in found), strict=True)))


def host_states(spec: RunSpec, rank: int, device: str) -> int:
    """What DeepSpeed keeps there is its own, and not known."""
    if spec.parallel.engine != "native" or spec.parallel.offload == "none":
        return 0
    there = on_host(spec, rank)
    if device == "cpu":
        return there.total
    each, low, own = (
        weight_bytes(spec),
        low_bits_bytes(spec),
        [math.prod(shape) for _, shape in local_shapes(spec, rank)],
    )
    if spec.parallel.offload == "optimizer":
        return there.optimizer + sum(2 * pinned_size(each * size) + pinned_size(low * size) for size in own)
    grid = Grid.of(spec.parallel)
    stages = stages_of_rank(spec, grid.coordinates(rank)["pp"])
    whole = [
        padded_size(weight, grid.size(axis_of(weight))) for stage in stages for weight in stage_weights(spec, stage)
    ]
    return there.optimizer + there.master + sum(pinned_size(each * size) for size in (*whole, *own))


def pinned_size(size: int) -> int:
    """As PyTorch pins it."""
    return 1 << (size - 1).bit_length() if size else 0


def offloaded_activations(spec: RunSpec, rank: int, device: str) -> int:
    if not spec.parallel.offload_activations:
        return 0
    gathered = strategy_of(spec).startswith("fsdp")
    return pinned_bytes(size for piece in stage_activations(spec, rank, device, gathered) for size in piece.offloaded)


def staging(spec: RunSpec, rank: int) -> int:
    """Weights, master, moments, counts of steps, biases of experts and generators; DeepSpeed's are not known."""
    if spec.parallel.engine != "native" or not spec.checkpoint.asynchronous:
        return 0
    grid, kind, model = Grid.of(spec.parallel), strategy_of(spec), spec.model
    stages = stages_of_rank(spec, grid.coordinates(rank)["pp"])
    alike = grid.world // grid.size("pp")  # ranks of one stage
    uncut = {weight.name: weight.size for stage in stages for weight in weights(model, stage)}
    each = weight_bytes(spec) + low_bits_bytes(spec) + int(STATES[optimizer_of(spec)])
    steps = FP32 * (spec.optim.optimizer == "adamw" or spec.precision.weights == "bf16")
    size = FP32 * model.experts * bool(model.balance_bias) * sum(len(stage.layers) for stage in stages)
    for weight, shape in local_shapes(spec, rank):
        parts = uncut[weight.name] // weight.size  # of tensor and expert parallelism
        own = math.prod(shape)
        if kind == "fsdp1":  # which joins its runs before they are saved
            own = weight.size
        elif kind in ("zero1", "zero2", "fsdp2"):
            parts *= grid.size(axis_of(weight))
        size += each * own * parts + steps
    return math.ceil(size / alike + GENERATORS / grid.world)
