"""The time of one optimizer step of our trainer on one device, from a measured machine or one that is passed in.

On one rank the only overlap is that a GPU runs while the host launches: the step waits where the host falls behind.
On a CPU launches are added. Host seconds per launch and per step are fitted constants. Parts add up to the total;
reading data, logging, evaluation and checkpoints are not included. `step.price` prices layouts of many ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ...spec import RunSpec, SpecError
from ..activation_offload import offloadable_bytes, offloaded_bytes
from ..case import Number
from ..devices.machine import Machine
from ..exact.optimizers import STATES, optimizer_of
from ..network import network, optimizer, trained_params
from ..ops import Kernel, Op, Workload
from ..policies import POLICIES, policies
from ..software import software_of
from .constants import REFERENCE_LAUNCH_S, constants
from .micro_batch import CHECKPOINT_LAUNCHES, host_bound_seconds
from .uncalibrated import Pass, Work, host_link

# 90 % interval of measured over predicted step time. On a CPU six kinds of run took 0.96 to 1.22 of it
# (benchmarks/results/plan_check_cpu.json), on a GPU 0.91 to 1.10 (train_gpu.json); a margin for other machines on top.
INTERVAL = {"cpu": (0.85, 1.3), "cuda": (0.88, 1.15)}
BUSY_MACHINE_LOW = 0.65  # lower end for rates measured on a busy machine: they may be too low


@dataclass(frozen=True)
class StepTime:
    """Seconds by part, and the source of each: 'measured', 'fitted' or 'modelled'."""

    parts: dict[str, float]
    tags: dict[str, str]
    tokens: int  # of a step, on all ranks
    interval: tuple[float, float]  # 90 % interval of the total
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
    trained = trained_params(spec.model, load.adapters)
    updates = optimizer(trained, load.software, STATES[optimizer_of(spec)])
    update = Pass.of(updates, "forward", machine, "fp32")
    parts: dict[str, float] = defaultdict(float)
    for done, times, _ in [*passes(spec, work, machine), (update, 1, 0.0)]:
        for (part, _), seconds in done.seconds_by_kind.items():
            parts[part] += times * float(seconds)
    if spec.parallel.offload_activations:
        parts["offload"] = activation_offload_seconds(spec, work, machine)
    tags = {part: machine.tag if part == "matmul" or machine.tag == "measured" else "modelled" for part in parts}
    tags["offload"] = tags["norms"] = tags["residual"] = tags["embedding"] = "modelled"

    if machine.device == "cuda":
        parts["launches"] = host_wait_seconds(spec, work, update, machine)
    else:
        parts["launches"] = sum(
            times * launch_s * float(done.launches) for done, times, launch_s in passes(spec, work, machine)
        )
    tags["launches"] = "modelled"
    return StepTime(dict(parts), tags, spec.tokens_per_step, interval(sum(parts.values()), machine))


def interval(seconds: float, machine: Machine) -> tuple[float, float]:
    """From an idle machine to one as busy as it was when it was measured."""
    low, high = INTERVAL[machine.device]
    return seconds * (low if machine.quiet else BUSY_MACHINE_LOW), seconds * high * max(1.0, machine.noise)


def activation_offload_seconds(spec: RunSpec, work: Work, machine: Machine) -> float:
    """Seconds of a step for activation offload.

    On a GPU the copies beyond the pass they overlap with, where its host link is known; on a CPU all of them.
    """
    layers, gpu = spec.model.layers, spec.cluster.accelerator
    net = network(Workload.of(spec, machine.device))
    most = {policy: float(offloadable_bytes(net, policy)) for policy in POLICIES}
    each = sum(offloaded_bytes(spec, policies(spec, range(layers)), most)) / layers
    if machine.device == "cuda":
        copy = each / host_link(gpu) if gpu else 0.0
        forward, backward = (float(sum(way.seconds_by_kind.values())) for way in work.block)
        exposed = max(0.0, copy - forward) + max(0.0, copy - backward)
    else:
        both_ways = Op("offload", "offload", (Kernel("stream", bytes=2 * each),))
        copied = Pass.of([both_ways], "forward", machine, "fp32")
        exposed = 2 * float(sum(copied.seconds_by_kind.values()))
    return exposed * layers * spec.accumulation


def host_wait_seconds(spec: RunSpec, work: Work, update: Pass, machine: Machine) -> float:
    """Seconds in which the GPU waits for its host; constants scale with the host's measured launch time."""
    fitted, software, host = constants(), software_of(spec), machine.launch_s / REFERENCE_LAUNCH_S
    launch_s, step_s = fitted.host_seconds(software)
    each, layers, again = launch_s * host, spec.model.layers, 1 / spec.parallel.recompute_every
    kept = CHECKPOINT_LAUNCHES.get((software.name, spec.parallel.recompute), 0.0) / spec.parallel.recompute_every
    phases: list[list[tuple[Pass, float, Number]]] = [
        [(work.stem[0], 1, 0.0), (work.block[0], layers, kept)],
        [(work.loss[0], 1, 0.0), (work.loss[1], 1, 0.0)],
        [(work.recomputed, layers * again, 0.0), (work.block[1], layers, kept), (work.stem[1], 1, 0.0)],
    ]
    launched = [
        (
            sum(times * float(sum(done.seconds_by_kind.values())) for done, times, _ in phase),
            sum(times * each * float(done.launches + more) for done, times, more in phase),
        )
        for phase in phases
    ]
    beside = each * float(update.launches) + step_s * host
    return float(host_bound_seconds(launched, spec.accumulation, float(sum(update.seconds_by_kind.values())), beside))


def passes(spec: RunSpec, work: Work, machine: Machine) -> list[tuple[Pass, float, float]]:
    """(pass, how often in a step, host seconds of each of its launches)."""
    batches, layers = spec.accumulation, spec.model.layers * spec.accumulation
    ahead, back = machine.launch_s, machine.launch_backward_s
    return [
        (work.stem[0], batches, ahead),
        (work.block[0], layers, ahead),
        (work.loss[0], batches, ahead),
        (work.loss[1], batches, back),
        (work.recomputed, layers / spec.parallel.recompute_every, ahead),
        (work.block[1], layers, back),
        (work.stem[1], batches, back),
    ]
