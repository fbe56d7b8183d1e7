"""The process groups of the grid of ranks (`spec.Grid`)."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..spec import Grid
from ..spec.grid import AXES


class Mesh:
    """This rank's place in the grid. Made once by every rank, after `init_process_group`."""

    def __init__(self, grid: Grid, device_type: str) -> None:
        self.grid, self.device_type = grid, device_type
        self.place = grid.coordinates(dist.get_rank())
        # One device mesh for each factorization of the ranks: axes that act together are one axis of it.
        device_meshes = [AXES, ("pp", "dp", "cp", "tp"), ("pp", "dp_cp", "tp"), ("pp", "dp_replicate", "shard", "tp")]
        self.device_meshes = {axes: self.make_device_mesh(axes) for axes in device_meshes}
        if grid.ep > 1:  # copies of the model are part of edp where nothing is sharded
            replicas = ("dp_replicate",) if grid.experts_over == "shard" else ()
            axes = ("pp", *replicas, "edp", "ep", "tp")
            self.device_meshes[axes] = self.make_device_mesh(axes)

    def make_device_mesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        ranks = torch.arange(self.grid.world).view([self.grid.size(axis) for axis in axes])
        return DeviceMesh(self.device_type, ranks, mesh_dim_names=axes)

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """A mesh of these axes in grid order, e.g. ("dp_replicate", "shard") for HSDP.

        It takes a millisecond, and is not kept: it holds tensors, which a simulated rank would count.
        """
        return self.cut(*axes)[axes if len(axes) > 1 else axes[0]]

    def cut(self, *axes: str) -> DeviceMesh:
        """A mesh of all ranks that has these axes."""
        for names, mesh in self.device_meshes.items():
            if set(axes) <= set(names):
                return mesh
        raise KeyError(f"{axes} are not axes of one cut of the grid")

    def group(self, axis: str) -> ProcessGroup:
        if axis == "world":
            group = dist.group.WORLD
            assert group is not None
            return group
        return self.cut(axis).get_group(axis)

    def size(self, axis: str) -> int:
        return self.grid.size(axis)

    def rank(self, axis: str) -> int:
        """This rank's place on an axis."""
        return self.place[axis]

    @functools.cache  # noqa: B019  # a mesh lives as long as its run
    def on_host(self) -> Mesh:
        """The same grid for tensors in host memory."""
        return Mesh(self.grid, "cpu")
