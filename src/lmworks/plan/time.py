"""The time of one optimizer step: every kernel of the op list at the machine's rate for its kind and size.

Nothing overlaps on one eager rank, save that a GPU runs while the host launches: there a pass costs the larger of the
two, on a CPU their sum. Parts add up to the total. Reading data, logging, evaluation and checkpoints are not in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..spec import RunSpec, SpecError
from .machine import Machine
from .network import Network, network, optimizer
from .ops import Kernel, Op, Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds by part, and what each part's figure rests on: 'measured', 'fitted' or 'modelled'."""

    parts: dict[str, float]
    tags: dict[str, str]
    tokens: int

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total


def step_time(spec: RunSpec, machine: Machine) -> StepTime:
    refuse_unpredicted(spec)
    load = Workload.of(spec, machine.device)
    if not machine.covers(load.dtype):
        raise SpecError(f"precision.dtype = '{load.dtype}': the rate of {machine.name} for it is not known")
    net = network(load)
    accumulation = spec.accumulation
    parts: dict[str, float] = defaultdict(float)
    for op, times, kernels, _ in passes(spec, net):
        parts[op.part] += accumulation * times * sum(float(machine.seconds(kernel, load.dtype)) for kernel in kernels)
    for op in optimizer(spec.model):
        parts[op.part] += sum(float(machine.seconds(kernel, load.dtype)) for kernel in op.forward)
    tags = {part: machine.tag if part == "matmul" or machine.tag == "measured" else "modelled" for part in parts}
    tags["norms"] = tags["residual"] = tags["embedding"] = "modelled"

    parts["launches"] = launch_seconds(spec, net, machine, sum(parts.values()))
    tags["launches"] = "modelled"
    return StepTime(dict(parts), tags, spec.tokens_per_step // spec.parallel.dp)


def refuse_unpredicted(spec: RunSpec) -> None:
    """This sheet is of one rank; `step.price` is for layouts of many."""
    layout = spec.parallel
    for axis in ("dp_shard", "tp", "pp", "cp", "ep"):
        if getattr(layout, axis) > 1:
            raise SpecError(f"parallel.{axis} = {getattr(layout, axis)}: the time of this layout is not predicted here")
    if layout.offload != "none" or layout.engine != "native":
        raise SpecError("parallel.offload and parallel.engine: the time of this layout is not predicted here")


def passes(spec: RunSpec, net: Network) -> Iterable[tuple[Op, int, tuple[Kernel, ...], str]]:
    """(op, how often, its kernels, direction) of one micro-batch."""
    recompute, layers = spec.parallel.recompute, spec.model.layers
    for op in (*net.stem, *net.loss):
        yield op, 1, op.forward, "forward"
        yield op, 1, op.backward, "backward"
    for op in net.block:
        yield op, layers, op.forward, "forward"
        yield op, layers, op.backward, "backward"
        # `full` runs a block forward again; `selective` all but its products and attention.
        if recompute == "full" or (recompute == "selective" and not op.dear):
            yield op, layers, op.forward, "forward"


def launch_seconds(spec: RunSpec, net: Network, machine: Machine, busy: float) -> float:
    """Host time of all launches; on a GPU only what exceeds the time the device is busy anyway."""
    seconds = 0.0
    for _, times, kernels, direction in passes(spec, net):
        each = machine.launch_s if direction == "forward" else machine.launch_backward_s
        seconds += spec.accumulation * times * each * sum(float(kernel.count) for kernel in kernels)
    return max(0.0, seconds - busy) if machine.device == "cuda" else seconds
