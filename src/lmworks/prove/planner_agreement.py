"""The planner against the ranks: bytes that each really held in a step, and collectives that it really called."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from ..plan.exact.calls import Calls
from ..plan.exact.collectives import collectives
from ..plan.exact.residency import on_host, resident
from ..plan.exact.shards import local_shapes
from ..spec import Grid, RunSpec
from ..spec.grid import AXES, JOINED, shorten
from .trial import Trial


class Counted(Calls, Protocol):
    """The same with the group that it went to."""

    @property
    def group(self) -> str: ...
    @property
    def ranks(self) -> int: ...


NAMED = (*AXES, *JOINED, "ep", "edp", "world")  # groups that the grid knows
Table = dict[tuple[str, str], tuple[int, int]]  # (kind, group) → (count, bytes)


def disagreements(spec: RunSpec, ranks: list[Trial]) -> list[str]:
    """Sentences that say where planner and ranks differ; empty: nowhere."""
    found = []
    for rank, trial in enumerate(ranks):
        for where, real, planned in (
            ("device", trial.device, resident(spec, rank)),
            ("host", trial.host, on_host(spec, rank)),
        ):
            if real != planned:
                found.append(f"rank {rank} holds {real} on its {where}, the planner says {planned}")
        updated = [(piece.name, piece.index.numel()) for piece in trial.pieces]
        planned_parts = [(weight.name, math.prod(shape)) for weight, shape in local_shapes(spec, rank)]
        if sorted(updated) != sorted(planned_parts):
            found.append(f"rank {rank} updates other parts of weights than the planner says")
    return found + traffic(spec, [counted(trial.collectives, spec, rank) for rank, trial in enumerate(ranks)])


def traffic(spec: RunSpec, ranks: list[Table]) -> list[str]:
    """Tokens go to the experts that they choose, so what one rank sends to them is not known; what all send is."""
    planned, routed = [planned_calls(spec, rank) for rank in range(len(ranks))], spec.parallel.ep > 1
    found = []
    for rank, (real, plan) in enumerate(zip(ranks, planned, strict=True)):
        for (kind, group), ours, theirs in differing(plan, real):
            if not (routed and kind == "all-to-all" and ours[0] == theirs[0]):
                found.append(f"rank {rank} calls {kind} over {group} {said(theirs)}, the planner says {said(ours)}")
    if routed:
        sent, expected = (sum(all_to_all(table) for table in tables) for tables in (ranks, planned))
        if sent > expected or (sent < expected and not spec.model.capacity):  # which drops tokens
            found.append(f"all ranks put {sent:,} bytes into all-to-alls, the planner says {expected:,}")
    return found


def differing(plan: Table, real: Table) -> list[tuple[tuple[str, str], tuple[int, int], tuple[int, int]]]:
    """(kind and group, planned, real) where the two are not the same."""
    keys = sorted(plan.keys() | real.keys())
    rows = [(key, plan.get(key, (0, 0)), real.get(key, (0, 0))) for key in keys]
    return [row for row in rows if row[1] != row[2]]


def planned_calls(spec: RunSpec, rank: int) -> Table:
    return counted(collectives(spec, rank), spec, rank)


def all_to_all(table: Table) -> int:
    return sum(size for (kind, _), (_, size) in table.items() if kind == "all-to-all")


def said(figures: tuple[int, int]) -> str:
    return f"{figures[0]} times with {figures[1]:,} bytes"


def counted(rows: Iterable[Counted], spec: RunSpec, rank: int) -> Table:
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
    """One name for all axes with the same ranks: whether these share a process group depends on PyTorch's version."""
    if group == "ends":
        line = grid.group("pp", rank)
        members = [line[0], line[-1]]
    elif group in NAMED:
        members = grid.group(group, rank)
    else:  # ranks by their numbers
        return group
    return grid.axis_of(members, rank) or shorten(members)
