"""The answer where nothing serves a demand: what binds, and the nearest things that would work."""

from __future__ import annotations

from typing import Any

from ...spec import Gpu, SpecError, catalogue
from ...spec.serving import OBJECTIVES
from .plans import Demand, Plan, Slo, candidates
from .served_model import WEIGHT_FORMATS, ServedModel, compute_format

NARROWER_FORMATS = ("fp8", "int8", "int4", "fp4")


def choose(served: ServedModel, gpu: Gpu, demand: Demand, **options: Any) -> list[Plan]:
    """Plans, cheapest first; refused with advice where none works."""
    found = candidates(served, gpu, demand, **options)
    if found[0].refused:
        raise SpecError(advice(found, served, gpu, demand, options))
    return found


def advice(found: list[Plan], served: ServedModel, gpu: Gpu, demand: Demand, options: dict[str, Any]) -> str:
    fitting = [plan for plan in found if plan.max_batch]
    others = more_ranks(served, gpu, demand, options) + narrower(served, gpu, demand, options)
    others += larger(served, gpu, demand, options)
    if not fitting:
        largest = max(found, key=lambda plan: plan.serving_memory.cache)
        ranks = largest.deployment.ranks
        problem = f"{served.name} does not fit on {ranks} × {gpu.name}: {largest.refused}"
        ways = others
    else:
        fastest = min(fitting, key=lambda plan: excess(plan, demand.slo))
        tp = fastest.deployment.tp
        problem = f"{served.name} on {gpu.name} cannot keep the promise: with tp = {tp}, {fastest.refused}"
        ways = [f"--slo {slo_misses(fastest, demand.slo)}", *others]
    nearest = f"nearest that work: {', or '.join(ways)}" if ways else "nothing in the catalogue does it"
    return f"{problem}; {nearest}"


def excess(plan: Plan, slo: Slo) -> float:
    return max(getattr(plan.idle, f"{name}_quantile") / getattr(slo, name) for name in OBJECTIVES)


def slo_misses(plan: Plan, slo: Slo) -> str:
    """What could be promised instead, a tenth above what an idle replica does."""
    kept = {name: max(getattr(slo, name), 1.1 * getattr(plan.idle, f"{name}_quantile")) for name in OBJECTIVES}
    return ",".join(f"{key}={value:.2g}" for key, value in kept.items() if value != float("inf"))


def more_ranks(served: ServedModel, gpu: Gpu, demand: Demand, options: dict[str, Any]) -> list[str]:
    """The degree that works, where the user fixed one that does not."""
    if not options.get("tp"):
        return []
    best = candidates(served, gpu, demand, **{**options, "tp": 0})[0]
    return [] if best.refused else [f"--tp {best.deployment.tp}"]


def narrower(served: ServedModel, gpu: Gpu, demand: Demand, options: dict[str, Any]) -> list[str]:
    """The widest narrower format that this hardware multiplies or widens, and that works."""
    now = WEIGHT_FORMATS[options.get("weights", "bf16")].bytes
    for weights in NARROWER_FORMATS:
        form = WEIGHT_FORMATS[weights]
        if form.bytes >= now or (weights == "fp4" and compute_format("fp4", gpu) != "fp4"):
            continue
        best = candidates(served, gpu, demand, **{**options, "weights": weights})[0]
        if not best.refused:
            return [f"--weights {weights} (tp = {best.deployment.tp})"]
    return []


def larger(served: ServedModel, gpu: Gpu, demand: Demand, options: dict[str, Any]) -> list[str]:
    """The other accelerators that work, the two cheapest per token."""
    ways: list[tuple[float, str]] = []
    for other in catalogue().values():
        if other.name == gpu.name or not (other.price_hour and other.bandwidth_gbs and other.memory_gb):
            continue
        try:
            best = candidates(served, other, demand, **{**options, "tp": 0, "price_hour": 0.0})[0]
        except SpecError:  # a figure that it would take is not in the catalogue
            continue
        if not best.refused:
            short = (other.alias or other.name).split()[0]
            ways.append((best.dollars_per_million()[2], f"--gpu {short} (tp = {best.deployment.tp})"))
    return [way for _, way in sorted(ways)[:2]]
