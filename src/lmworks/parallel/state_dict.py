"""Model and optimizer as one dictionary keyed by parameter name, whatever the layout.

A weight that is sharded over ranks appears as a DTensor of its whole shape, so Torch Distributed Checkpoint writes each
part once and can load it into any other layout. Optimizer states are named after their weight: optimizers number their
parameters in an order that another layout changes, names do not. What a parameter group is *set* to (betas, decay,
rate …) follows from the spec and the step, and is not saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .data_parallel import Shard
from .mesh import Mesh
from .sharding_plan import ShardingPlan

ORDER = ("shard", "edp", "ep", "tp")  # of axes in the grid: data-parallel sharding outermost


SliceMesh = Callable[..., Any]  # `Mesh.device_mesh`, or the same once for each mesh and axes


def as_dtensor(
    shard: Shard, local: Tensor, sharding: ShardingPlan, mesh: Mesh | None, slice_mesh: SliceMesh = Mesh.device_mesh
) -> Tensor:
    """`local`, shaped like the shard's leaf, as a part of the whole tensor."""
    if mesh is None:
        return local
    rows = shard.rows
    if rows == "flat":
        local, rows = all_gather_flat(local, shard.shape, mesh), None
    cuts = {**({rows: 0} if rows else {}), **sharding.axes(shard.name)}
    if not cuts:
        return local
    from torch.distributed.tensor import DTensor  # takes seconds to import, and one process does without
    from torch.distributed.tensor import Shard as Rows
    from torch.distributed.tensor.placement_types import _StridedShard

    names = [axis for axis in ORDER if axis in cuts]
    shape = sharding.shape(shard.name, shard.shape)
    placements: list[Any] = []
    for index, axis in enumerate(names):
        # Rows are sharded last but are the outermost axis: each rank has a strip of every tensor-parallel part's rows.
        inner = 1
        for later in names[index + 1 :]:
            inner *= mesh.size(later) if cuts[later] == cuts[axis] else 1
        strip = axis == rows and inner > 1
        placements.append(_StridedShard(cuts[axis], split_factor=inner) if strip else Rows(cuts[axis]))
    stride = torch.empty(shape, device="meta").stride()
    where = mesh if local.device.type == mesh.device_type else mesh.on_host()  # a DTensor would move what is offloaded
    return DTensor.from_local(local, slice_mesh(where, *names), placements, run_check=False, shape=shape, stride=stride)


def all_gather_flat(local: Tensor, shape: torch.Size, mesh: Mesh) -> Tensor:
    """FSDP1 cuts a weight into runs of elements, one a rank, that no DTensor describes: here it is made whole, a copy.

    Then every rank holds all of it: for the size of model that FSDP1 is still used for.
    """
    sizes = flat_sizes(local, mesh)
    room = local.new_zeros(max(sizes))
    room[: local.numel()] = local.flatten()
    runs = local.new_empty(len(sizes) * max(sizes))
    dist.all_gather_into_tensor(runs, room, group=mesh.group("shard"))
    parts = [run[:size] for run, size in zip(runs.split(max(sizes)), sizes, strict=True)]
    return torch.cat(parts).view(shape)


def flat_sizes(local: Tensor, mesh: Mesh) -> list[int]:
    sizes = torch.zeros(mesh.size("shard"), dtype=torch.long, device=local.device)
    dist.all_gather_into_tensor(sizes, torch.tensor([local.numel()], device=local.device), group=mesh.group("shard"))
    return [int(size) for size in sizes]


@torch.no_grad()
def load_into(shards: list[Shard], optimizer: Optimizer, state: dict[str, Any], mesh: Mesh | None) -> None:
    """Bring what was loaded into `state` to where it is not already: most of it is loaded in place.

    Not FSDP1's runs, of which `state` holds whole copies, and not the second copy of a tied embedding, where a rank
    holds the first stage and the last.
    """
    for shard in shards:
        run = slice(None)
        if shard.rows == "flat" and mesh is not None:
            sizes, rank = flat_sizes(shard.leaf, mesh), mesh.rank("shard")
            run = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        copy_loaded(shard.leaf, state["model"][shard.name], run)
        if "optim" not in state and "low" in optimizer.state.get(shard.leaf, {}):
            optimizer.state[shard.leaf]["low"].zero_()  # weights of another run: those below them are not its own
        for key, value in optimizer.state.get(shard.leaf, {}).items() if "optim" in state else ():
            copy_loaded(value, state["optim"][f"{shard.name}.{key}"], run if value.dim() else slice(None))


def copy_loaded(here: Tensor, loaded: Tensor, run: slice) -> None:
    local: Tensor = loaded.to_local() if hasattr(loaded, "to_local") else loaded  # of a DTensor
    if local.data_ptr() != here.data_ptr() or local.shape != here.shape:
        here.copy_(local.flatten()[run].view_as(here))


def optimizer_state(
    optimizer: Optimizer, shards: list[Shard], sharding: ShardingPlan, mesh: Mesh | None, slice_mesh: SliceMesh
) -> dict[str, Tensor]:
    """{"weight.name.exp_avg": …}; before the first step, the zeros that it starts from."""
    init_optimizer_state(optimizer)
    state: dict[str, Tensor] = {}
    moments = next(({k: v for k, v in known.items() if v.dim()} for known in optimizer.state.values()), {})
    for shard in shards:
        own = optimizer.state.get(shard.leaf, {})
        if not own and shard.rows == "flat":  # a rank without elements takes part in joining those of the others
            own = {key: shard.leaf.detach().new_empty(0) for key in moments}
        for key, value in own.items():
            cut = value.shape == shard.leaf.shape and value.dim() > 0
            state[f"{shard.name}.{key}"] = as_dtensor(shard, value, sharding, mesh, slice_mesh) if cut else value
    return state


def init_optimizer_state(optimizer: Optimizer) -> None:
    """Moments of zero and a count of zero, as the first step would make them, for every weight without a state.

    The optimizer makes them itself when it steps: with zero gradients and a rate of zero, which changes nothing.
    """
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
    if not leaves or all(leaf in optimizer.state for leaf in leaves):
        return
    gradients = [leaf.grad for leaf in leaves]
    rates = [group["lr"] for group in optimizer.param_groups]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient
        if "step" in optimizer.state[leaf]:
            optimizer.state[leaf]["step"].zero_()


def training_state(
    optimizer: Optimizer, shards: list[Shard], sharding: ShardingPlan, mesh: Mesh | None
) -> dict[str, Any]:
    """The live tensors, to be saved or loaded into."""
    slice_mesh = functools.cache(Mesh.device_mesh)
    weights = {shard.name: as_dtensor(shard, shard.leaf.detach(), sharding, mesh, slice_mesh) for shard in shards}
    return {"model": weights, "optim": optimizer_state(optimizer, shards, sharding, mesh, slice_mesh)}
