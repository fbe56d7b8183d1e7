"""The grid of ranks: every rank has one place, and groups divide the world."""

from __future__ import annotations

import itertools

import pytest

from lmworks.spec import Grid, load_run
from lmworks.spec.grid import AXES

GRIDS = [
    Grid(),
    Grid(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4),
    Grid(pp=3, dp_shard=4, tp=2, ep=2),
    Grid(dp_replicate=4, cp=2, ep=8, experts_over="dp_cp"),
    Grid(pp=8, dp_shard=16, tp=8),
]
ALL = (*AXES, "dp", "dp_cp", "shard", "ep", "edp", "world")


def test_tensor_parallel_neighbours_are_adjacent_and_pipeline_stages_furthest_apart() -> None:
    grid = Grid(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    strides = {axis: grid.group(axis, 0)[1] for axis in AXES}
    assert strides == {"tp": 1, "cp": 2, "dp_shard": 4, "dp_replicate": 8, "pp": 16}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("axis", ALL)
def test_the_groups_of_an_axis_divide_the_world(grid: Grid, axis: str) -> None:
    groups = grid.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world))
    assert {len(group) for group in groups} == {grid.size(axis)}
    for group in groups:
        for index, rank in enumerate(group):
            assert grid.group(axis, rank) == group and grid.coordinates(rank)[axis] == index


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_coordinates_name_one_rank(grid: Grid) -> None:
    for rank in range(grid.world):
        place = grid.coordinates(rank)
        assert grid.rank(**{axis: place[axis] for axis in AXES}) == rank
    members = {tuple(grid.coordinates(rank)[axis] for axis in AXES) for rank in range(grid.world)}
    assert len(members) == grid.world


def test_experts_are_folded_into_ranks_that_share_a_pipeline_stage_and_a_tensor_slice() -> None:
    grid = Grid(pp=2, dp_shard=4, tp=2, ep=2)
    for rank in range(grid.world):
        place = grid.coordinates(rank)
        others = [grid.coordinates(other) for other in grid.group("ep", rank)]
        assert {(other["pp"], other["tp"]) for other in others} == {(place["pp"], place["tp"])}
    assert grid.size("edp") * grid.ep == grid.size("shard")
    assert grid.group("ep", 0) == [0, 2] and grid.group("edp", 0) == [0, 4]


def test_the_table_lists_axes_in_use() -> None:
    spec = load_run("llama3-70b", ["parallel.tp=8", "parallel.pp=8", "parallel.dp=16", "parallel.strategy=fsdp2"])
    table = Grid.of(spec.parallel).table(777)
    assert [(axis, size) for axis, size, _, _ in table] == [("pp", 8), ("dp_shard", 16), ("tp", 8)]
    assert table[2][2] == "776, 777, 778, 779, 780, 781, 782, 783"
    assert table[1][2] == "769, 777, 785 … 889"
