"""The time of one optimizer step of our trainer on one device, from a machine that was measured or is passed in.

Nothing overlaps on one rank, save that a GPU runs while the host launches: there the step waits for the host where it
falls behind, on a CPU launches come on top. What a launch of ours costs beside that of a bare op, and a step beside its
launches, are fitted constants. Parts add up to the total. Reading data, logging, evaluation and checkpoints are not in
it. Layouts of many ranks are priced by `step.price`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ...spec import RunSpec, SpecError
from ..activation_offload import may_wait, sent
from ..case import Number
from ..devices.machine import Machine
from ..exact.optimizers import STATES, optimizer_of
from ..network import network, optimizer
from ..ops import Kernel, Workload
from ..policies import RUNGS, policies
from ..software import software_of
from .constants import USUAL_LAUNCH, constants
from .layer import behind, hooks
from .uncalibrated import link
from .work import Pass, Work

# Where nine in ten measured steps lie, over the predicted one. On a CPU six kinds of run took 0.96 to 1.22 of it
# (benchmarks/results/plan_check_cpu.json), on a GPU 0.91 to 1.10 (train_gpu.json); a margin for other machines on top.
WITHIN = {"cpu": (0.85, 1.3), "cuda": (0.88, 1.15)}
BUSY_LOW = 0.65  # of rates that were measured while others used the machine: they may be too low


@dataclass(frozen=True)
class StepTime:
    """Seconds by part, and what each part's figure rests on: 'measured', 'fitted' or 'modelled'."""

    parts: dict[str, float]
    tags: dict[str, str]
    tokens: int  # of a step, on all ranks
    interval: tuple[float, float]  # of the whole: nine in ten lie within
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
    updates = optimizer(spec.model, load.software, STATES[optimizer_of(spec)])
    update = Pass.of([(op.part, kernel) for op in updates for kernel in op.forward], machine, "fp32")
    parts: dict[str, float] = defaultdict(float)
    for done, times, _ in [*passes(spec, work, machine), (update, 1, 0.0)]:
        for (part, _), seconds in done.raw.items():
            parts[part] += times * float(seconds)
    if spec.parallel.offload_activations:
        parts["offload"] = copies(spec, work, machine)
    tags = {part: machine.tag if part == "matmul" or machine.tag == "measured" else "modelled" for part in parts}
    tags["offload"] = tags["norms"] = tags["residual"] = tags["embedding"] = "modelled"

    if machine.device == "cuda":
        parts["launches"] = waits(spec, work, update, machine)
    else:
        parts["launches"] = sum(
            times * launch_s * float(done.launches) for done, times, launch_s in passes(spec, work, machine)
        )
    tags["launches"] = "modelled"
    return StepTime(dict(parts), tags, spec.tokens_per_step, interval(sum(parts.values()), machine))


def interval(seconds: float, machine: Machine) -> tuple[float, float]:
    """From a machine that is left alone to one that stays as busy as it was when it was measured."""
    low, high = WITHIN[machine.device]
    return seconds * (low if machine.quiet else BUSY_LOW), seconds * high * max(1.0, machine.noise)


def copies(spec: RunSpec, work: Work, machine: Machine) -> float:
    """Seconds of a step for activations on their way to the host and back.

    On a GPU what exceeds the passes beside them, where its link is known; a CPU has nothing to copy them beside.
    """
    layers, gpu = spec.model.layers, spec.cluster.accelerator
    net = network(Workload.of(spec, machine.device))
    most = {rung: float(may_wait(net, rung)) for rung in RUNGS}
    each = sum(sent(spec, policies(spec, range(layers)), most)) / layers
    if machine.device == "cuda":
        taken = each / link(gpu) if gpu else 0.0
        ahead, back = (float(sum(way.raw.values())) for way in work.block)
        shown = max(0.0, taken - ahead) + max(0.0, taken - back)
    else:
        shown = 2 * float(sum(Pass.of([("offload", Kernel("stream", bytes=2 * each))], machine, "fp32").raw.values()))
    return shown * layers * spec.accumulation


def waits(spec: RunSpec, work: Work, update: Pass, machine: Machine) -> float:
    """Seconds in which the GPU waits for its host, a little slower or faster than the one that the constants are of."""
    given, software, host = constants(), software_of(spec), machine.launch_s / USUAL_LAUNCH
    each, layers = given.launch(software) * host, spec.model.layers
    kept = hooks(software, spec.parallel.recompute, spec.parallel.recompute_every)
    again = 1 / spec.parallel.recompute_every
    phases: list[list[tuple[Pass, float, Number]]] = [
        [(work.stem[0], 1, 0.0), (work.block[0], layers, kept)],
        [(work.loss[0], 1, 0.0), (work.loss[1], 1, 0.0)],
        [(work.again, layers * again, 0.0), (work.block[1], layers, kept), (work.stem[1], 1, 0.0)],
    ]
    launched = [
        (
            sum(times * float(sum(done.raw.values())) for done, times, _ in phase),
            sum(times * each * float(done.launches + more) for done, times, more in phase),
        )
        for phase in phases
    ]
    beside = each * float(update.launches) + given.beside(software) * host
    return float(behind(launched, spec.accumulation, float(sum(update.raw.values())), beside))


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
