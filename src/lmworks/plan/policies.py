"""Which blocks compute their activations again, and how: one policy for all, every k-th block, or as a budget asks.

A budget is GiB of activations that a rank may keep; where none is given, what all else leaves free on its GPU, with the
planner's own margin for what an allocator wastes. Blocks give them up one after another, where they are cheapest first:
down to their matrix products (`selective`: little is computed twice), to those of attention (`mlp`), to their input
(`full`), until what is kept fits. A rung whose bytes cost more time than those of the next is left out. The bytes are
the planner's, for the share of a sequence that this rank sees; the time is an H100's, so that nobody's machine changes
what a run keeps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from ..spec import RunSpec, SpecError, catalogue
from .activation_offload import may_wait, sent
from .devices.machine import Machine
from .network import network
from .ops import Workload, device_of
from .pipelines import bubble
from .saved_activations import kept
from .step.work import Pass, repeated

RUNGS = ("none", "selective", "mlp", "full")  # by what a block keeps, the most first
YARDSTICK = "H100-SXM-80GB"
STEPS = 64  # in which a budget that is not given is looked for


def policies(spec: RunSpec, layers: Iterable[int]) -> list[str]:
    """none, selective, mlp or full, of each of a stage's layers."""
    layout, chosen = spec.parallel, list(layers)
    if layout.recompute == "full":
        return ["none" if layer % layout.recompute_every else "full" for layer in chosen]
    if layout.recompute == "budget":
        return within_budget(spec, len(chosen))
    return [layout.recompute] * len(chosen)


def within_budget(spec: RunSpec, blocks: int) -> list[str]:
    """The cheapest policies whose kept bytes fit: no block a rung further before all others are there."""
    each, most = kept_bytes(spec), waiting_bytes(spec)
    whole = spec.parallel.recompute_budget * 2**30 or left_free(spec, each, most)
    # A rank's budget is for all its stages, and each is asked about alone.
    budget = whole / in_flight(spec) / spec.parallel.virtual_stages
    chosen = ["none"] * blocks
    alike = {rung: stays(spec, [rung] * blocks, each, most) / blocks for rung in RUNGS}
    # Where activations wait in host memory the last blocks are those that send none.
    order = range(blocks - 1, -1, -1) if spec.parallel.offload_activations else range(blocks)
    for policy in ladder(spec, alike):
        for block in order:
            if stays(spec, chosen, each, most) <= budget:
                return chosen
            chosen[block] = policy
    if stays(spec, chosen, each, most) > budget:
        all_blocks = blocks * spec.parallel.virtual_stages
        least = stays(spec, ["full"] * blocks, each, most) * spec.parallel.virtual_stages * in_flight(spec) / 2**30
        raise SpecError(
            f"parallel.recompute_budget = {spec.parallel.recompute_budget:g} GiB is too little: with every block "
            f"recomputed, {all_blocks} blocks still keep {least:.3g} GiB; lower data.micro_batch or raise the budget"
        )
    return chosen


def stays(spec: RunSpec, chosen: list[str], each: dict[str, float], most: dict[str, float]) -> float:
    """Bytes that blocks keep on the device: what waits in host memory is no part of a budget."""
    return sum(each[policy] for policy in chosen) - sum(sent(spec, chosen, most))


def left_free(spec: RunSpec, each: dict[str, float], most: dict[str, float]) -> float:
    """The most bytes of activations, in steps of a 64th of all, with which a run fits into its GPU."""
    from .memory.reserve import reserved, room  # which ask here what blocks keep
    from .memory.sheet import memory

    gpu, layout = spec.cluster.accelerator, spec.parallel
    if gpu is None:
        raise SpecError(
            "parallel.recompute = 'budget' without parallel.recompute_budget fills the memory of a GPU: name it with "
            "cluster.gpu, or give the GiB of activations a rank may keep"
        )
    all_alike = (stays(spec, [rung] * spec.model.layers, each, most) for rung in (RUNGS[-1], RUNGS[0]))
    low, high = (1.000001 * in_flight(spec) * size / layout.pp for size in all_alike)

    def bytes_of(step: int) -> float:
        return low + (high - low) * step / STEPS

    def planned(step: int) -> float:
        budget = spec.replace(parallel=layout.replace(recompute_budget=bytes_of(step) / 2**30))
        return float(reserved(memory(budget, "cuda").total))

    fitting = bisect_right(range(STEPS + 1), room(gpu), key=planned)
    if not fitting:
        raise SpecError(
            "parallel.recompute = 'budget': with every block recomputed the run still takes "
            f"{planned(0) / 2**30:.3g} GiB of the {room(gpu) / 2**30:.3g} that {gpu.name} surely has; lower "
            "data.micro_batch, or shard the model"
        )
    return bytes_of(fitting - 1)


def kept_bytes(spec: RunSpec) -> dict[str, float]:
    """Bytes that one block keeps of a micro-batch on this rank, by policy."""
    net = network(Workload.of(spec, device_of(spec)))
    return {policy: kept(net, policy)[1] for policy in RUNGS}


def waiting_bytes(spec: RunSpec) -> dict[str, float]:
    """Of those, what could wait in host memory."""
    net = network(Workload.of(spec, device_of(spec)))
    return {policy: float(may_wait(net, policy)) for policy in RUNGS}


def ladder(spec: RunSpec, each: dict[str, float]) -> list[str]:
    """Policies from none on, each with less time for a byte that it frees than any further one: a convex hull."""
    seconds, here, found = seconds_again(spec), "none", []
    while here != RUNGS[-1]:
        costs = {
            rung: (seconds[rung] - seconds[here]) / (each[here] - each[rung])
            for rung in RUNGS[RUNGS.index(here) + 1 :]
            if each[rung] < each[here]  # ranks that share a block's products may keep more of them than they gave up
        }
        here = min(costs, key=lambda rung: costs[rung])
        found.append(here)
    return found


def seconds_again(spec: RunSpec) -> dict[str, float]:
    """What one block computes again of a micro-batch, on the yardstick, by policy."""
    net, machine = network(Workload.of(spec, device_of(spec))), Machine.of(catalogue()[YARDSTICK])
    done = {policy: Pass.of(repeated(net, policy), machine, spec.precision.dtype) for policy in RUNGS}
    return {policy: float(sum(kernels.raw.values())) for policy, kernels in done.items()}


def in_flight(spec: RunSpec) -> float:
    """Micro-batches whose activations the first pipeline rank holds at once, in terms of all its layers."""
    layout = spec.parallel
    if layout.pp == 1:
        return 1
    stages = layout.virtual_stages
    return float(bubble.in_flight(layout.schedule, layout.pp, stages, spec.accumulation, rank=0)) / stages
