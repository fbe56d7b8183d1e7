"""Simulation of one rank of any world on one CPU: its parameters, collectives and peak memory.

`fake_rank` builds and steps it. Layers of a stage are equal, so results are extrapolated from a few of them, unless
they differ or `exact` is set.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..parallel.comm_counter import Row
from ..parallel.memory_ledger import Bytes
from ..parallel.mesh import Mesh
from ..plan.pipelines.stages import Stage, stages_of_rank
from ..spec import RunSpec, SpecError
from .fake_rank import Simulation, fake_world, simulate_step


@dataclass(frozen=True)
class Report:
    simulation: Simulation
    world: int
    rank: int
    place: dict[str, int]  # on every axis
    stages: list[Stage]  # that the rank holds
    micro_batches: int
    how: str  # "exact", or how it was extrapolated
    notes: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        facts = self.simulation
        stages = [{"stage": s.index, "layers": [s.layers.start, s.layers.stop]} for s in self.stages]
        return {
            "world": self.world,
            "rank": self.rank,
            "place": self.place,
            "stages": stages,
            "micro_batches": self.micro_batches,
            "parameters": {"count": facts.parameters, "bytes": facts.parameter_bytes},
            "collectives": [asdict(row) for row in facts.collectives],
            "memory": {
                "resident": facts.resident,
                "peak": facts.peak,
                "peak_bytes": facts.peak_bytes,
                "moment": facts.moment,
            },
            "how": self.how,
            "notes": self.notes,
            "seconds": self.seconds,
        }


def simulate(spec: RunSpec, rank: int, *, layers_per_stage: int = 0, exact: bool = False) -> Report:
    """Simulate rank `rank` of the spec's layout. `layers_per_stage` = 0: the fewest that show the cost of a layer."""
    began = time.perf_counter()
    check_supported(spec, rank)
    with fake_world(spec, rank) as mesh:
        stages = stages_of_rank(spec, mesh.rank("pp"))
        reason = "" if exact else non_uniform_reason(spec, mesh)
        short = layers_per_stage or max(2, spec.parallel.prefetch + 1)
        truncations = [] if exact or reason else truncated_stages(stages, short)
        if truncations and sum(map(layers_in, truncations)) < layers_in(
            stages
        ):  # else simulating all of them costs no more
            found, how = extrapolate(spec, mesh, stages, truncations)
        else:
            found, how = simulate_step(spec, mesh, stages), "exact"
    notes = [*assumptions(spec), *([reason] if reason else [])]
    place = {axis: mesh.rank(axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    seconds = time.perf_counter() - began
    return Report(found, spec.parallel.world, rank, place, stages, spec.accumulation, how, notes, seconds)


def check_supported(spec: RunSpec, rank: int) -> None:
    layout = spec.parallel
    if not 0 <= rank < layout.world:
        raise SpecError(f"--rank {rank} is not one of the layout's {layout.world} ranks: 0 to {layout.world - 1}")
    if layout.engine != "native":
        raise SpecError(f"parallel.engine = {layout.engine!r} cannot be simulated, only 'native' can")
    if layout.offload != "none":
        raise SpecError(
            f"parallel.offload = {layout.offload!r} cannot be simulated: host and device would be one; use 'none'"
        )
    if layout.offload_activations:
        raise SpecError(
            f"parallel.offload_activations = {layout.offload_activations:g} cannot be simulated: host and device would "
            "be one; use 0"
        )
    if layout.compile:
        raise SpecError("parallel.compile = true cannot be simulated: what lives is the compiler's choice; use false")
    if 0 < spec.model.capacity < 1:
        raise SpecError(
            f"model.capacity = {spec.model.capacity:g} drops tokens even when routing is even; use 0 or ≥ 1"
        )


def assumptions(spec: RunSpec) -> list[str]:
    found = []
    if spec.model.experts:
        found.append("tokens are routed evenly: every expert gets the same number, and so does every rank")
    if spec.data.document_mask:
        found.append("documents are not known: no part of attention is skipped, and no message of the ring is saved")
    return found


def non_uniform_reason(spec: RunSpec, mesh: Mesh) -> str:
    """Why results cannot be extrapolated from a few layers; empty if they can."""
    layout = spec.parallel
    if layout.recompute == "budget" or (layout.recompute == "full" and layout.recompute_every > 1):
        return "all layers were simulated: they differ in what they recompute"
    sharded = layout.strategy == "fsdp2" or (layout.strategy == "zero" and layout.zero == 3)
    if mesh.size("dp_cp") > 1 and not sharded and layout.strategy != "fsdp1":
        return "all layers were simulated: buckets of gradients do not end where layers do"
    return ""


# --- from a few layers to all -------------------------------------------------------------------------


def truncated_stages(stages: list[Stage], few: int) -> list[list[Stage]]:
    """The stages truncated to a few layers, then with one layer more: in all stages at once if they have equal length;
    else in one stage at a time, because a layer of an early stage may keep more micro-batches than one of a late stage.
    """
    base = [truncate(stage, few) for stage in stages]
    if len({len(stage.layers) for stage in stages}) == 1:
        return [base, [truncate(stage, few + 1) for stage in stages]]
    grown = [
        [truncate(stage, few + (stage is longer)) for stage in stages] for longer in stages if len(longer.layers) > few
    ]
    return [base, *grown]


def truncate(stage: Stage, layers: int) -> Stage:
    return replace(stage, layers=stage.layers[:layers])


def layers_in(stages: list[Stage]) -> int:
    return sum(len(stage.layers) for stage in stages)


def extrapolate(
    spec: RunSpec, mesh: Mesh, stages: list[Stage], truncations: list[list[Stage]]
) -> tuple[Simulation, str]:
    """Every figure is a + Σ over stages b · layers; the first truncation and what the others add to it give a and b."""
    first, *others = truncations
    result = base = simulate_step(spec, mesh, first)
    for truncation in others:
        missing = {len(s.layers) - len(f.layers) for s, f, t in zip(stages, first, truncation, strict=True) if f != t}
        result = add_layers(result, base, simulate_step(spec, mesh, truncation), missing.pop())
    few = max(len(stage.layers) for stage in first)
    each = ", ".join(str(len(stage.layers)) for stage in stages)
    return result, f"extrapolated: linear in layers, from {few} and {few + 1} a stage to {each}"


def add_layers(result: Simulation, base: Simulation, more: Simulation, times: int) -> Simulation:
    """`result` + `times` × (`more` − `base`)."""

    def bytes_of(first: Bytes, low: Bytes, high: Bytes) -> Bytes:
        return {key: max(0, first[key] + times * (high[key] - low[key])) for key in first}

    return Simulation(
        parameters=result.parameters + times * (more.parameters - base.parameters),
        parameter_bytes=result.parameter_bytes + times * (more.parameter_bytes - base.parameter_bytes),
        collectives=add_layer_collectives(result.collectives, base.collectives, more.collectives, times),
        resident=bytes_of(result.resident, base.resident, more.resident),
        peak=bytes_of(result.peak, base.peak, more.peak),
        moment=more.moment,
    )


def add_layer_collectives(result: list[Row], base: list[Row], more: list[Row], times: int) -> list[Row]:
    def by_key(rows: list[Row]) -> dict[tuple[str, str, int], Row]:
        return {(row.kind, row.group, row.ranks): row for row in rows}

    first, low, high = by_key(result), by_key(base), by_key(more)
    found = []
    for key in first.keys() | high.keys():
        none = Row(*key, 0, 0)
        row, a, b = (rows.get(key, none) for rows in (first, low, high))
        found.append(
            replace(row, count=row.count + times * (b.count - a.count), bytes=row.bytes + times * (b.bytes - a.bytes))
        )
    return sorted(found, key=lambda row: (-row.bytes, row.kind, row.group))
