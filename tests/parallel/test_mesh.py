"""Process groups are those that the grid names; collectives carry gradients back; splits give each rank its part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lmworks.parallel import collectives
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.sharding_plan import ShardingPlan
from lmworks.spec import Grid

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "dp", "dp_cp", "shard", "ep", "edp", "world")


def groups_match(rank: int, grids: list[Grid]) -> None:
    for grid in grids:
        mesh = Mesh(grid, "cpu")
        for axis in AXES:
            if grid.ep == 1 and axis in ("ep", "edp"):
                continue
            assert dist.get_process_group_ranks(mesh.group(axis)) == grid.group(axis, rank), (grid, axis)
            assert dist.get_rank(mesh.group(axis)) == mesh.rank(axis)
        assert mesh.device_mesh("dp_replicate", "shard").mesh.tolist() == [
            grid.group("shard", first) for first in grid.group("dp_replicate", grid.group("shard", rank)[0])
        ]
        with pytest.raises(KeyError):
            mesh.device_mesh("cp", "shard")


def test_groups_are_those_of_the_grid() -> None:
    grids = [Grid(pp=2, dp_shard=2, tp=2), Grid(dp_replicate=2, dp_shard=2, cp=2, ep=4)]
    grids.append(Grid(dp_replicate=4, tp=2, ep=2, experts_over="dp_cp"))
    on_ranks(8, groups_match, grids)


def apply_all(rank: int, world: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(result, gradient of x) of each operation, for a loss that weighs every element by its place and rank."""
    group = dist.group.WORLD
    assert group is not None
    found = {}
    operations = {
        "copy": lambda x: collectives.copy_to_region(x, group),
        "total": lambda x: collectives.reduce_from_region(x, group),
        "gather": lambda x: collectives.gather_to_region(x, 1, group),
        "scatter": lambda x: collectives.scatter_from_region(x, 1, group),
        "exchange": lambda x: collectives.differentiable_all_to_all(x, [2, 2], [2, 2], group),
    }
    for name, operation in operations.items():
        x = values(rank).requires_grad_()
        y = operation(x)
        (y * weights(y, rank)).sum().backward()
        assert x.grad is not None
        found[name] = y.detach(), x.grad
    return found


def values(rank: int) -> torch.Tensor:
    return torch.arange(16.0).view(4, 4) + 100 * rank


def weights(y: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.arange(float(y.numel())).view_as(y) * (1 + rank)


def test_every_collective_and_its_gradient() -> None:
    """Against the same sums written out for all ranks at once, whose gradients autograd gives."""
    found = on_ranks(2, apply_all, 2)
    xs = [values(rank).requires_grad_() for rank in range(2)]
    both = torch.cat(xs, dim=1)
    expected = {
        "copy": xs,
        "total": [xs[0] + xs[1]] * 2,
        "gather": [both] * 2,
        "scatter": list((xs[0] + xs[1]).chunk(2, dim=1)),
        "exchange": [torch.cat([x.chunk(2)[rank] for x in xs]) for rank in range(2)],
    }
    for name, ys in expected.items():
        loss = torch.stack([(y * weights(y, rank)).sum() for rank, y in enumerate(ys)]).sum()
        gradients = list(torch.autograd.grad(loss, xs))
        if name == "copy":  # equal values on all ranks: each gets the sum of the gradients
            gradients = [gradients[0] + gradients[1]] * 2
        if name == "total":  # one value that all ranks have: its gradient counts once on each
            gradients = [weights(ys[0], rank) for rank in range(2)]
        for rank in range(2):
            result, gradient = found[rank][name]
            assert torch.equal(result, ys[rank].detach()), name
            assert torch.equal(gradient, gradients[rank]), name


def cut_twice(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = Mesh(Grid(dp_shard=2, tp=2, ep=2), "cpu")
    layer = nn.Module()
    whole = torch.arange(4 * 6.0).view(4, 6)
    layer.weight = nn.Parameter(whole.clone())
    sharding = ShardingPlan()
    sharding.shard_weight(layer, "mlp.", "weight", "ep", 0, mesh)
    sharding.shard_weight(layer, "mlp.", "weight", "tp", 1, mesh)
    assert sharding.shape("mlp.weight", layer.weight.shape) == (4, 6)
    assert sharding.axes("mlp.weight") == {"ep": 0, "tp": 1}
    return layer.weight.detach(), sharding.local_part("mlp.weight", whole, mesh)


def test_a_weight_that_is_cut_twice() -> None:
    whole = torch.arange(4 * 6.0).view(4, 6)
    parts = on_ranks(4, cut_twice)
    for rank, (cut, part) in enumerate(parts):
        ep, tp = divmod(rank, 2)
        assert torch.equal(cut, whole[2 * ep : 2 * ep + 2, 3 * tp : 3 * tp + 3])
        assert torch.equal(part, cut)
