"""The grid of ranks: where each stands, and who talks to whom.

One number names a rank; five coordinates say where it stands. Tensor-parallel neighbours talk most and get adjacent
numbers, pipeline neighbours talk least and stand furthest apart:

    rank = (((pp · DP_REPLICATE + dp_replicate) · DP_SHARD + dp_shard) · CP + cp) · TP + tp

Expert parallelism adds no ranks. It regroups those that share a model's data-parallel work (`experts_over`): runs of
`ep` neighbours hold one set of experts between them, and the `edp` ranks at the same place in each run hold copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from .run import ParallelSpec

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first
# Axes that act as one: the ranks that see other sequences, other tokens, or hold other shards of one model.
JOINED = {"dp": ("dp_replicate", "dp_shard"), "dp_cp": ("dp_replicate", "dp_shard", "cp"), "shard": ("dp_shard", "cp")}
MEANING = {
    "pp": "activations to the next stage, their gradients back",
    "dp_replicate": "gradients of equal copies",
    "dp_shard": "parameter shards and gradients",
    "cp": "keys and values of one sequence",
    "tp": "parts of one matrix product",
    "ep": "tokens to the experts they chose",
    "edp": "gradients of equal experts",
}


@dataclass(frozen=True)
class Grid:
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    experts_over: str = "shard"  # the joined axis that is folded into edp × ep; dp_cp where nothing is sharded

    @classmethod
    def of(cls, parallel: ParallelSpec) -> Self:
        over = "dp_cp" if parallel.dp_shard == 1 else "shard"
        sizes = {axis: getattr(parallel, axis) for axis in (*AXES, "ep")}
        return cls(**sizes, experts_over=over)

    @property
    def world(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    def size(self, axis: str) -> int:
        if axis == "world":
            return self.world
        if axis == "edp":
            return self.size(self.experts_over) // self.ep
        if axis in JOINED:
            return math.prod(getattr(self, part) for part in JOINED[axis])
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place on every axis, joined and folded ones included."""
        place: dict[str, int] = {}
        rest = rank
        for axis in reversed(AXES):
            rest, place[axis] = divmod(rest, getattr(self, axis))
        for name, parts in JOINED.items():
            place[name] = 0
            for part in parts:
                place[name] = place[name] * getattr(self, part) + place[part]
        place["edp"], place["ep"] = divmod(place[self.experts_over], self.ep)
        place["world"] = rank
        return place

    def group(self, axis: str, rank: int) -> list[int]:
        """Ranks that differ from `rank` on `axis` alone, itself included, in the order of that axis."""
        if axis == "world":
            return list(range(self.world))
        if axis in ("ep", "edp"):
            whole = self.group(self.experts_over, rank)
            edp, ep = divmod(self.coordinates(rank)[self.experts_over], self.ep)
            return whole[edp * self.ep : (edp + 1) * self.ep] if axis == "ep" else whole[ep :: self.ep]
        parts = JOINED.get(axis, (axis,))
        place = self.coordinates(rank)
        return [self.rank(**{**{a: place[a] for a in AXES}, **combination}) for combination in self.walk(parts)]

    def walk(self, axes: tuple[str, ...]) -> list[dict[str, int]]:
        places: list[dict[str, int]] = [{}]
        for axis in axes:
            places = [{**place, axis: index} for place in places for index in range(getattr(self, axis))]
        return places

    def rank(self, **place: int) -> int:
        number = 0
        for axis in AXES:
            number = number * getattr(self, axis) + place.get(axis, 0)
        return number

    def groups(self, axis: str) -> list[list[int]]:
        """Every group of an axis, each once, by its first rank."""
        seen: dict[int, list[int]] = {}
        for rank in range(self.world):
            group = self.group(axis, rank)
            seen.setdefault(group[0], group)
        return [seen[first] for first in sorted(seen)]

    def axis_of(self, members: list[int], rank: int) -> str | None:
        """The simplest axis on which `rank` has exactly these: one of the grid, then joined axes, then all ranks."""
        here = sorted(members)
        experts = ("ep", "edp") if self.ep > 1 else ()
        for axis in (*AXES, *experts, *sorted(JOINED, key=lambda joined: len(JOINED[joined]))):
            if self.size(axis) > 1 and here == sorted(self.group(axis, rank)):
                return axis
        return "world" if len(here) == self.world else None

    def table(self, rank: int = 0) -> list[tuple[str, int, str, str]]:
        """(axis, ranks in a group, the group of `rank`, what its members exchange) of every axis in use."""
        axes = [*AXES, *(("ep", "edp") if self.ep > 1 else ())]
        return [
            (axis, self.size(axis), shorten(self.group(axis, rank)), MEANING[axis])
            for axis in axes
            if self.size(axis) > 1
        ]


def shorten(ranks: list[int]) -> str:
    """0, 8, 16 … 56: a group of a thousand in a table."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))} … {ranks[-1]}"
