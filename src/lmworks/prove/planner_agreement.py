"""Planned against measured: the bytes that each rank held in a step, and the collectives that it called."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from ..plan.exact.collectives import collectives
from ..plan.exact.exchanges import Calls
from ..plan.exact.shards import local_shapes
from ..plan.memory.rank_weights import Resident, adapter_resident, frozen_resident, on_host, resident
from ..plan.passes import held_models
from ..spec import Grid, RunSpec
from ..spec.grid import AXES, JOINED, shorten
from .rank_record import RankRecord


class CountedCalls(Calls, Protocol):
    """Calls with their process group."""

    @property
    def group(self) -> str: ...
    @property
    def ranks(self) -> int: ...


NAMED_GROUPS = (*AXES, *JOINED, "ep", "edp", "world")  # groups of the grid
Table = dict[tuple[str, str], tuple[int, int]]  # (kind, group) → (count, bytes)


def disagreements(spec: RunSpec, ranks: list[RankRecord]) -> list[str]:
    """Differences between planner and ranks as sentences; empty if there are none.

    Of methods that sample their answers only the bytes are compared: how many micro-batches they fill, and so what is
    sent, follows from their lengths.
    """
    found = []
    models = held_models(spec).values()
    own = {model.name: model.run for model in models if not model.trained and not model.weights_of}
    adapters = [model.run for model in models if model.weights_of and model.run.adapters]
    for rank, record in enumerate(ranks):
        for where, real, planned in (
            ("device", record.device, with_adapters(resident(spec, rank), adapters, rank)),
            ("host", record.host, on_host(spec, rank)),
        ):
            if real != planned:
                found.append(f"rank {rank} holds {real} on its {where}, the planner says {planned}")
        frozen = {name: frozen_resident(run, rank) for name, run in own.items()}
        if record.frozen != frozen:
            found.append(f"rank {rank} holds frozen models {record.frozen}, the planner says {frozen}")
        updated = [(shard.name, shard.index.numel()) for shard in record.shards]
        planned_parts = [(weight.name, math.prod(shape)) for weight, shape in local_shapes(spec, rank)]
        if sorted(updated) != sorted(planned_parts):
            found.append(f"rank {rank} updates other parts of weights than the planner says")
    if spec.align.online:
        return found
    return found + traffic_differences(
        spec,
        [call_table(record.collectives, spec, rank) for rank, record in enumerate(ranks)],
        [record.lengths for record in ranks],
    )


def with_adapters(state: Resident, adapters: list[RunSpec], rank: int) -> Resident:
    """A model whose network has further adapters: a critic's, a reward model's."""
    beside = [adapter_resident(run, rank) for run in adapters]
    return replace(
        state,
        parameters=state.parameters + sum(one.parameters for one in beside),
        parameter_padding=state.parameter_padding + sum(one.parameter_padding for one in beside),
    )


def traffic_differences(spec: RunSpec, ranks: list[Table], lengths: Sequence[Sequence[int]] = ()) -> list[str]:
    """Routing depends on the data, so all-to-all bytes are compared as a sum over ranks, not by rank.

    `lengths`: of the rows of each rank's micro-batches, where answers are padded to the longest.
    """
    rows = lengths or [()] * len(ranks)
    planned, routed = [planned_calls(spec, rank, rows[rank]) for rank in range(len(ranks))], spec.parallel.ep > 1
    found = []
    for rank, (real, plan) in enumerate(zip(ranks, planned, strict=True)):
        for (kind, group), ours, theirs in different_calls(plan, real):
            if not (routed and kind == "all-to-all" and ours[0] == theirs[0]):
                found.append(
                    f"rank {rank} calls {kind} over {group} {calls_text(theirs)}, the planner says {calls_text(ours)}"
                )
    if routed:
        sent, expected = (sum(all_to_all(table) for table in tables) for tables in (ranks, planned))
        if sent > expected or (sent < expected and not spec.model.capacity):  # which drops tokens
            found.append(f"all ranks put {sent:,} bytes into all-to-alls, the planner says {expected:,}")
    return found


def different_calls(plan: Table, real: Table) -> list[tuple[tuple[str, str], tuple[int, int], tuple[int, int]]]:
    """(kind and group, planned, measured) where the two differ."""
    keys = sorted(plan.keys() | real.keys())
    rows = [(key, plan.get(key, (0, 0)), real.get(key, (0, 0))) for key in keys]
    return [row for row in rows if row[1] != row[2]]


def planned_calls(spec: RunSpec, rank: int, lengths: Sequence[int] = ()) -> Table:
    return call_table(collectives(spec, rank, lengths), spec, rank)


def all_to_all(table: Table) -> int:
    return sum(size for (kind, _), (_, size) in table.items() if kind == "all-to-all")


def calls_text(counts: tuple[int, int]) -> str:
    return f"{counts[0]} times with {counts[1]:,} bytes"


def call_table(rows: Iterable[CountedCalls], spec: RunSpec, rank: int) -> Table:
    """By kind and group, without groups of one rank."""
    grid = Grid.of(spec.parallel)
    table: Table = {}
    for row in rows:
        if row.ranks > 1:
            key = row.kind, simplest_name(grid, row.group, rank)
            count, size = table.get(key, (0, 0))
            table[key] = count + row.count, size + row.bytes
    return table


def simplest_name(grid: Grid, group: str, rank: int) -> str:
    """One name for axes with the same ranks: whether they share a process group depends on the version of PyTorch."""
    if group == "ends":
        line = grid.group("pp", rank)
        members = [line[0], line[-1]]
    elif group in NAMED_GROUPS:
        members = grid.group(group, rank)
    else:  # ranks by their numbers
        return group
    return grid.axis_of(members, rank) or shorten(members)
