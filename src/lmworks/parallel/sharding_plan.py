"""Which part of each weight a rank holds.

Tensor and expert parallelism shard a weight first: from then on a rank's module holds a plain, smaller tensor.
`ShardingPlan` records, by name, how each was sharded, for initial weights, checkpoints and norms of whole weights.
Data-parallel sharding (FSDP2, ZeRO) comes after it and always shards rows of what is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .mesh import Mesh


@dataclass(frozen=True)
class WeightShard:
    shape: torch.Size  # of the whole weight
    axes: dict[str, int] = field(default_factory=dict)  # mesh axis ("ep", "tp") → dimension that it shards

    def without(self, axis: str, ranks: int) -> WeightShard:
        """Of a rank's part along `axis`, taken for the whole."""
        if axis not in self.axes:
            return self
        sizes = [size // ranks if dim == self.axes[axis] else size for dim, size in enumerate(self.shape)]
        return WeightShard(torch.Size(sizes), {other: dim for other, dim in self.axes.items() if other != axis})


@dataclass
class ShardingPlan:
    """Sharded weights, and replicated ones whose gradient on a rank is only a part of the sum."""

    by_name: dict[str, WeightShard] = field(default_factory=dict)
    partial_grads: dict[str, str] = field(default_factory=dict)  # name → mesh axis over which to sum its gradient

    def shard_weight(self, module: nn.Module, prefix: str, name: str, axis: str, dim: int, mesh: Mesh) -> None:
        """Replace the parameter `name` of `module` by this rank's chunk along `dim`, on the meta device too."""
        whole = getattr(module, name)
        full_name = f"{prefix}{name}"
        before = self.by_name.get(full_name, WeightShard(whole.shape))
        self.by_name[full_name] = WeightShard(before.shape, {**before.axes, axis: dim})
        part = whole.detach().chunk(mesh.size(axis), dim)[mesh.rank(axis)].clone(memory_format=torch.contiguous_format)
        setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))

    def local_part(self, name: str, whole: Tensor, mesh: Mesh) -> Tensor:
        """This rank's part of a whole weight, before data-parallel sharding."""
        for axis, dim in self.axes(name).items():
            whole = whole.chunk(mesh.size(axis), dim)[mesh.rank(axis)]
        return whole

    def without(self, axis: str, mesh: Mesh) -> ShardingPlan:
        """The same where the parts of `axis` are taken for whole weights."""
        return ShardingPlan({name: weight.without(axis, mesh.size(axis)) for name, weight in self.by_name.items()})

    def axes(self, name: str) -> dict[str, int]:
        return self.by_name[name].axes if name in self.by_name else {}

    def shape(self, name: str, local: torch.Size) -> torch.Size:
        """Of the whole weight, given what a rank holds before data-parallel sharding."""
        return self.by_name[name].shape if name in self.by_name else local
