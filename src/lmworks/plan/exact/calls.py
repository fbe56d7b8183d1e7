"""One row of a step's traffic, and the place of the rank that it is written for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

from ...spec import Grid, RunSpec
from ..case import Case
from ..pipelines.stages import Stage
from .shards import FP32, rank_stages

# In the passes of every micro-batch; in the last micro-batch's backward pass alone; once, when all passes are over.
FORWARD, BACKWARD, LAST, STEP = "forward", "backward", "last backward", "step"


@dataclass(frozen=True)
class Collective:
    """Calls of one kind; bytes are the messages of all of them, in the convention of `parallel.comm_counter`.

    The members of the group are `stride` global ranks apart. A "recv" is the other end of somebody's "send": it is
    listed because it is counted, and costs nothing beside that.
    """

    kind: str
    what: str
    group: str  # mesh axis, "world", or "ends": the first and the last rank of a pipeline
    ranks: int
    stride: int
    count: int  # in a step
    bytes: int
    when: str  # forward, backward, last backward, step


@dataclass(frozen=True)
class RankContext:
    """A rank of a run, and the sizes that its messages are made of."""

    spec: RunSpec
    case: Case
    grid: Grid
    rank: int
    coords: dict[str, int]
    stages: list[Stage]

    @classmethod
    def of(cls, spec: RunSpec, rank: int) -> Self:
        case, grid = Case.of(spec), Grid.of(spec.parallel)
        place = grid.coordinates(rank)
        return cls(spec, case, grid, rank, place, rank_stages(case, place["pp"]))

    @cached_property
    def tokens(self) -> int:
        """Of one micro-batch, on each rank that shares its sequences over cp."""
        return self.spec.data.micro_batch * self.spec.data.seq // self.spec.parallel.cp

    @property
    def width(self) -> int:
        """Bytes of a number in the compute precision."""
        return FP32 if self.spec.precision.compute == "fp32" else 2

    @property
    def stream(self) -> int:
        """Bytes of a number of the residual stream."""
        return self.case.software.stream

    def collective(self, kind: str, what: str, group: str, count: int, size: int, when: str) -> Collective:
        """`count` calls with a message of `size` bytes each."""
        return self.bulk_collective(kind, what, group, count, count * size, when)

    def bulk_collective(self, kind: str, what: str, group: str, count: int, size: int, when: str) -> Collective:
        """`count` calls of `size` bytes in all."""
        ranks = 2 if group == "ends" else self.grid.size(group)
        return Collective(kind, what, group, ranks, stride(self.grid, group), count, size, when)


def stride(grid: Grid, group: str) -> int:
    """Global ranks between neighbours of a group: how many of them fit into one node follows from it."""
    stage = grid.world // grid.pp
    return {
        "world": 1,
        "tp": 1,
        "cp": grid.tp,
        "ep": grid.tp,
        "shard": grid.tp,
        "dp_cp": grid.tp,
        "edp": grid.ep * grid.tp,
        "dp": grid.cp * grid.tp,
        "dp_shard": grid.cp * grid.tp,
        "dp_replicate": grid.dp_shard * grid.cp * grid.tp,
        "pp": stage,
        "ends": (grid.pp - 1) * stage,
    }[group]


class Calls(Protocol):
    """A row of this table, or of one that was counted (`parallel.comm_counter.Row`)."""

    @property
    def kind(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def bytes(self) -> int: ...


def by_kind(rows: Iterable[Calls]) -> dict[str, tuple[int, int]]:
    """Kind → (count, bytes)."""
    total: dict[str, tuple[int, int]] = {}
    for row in rows:
        count, size = total.get(row.kind, (0, 0))
        total[row.kind] = (count + row.count, size + row.bytes)
    return total
