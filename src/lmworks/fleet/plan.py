"""The cheapest deployment of a fleet: the serving search for every model, with tenants together or apart.

Tenants of a model share a pool of servers, which then keeps the strictest of their SLOs for all of them, or each
has a pool of its own. Both are priced. A pool tries every accelerator, weight format and tensor-parallel degree that
the file allows, and MIG slices where it asks for them.

A MIG slice is the accelerator with its share of compute, memory and bandwidth and no links, by NVIDIA's table of
profiles. Nothing of it was measured: interference and the loss at the edges of slices are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan.serving.batching import Lengths
from ..plan.serving.plans import Demand, Plan, Slo, candidates
from ..plan.serving.served_model import ServedModel
from ..plan.serving.sheet import figures
from ..spec import Gpu, SpecError, catalogue, load_run
from ..spec.hardware import find_gpu_name
from ..spec.serving import OBJECTIVES
from .config import Fleet, FleetModel, Tenant

HOURS_A_MONTH = 730.0
# Slices of an A100, H100 or H200: sevenths of compute, eighths of memory, how many of them a GPU holds.
MIG_PROFILES = ((1, 1, 7), (2, 2, 3), (3, 4, 2))
MIG_GPUS = ("A100", "H100", "H200")


@dataclass(frozen=True)
class Pool:
    """Servers of one model for some tenants."""

    model: FleetModel
    tenants: tuple[Tenant, ...]
    plan: Plan
    slices: int = 1  # servers on one GPU: MIG slices

    @property
    def gpus(self) -> int:
        return math.ceil(self.plan.gpus / self.slices)

    @property
    def dollars_hour(self) -> float:
        """Whole GPUs are paid for."""
        return self.gpus * self.plan.price_hour * self.slices

    @property
    def name(self) -> str:
        return self.model.name if len(self.tenants) != 1 else f"{self.model.name}-{self.tenants[0].name}"


@dataclass(frozen=True)
class FleetPlan:
    fleet: Fleet
    pools: tuple[Pool, ...]
    other_dollars_hour: dict[str, float]  # model → tenants apart where they are together, and the other way round

    @property
    def dollars_hour(self) -> float:
        return sum(pool.dollars_hour for pool in self.pools)


def plan_fleet(fleet: Fleet) -> FleetPlan:
    chosen: list[Pool] = []
    others: dict[str, float] = {}
    for model in fleet.models:
        tenants = fleet.tenants_of(model)
        if not tenants:
            raise SpecError(f"{fleet.name}: nobody asks for model {model.name!r}: add a [[tenants]] with its rate")
        together = [cheapest(fleet, model, tenants)]
        apart = [cheapest(fleet, model, [tenant]) for tenant in tenants] if len(tenants) > 1 else together
        ways = sorted((together, apart), key=lambda pools: sum(pool.dollars_hour for pool in pools))
        chosen += ways[0]
        if len(tenants) > 1:
            others[model.name] = sum(pool.dollars_hour for pool in ways[1])
    return FleetPlan(fleet, tuple(chosen), others)


def demand(model: FleetModel, tenants: Sequence[Tenant], quantile: float) -> Demand:
    """All requests, their mean lengths, and the strictest of their SLOs."""
    rate = sum(tenant.rate for tenant in tenants)
    mean = [sum(t.rate * getattr(t, key) for t in tenants) / rate for key in ("input", "output")]
    slos = [Slo.parse(tenant.slo, quantile) for tenant in tenants]
    strict = {key: min(getattr(one, key) for one in slos) for key in OBJECTIVES}
    return Demand(
        Lengths(*(max(1, round(one)) for one in mean)), Slo(quantile=quantile, **strict), rate, model.max_batch
    )


def cheapest(fleet: Fleet, model: FleetModel, tenants: Sequence[Tenant]) -> Pool:
    asked = demand(model, tenants, fleet.quantile)
    found = sorted(
        pools(fleet, model, tenants, asked), key=lambda pool: (bool(pool.plan.refused), pool.dollars_hour, pool.gpus)
    )
    if not found or found[0].plan.refused:
        why = "; ".join(dict.fromkeys(f"{one.plan.deployment.gpu.name}: {one.plan.refused}" for one in found[:3]))
        who = ", ".join(tenant.name for tenant in tenants)
        raise SpecError(
            f"{fleet.name}: no deployment of {model.name!r} serves {who} ({why}); allow other gpus or weights"
        )
    return found[0]


def pools(fleet: Fleet, model: FleetModel, tenants: Sequence[Tenant], asked: Demand) -> Iterator[Pool]:
    run = load_run(model.source, ())
    served = ServedModel.of(run.model, run.name)
    known = catalogue(run.cluster.catalogue)
    for name in model.gpus or fleet.gpus:
        gpu = known[find_gpu_name(name, run.cluster.catalogue)]
        for one, slices in [(gpu, 1), *(mig_slices(gpu) if model.mig else [])]:
            options: dict[str, Any] = {"engine": model.engine, "kv": model.kv, "tp": model.tp if slices == 1 else 1}
            for weights in model.weights:
                for plan in candidates(served, one, asked, weights=weights, **options):
                    yield Pool(model, tuple(tenants), plan, slices)


def mig_slices(gpu: Gpu) -> Iterator[tuple[Gpu, int]]:
    """Slices as accelerators of their own, and how many of them a GPU holds."""
    if not gpu.name.startswith(MIG_GPUS):
        return
    for compute, memory, count in MIG_PROFILES:
        share, part = compute / 7, memory / 8
        peaks = {key: getattr(gpu, key) * share for key in vars(gpu) if key.endswith("_tflops")}
        yield gpu.replace(
            name=f"{gpu.name} MIG {compute}g.{gpu.memory_gb * part:.0f}gb",
            memory_gb=gpu.memory_gb * part, bandwidth_gbs=gpu.bandwidth_gbs * part, link_gbs=0.0, per_node=1, domain=0,
            price_hour=gpu.price_hour / count, **peaks,
        ), count  # fmt: skip


def sheet(found: FleetPlan) -> dict[str, Any]:
    return {
        "fleet": found.fleet.name,
        "dollars_hour": found.dollars_hour,
        "dollars_month": HOURS_A_MONTH * found.dollars_hour,
        "other_dollars_hour": found.other_dollars_hour,
        "pools": [
            {
                "name": pool.name,
                "model": pool.model.name,
                "tenants": [tenant.name for tenant in pool.tenants],
                "gpu": pool.plan.deployment.gpu.name,
                "weights": pool.plan.deployment.weights,
                "slices_per_gpu": pool.slices,
                "planned_only": pool.slices > 1,  # MIG: nothing of it was measured
                "gpus": pool.gpus,
                "dollars_hour": pool.dollars_hour,
                **{key: value for key, value in figures(pool.plan).items() if key not in ("gpus", "dollars_hour")},
            }
            for pool in found.pools
        ],
    }
