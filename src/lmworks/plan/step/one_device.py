"""The time of one optimizer step of our trainer on one device, from a machine that was measured or is passed in.

Nothing overlaps on one eager rank, save that a GPU runs while the host launches: there a pass costs the larger of the
two, on a CPU their sum. Parts add up to the total. Reading data, logging, evaluation and checkpoints are not in it.
Layouts of many ranks are priced by `step.price`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ...spec import RunSpec, SpecError
from ..devices.machine import Machine
from ..network import network, optimizer
from ..ops import Workload
from .work import Pass, Work


@dataclass(frozen=True)
class StepTime:
    """Seconds by part, and what each part's figure rests on: 'measured', 'fitted' or 'modelled'."""

    parts: dict[str, float]
    tags: dict[str, str]
    tokens: int  # of a step, on all ranks
    interval: tuple[float, float] | None = None  # of the whole: nine in ten lie within
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total


def step_time(spec: RunSpec, machine: Machine) -> StepTime:
    load = Workload.of(spec, machine.device)
    if not machine.covers(load.dtype):
        raise SpecError(f"precision.dtype = '{load.dtype}': the rate of {machine.name} for it is not known")
    work = Work.of(network(load), machine, load.dtype, spec.parallel.recompute)
    update = Pass.of([(op.part, kernel) for op in optimizer(spec.model) for kernel in op.forward], machine, "fp32")
    parts: dict[str, float] = defaultdict(float)
    host = 0.0
    for done, times, launch_s in [*passes(spec, work, machine), (update, 1, 0.0)]:
        host += times * launch_s * float(done.launches)
        for (part, _), seconds in done.raw.items():
            parts[part] += times * float(seconds)
    tags = {part: machine.tag if part == "matmul" or machine.tag == "measured" else "modelled" for part in parts}
    tags["norms"] = tags["residual"] = tags["embedding"] = "modelled"

    parts["launches"] = max(0.0, host - sum(parts.values())) if machine.device == "cuda" else host
    tags["launches"] = "modelled"
    return StepTime(dict(parts), tags, spec.tokens_per_step)


def passes(spec: RunSpec, work: Work, machine: Machine) -> list[tuple[Pass, float, float]]:
    """(pass, how often in a step, host seconds of each of its launches)."""
    batches, layers = spec.accumulation, spec.model.layers * spec.accumulation
    ahead, back = machine.launch_s, machine.launch_backward_s
    return [
        (work.stem[0], batches, ahead),
        (work.block[0], layers, ahead),
        (work.loss[0], batches, ahead),
        (work.loss[1], batches, back),
        (work.again, layers / spec.parallel.recompute_every, ahead),
        (work.block[1], layers, back),
        (work.stem[1], batches, back),
    ]
