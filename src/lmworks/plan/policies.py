"""The recompute policy of each block: one for all, every k-th block, or chosen to fit an activation budget.

A budget is GiB of activations per rank; by default what is left free on the GPU, less the planner's margin for the
allocator. Blocks move one by one to the policy that costs least time per byte: from their GEMMs saved (`selective`) to
those of attention (`mlp`) to their input (`full`), until the saved bytes fit. A policy that costs more time per byte
than the next is skipped. Times are of an H100 on every machine, so that a run saves the same everywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from ..spec import RunSpec, SpecError, catalogue
from .activation_offload import offloadable_bytes, offloaded_bytes
from .case import Case
from .devices.machine import Machine
from .exact.shards import rank_stages
from .network import network
from .ops import Workload, device_of
from .pipelines import bubble
from .saved_activations import saved_bytes
from .step.uncalibrated import Pass, recomputed_ops

POLICIES = ("none", "selective", "mlp", "full")  # by saved bytes, the most first
REFERENCE_GPU = "H100-SXM-80GB"
BUDGET_STEPS = 64  # resolution of the search for a default budget


def policies(spec: RunSpec, layers: Iterable[int]) -> list[str]:
    """none, selective, mlp or full, for each layer of a stage."""
    layout, chosen = spec.parallel, list(layers)
    if layout.recompute == "full":
        return ["none" if layer % layout.recompute_every else "full" for layer in chosen]
    if layout.recompute == "budget":
        return within_budget(spec, len(chosen))
    return [layout.recompute] * len(chosen)


def run_case(spec: RunSpec, device: str) -> Case:
    """A run on this device, with the policy of every block where a budget chooses it."""
    case = Case.of(spec).replace(device=device)
    if case.recompute != "budget":
        return case
    sizes = {len(stage.layers): stage.layers for rank in range(spec.parallel.pp) for stage in rank_stages(case, rank)}
    return case.replace(policies=tuple((size, tuple(policies(spec, layers))) for size, layers in sizes.items()))


def within_budget(spec: RunSpec, blocks: int) -> list[str]:
    """The cheapest policies whose saved bytes fit; blocks differ by one policy at most."""
    each, most = saved_bytes_by_policy(spec), offloadable_bytes_by_policy(spec)
    whole = spec.parallel.recompute_budget * 2**30 or budget_that_fits(spec, each, most)
    # A rank's budget is shared by its virtual stages.
    budget = whole / in_flight_micro_batches(spec) / spec.parallel.virtual_stages
    chosen = ["none"] * blocks
    per_block = {policy: resident_bytes(spec, [policy] * blocks, each, most) / blocks for policy in POLICIES}
    # With activation offload, begin at the last blocks, which offload nothing.
    order = range(blocks - 1, -1, -1) if spec.parallel.offload_activations else range(blocks)
    for policy in policies_by_cost(spec, per_block):
        for block in order:
            if resident_bytes(spec, chosen, each, most) <= budget:
                return chosen
            chosen[block] = policy
    if resident_bytes(spec, chosen, each, most) > budget:
        all_blocks = blocks * spec.parallel.virtual_stages
        least = (
            resident_bytes(spec, ["full"] * blocks, each, most)
            * spec.parallel.virtual_stages
            * in_flight_micro_batches(spec)
            / 2**30
        )
        raise SpecError(
            f"parallel.recompute_budget = {spec.parallel.recompute_budget:g} GiB is too little: with every block "
            f"recomputed, {all_blocks} blocks still keep {least:.3g} GiB; lower data.micro_batch or raise the budget"
        )
    return chosen


def resident_bytes(spec: RunSpec, chosen: list[str], each: dict[str, float], most: dict[str, float]) -> float:
    """Saved bytes on the device, without those offloaded to host memory."""
    return sum(each[policy] for policy in chosen) - sum(offloaded_bytes(spec, chosen, most))


def budget_that_fits(spec: RunSpec, each: dict[str, float], most: dict[str, float]) -> float:
    """The largest activation budget, in 64ths of all, with which a run fits its GPU."""
    from .memory.reserve import reserved, safe_bytes  # imported here: they import this module
    from .memory.sheet import memory

    gpu, layout = spec.cluster.accelerator, spec.parallel
    if gpu is None:
        raise SpecError(
            "parallel.recompute = 'budget' without parallel.recompute_budget fills the memory of a GPU: name it with "
            "cluster.gpu, or give the GiB of activations a rank may keep"
        )
    all_alike = (
        resident_bytes(spec, [policy] * spec.model.layers, each, most) for policy in (POLICIES[-1], POLICIES[0])
    )
    low, high = (1.000001 * in_flight_micro_batches(spec) * size / layout.pp for size in all_alike)

    def bytes_of(step: int) -> float:
        return low + (high - low) * step / BUDGET_STEPS

    def planned(step: int) -> float:
        budget = spec.replace(parallel=layout.replace(recompute_budget=bytes_of(step) / 2**30))
        return float(reserved(memory(budget, "cuda").total))

    fitting = bisect_right(range(BUDGET_STEPS + 1), safe_bytes(gpu), key=planned)
    if not fitting:
        raise SpecError(
            "parallel.recompute = 'budget': with every block recomputed the run still takes "
            f"{planned(0) / 2**30:.3g} GiB of the {safe_bytes(gpu) / 2**30:.3g} that {gpu.name} surely has; lower "
            "data.micro_batch, or shard the model"
        )
    return bytes_of(fitting - 1)


def saved_bytes_by_policy(spec: RunSpec) -> dict[str, float]:
    """Saved bytes of one block per micro-batch, by policy."""
    net = network(Workload.of(spec, device_of(spec)))
    return {policy: saved_bytes(net, policy)[1] for policy in POLICIES}


def offloadable_bytes_by_policy(spec: RunSpec) -> dict[str, float]:
    """Of those, bytes that can be offloaded."""
    net = network(Workload.of(spec, device_of(spec)))
    return {policy: float(offloadable_bytes(net, policy)) for policy in POLICIES}


def policies_by_cost(spec: RunSpec, each: dict[str, float]) -> list[str]:
    """Policies on the convex hull of recompute time over freed bytes, cheapest first."""
    seconds, current, found = recompute_seconds(spec), "none", []
    while current != POLICIES[-1]:
        costs = {
            policy: (seconds[policy] - seconds[current]) / (each[current] - each[policy])
            for policy in POLICIES[POLICIES.index(current) + 1 :]
            if each[policy] < each[current]  # under tensor parallelism `selective` may save more than `none`
        }
        current = min(costs, key=lambda policy: costs[policy])
        found.append(current)
    return found


def recompute_seconds(spec: RunSpec) -> dict[str, float]:
    """Recompute time of one block per micro-batch on the reference GPU, by policy."""
    net, machine = network(Workload.of(spec, device_of(spec))), Machine.of(catalogue()[REFERENCE_GPU])
    dtype, again = spec.precision.dtype, {policy: recomputed_ops(net, policy) for policy in POLICIES}
    done = {policy: Pass.of(ops, "forward", machine, dtype) for policy, ops in again.items()}
    return {policy: float(sum(kernels.seconds_by_kind.values())) for policy, kernels in done.items()}


def in_flight_micro_batches(spec: RunSpec) -> float:
    """Micro-batches in flight on the first pipeline rank, counted over all its layers."""
    layout = spec.parallel
    if layout.pp == 1:
        return 1
    stages = layout.virtual_stages
    return float(bubble.in_flight(layout.schedule, layout.pp, stages, spec.accumulation, rank=0)) / stages
