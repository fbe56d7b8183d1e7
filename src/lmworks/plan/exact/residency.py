"""What every rank holds of weights, gradients and optimizer states: to the byte, from the shapes alone.

    resident, of ψ weights over n ranks    parameters   gradients   AdamW's moments
    DDP                                    4ψ           4ψ          8ψ
    ZeRO-1                                 4ψ           4ψ          8ψ/n
    ZeRO-2                                 4ψ           4ψ/n        8ψ/n
    ZeRO-3, FSDP1, FSDP2                   4ψ/n         4ψ/n        8ψ/n

ψ is what a pipeline, tensor and expert parallelism leave to a rank (`weights.stage_weights`), and n the ranks that
share it: dp_shard × cp, for experts those that hold the same ones. How ψ/n is rounded stands in `shards.py`.

That is of fp32 weights, which are their own master: only DeepSpeed holds a second copy of them. With
precision.weights = 'bf16' parameters and gradients have 2 bytes, and a master 2 more for what a rank updates; with
precision.states = 'bf16' moments have 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...spec import Grid, RunSpec, SpecError
from ..pipelines.stages import stages_of_rank
from .optimizers import optimizer_bytes, optimizer_of, steps_bytes
from .shards import FP32, axis_of, chunk, flat_parameter, local_shapes, padded_size, strategy_of, units, weight_bytes
from .weights import stage_weights, weights


@dataclass(frozen=True)
class Resident:
    """Bytes of one rank just before an update, when its gradients are complete."""

    parameters: int = 0
    gradients: int = 0
    master: int = 0  # fp32 copies of weights that are held in another format, or the bits that these lack
    optimizer: int = 0
    parameter_padding: int = 0  # allocated with the parameters, and no part of any
    gradient_padding: int = 0

    @property
    def padding(self) -> int:
        return self.parameter_padding + self.gradient_padding

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.master + self.optimizer + self.padding


def resident(spec: RunSpec, rank: int) -> Resident:
    """On the device. With offload = 'optimizer' gradients pass through it on their way to the host, and count."""
    if spec.parallel.engine == "deepspeed":
        return deepspeed_resident(spec)
    if spec.parallel.offload == "full":
        return Resident()
    found = resident_shapes(spec, rank)
    return found if spec.parallel.offload == "none" else replace(found, optimizer=0, master=0)


def on_host(spec: RunSpec, rank: int) -> Resident:
    """In host memory: with offload = 'full' all of it, with 'optimizer' copies of what the rank updates, and states."""
    if spec.parallel.offload == "none":
        return Resident()
    if spec.parallel.offload == "full":
        return resident_shapes(spec, rank)
    count = element_count(spec, rank)
    own = weight_bytes(spec) * count
    return Resident(own, own, low_bits_bytes(spec) * count, states(spec, rank))


def resident_shapes(spec: RunSpec, rank: int) -> Resident:
    """As if device and host were one."""
    kind, grid = strategy_of(spec), Grid.of(spec.parallel)
    stages = stages_of_rank(spec, grid.coordinates(rank)["pp"])
    found = [weight for stage in stages for weight in stage_weights(spec, stage)]
    each, count = weight_bytes(spec), element_count(spec, rank)
    whole, own, master = each * sum(weight.size for weight in found), each * count, low_bits_bytes(spec) * count
    if kind == "fsdp1":
        allocated = each * sum(flat_parameter(spec, unit).length for stage in stages for unit in units(spec, stage))
    elif kind == "fsdp2":
        allocated = each * sum(padded_size(weight, grid.size(axis_of(weight))) for weight in found)
    else:  # whole parameters; only ZeRO-2 lets go of gradients that another rank owns
        return Resident(whole, own if kind == "zero2" else whole, master, states(spec, rank))
    return Resident(own, own, master, states(spec, rank), allocated - own, allocated - own)


def element_count(spec: RunSpec, rank: int) -> int:
    """That a rank updates."""
    return sum(math.prod(shape) for _, shape in local_shapes(spec, rank))


def low_bits_bytes(spec: RunSpec) -> int:
    """With which a bf16 weight is an fp32 number."""
    return 2 if spec.precision.weights == "bf16" and spec.precision.master else 0


def states(spec: RunSpec, rank: int) -> int:
    shapes = [shape for _, shape in local_shapes(spec, rank)]
    if spec.optim.optimizer == "sgd" and spec.precision.weights == "bf16":
        return steps_bytes(shapes)
    return optimizer_bytes(optimizer_of(spec), shapes)


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
