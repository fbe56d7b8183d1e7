"""Which blocks compute their activations again, and how: one policy for all, every k-th block, or as a budget asks.

A budget is GiB of activations that a rank may keep. Blocks give them up one after another, first down to their matrix
products (`selective`: little is computed twice), then down to their input (`full`), until what is kept fits. The
bytes are the planner's, for the share of a sequence that this rank sees.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..spec import RunSpec, SpecError
from .kept import kept
from .network import network
from .ops import Workload, device_of
from .pipelines import bubble


def policies(spec: RunSpec, layers: Iterable[int]) -> list[str]:
    """none, selective or full, of each of a stage's layers."""
    layout, chosen = spec.parallel, list(layers)
    if layout.recompute == "full":
        return ["none" if layer % layout.recompute_every else "full" for layer in chosen]
    if layout.recompute == "budget":
        return within_budget(spec, len(chosen))
    return [layout.recompute] * len(chosen)


def within_budget(spec: RunSpec, blocks: int) -> list[str]:
    """The cheapest policies whose kept bytes fit: none before selective before full, the fewest blocks changed."""
    each = kept_bytes(spec)
    # A rank's budget is for all its stages, and each is asked about alone.
    budget = spec.parallel.recompute_budget * 2**30 / in_flight(spec) / spec.parallel.virtual_stages
    chosen = ["none"] * blocks
    for policy in ("selective", "full"):
        for block in range(blocks):
            if sum(each[one] for one in chosen) <= budget:
                return chosen
            chosen[block] = policy
    if sum(each[one] for one in chosen) > budget:
        all_blocks = blocks * spec.parallel.virtual_stages
        least = all_blocks * each["full"] * in_flight(spec) / 2**30
        raise SpecError(
            f"parallel.recompute_budget = {spec.parallel.recompute_budget:g} GiB is too little: with every block "
            f"recomputed, {all_blocks} blocks still keep {least:.3g} GiB; lower data.micro_batch or raise the budget"
        )
    return chosen


def kept_bytes(spec: RunSpec) -> dict[str, float]:
    """Bytes that one block keeps of a micro-batch on this rank, by policy."""
    net = network(Workload.of(spec, device_of(spec)))
    return {policy: kept(net, policy)[1] for policy in ("none", "selective", "full")}


def in_flight(spec: RunSpec) -> float:
    """Micro-batches whose activations the first pipeline rank holds at once, in terms of all its layers."""
    layout = spec.parallel
    if layout.pp == 1:
        return 1
    stages = layout.virtual_stages
    return float(bubble.in_flight(layout.schedule, layout.pp, stages, spec.accumulation, rank=0)) / stages
